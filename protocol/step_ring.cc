#include "protocol/step_ring.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"

namespace prefixd {
namespace {

constexpr uint64_t kPage = 4096, kLine = 64;
static_assert((kMostRingSlots + 1) * kLine <= kPage);

enum SlotState : uint32_t { kIdle = 0, kAsked = 1, kAnswered = 2 };

std::atomic_ref<uint32_t> Atomic(uint32_t* word) { return std::atomic_ref<uint32_t>(*word); }

}  // namespace

uint64_t RingShape::bytes() const { return kPage + slots * slot_bytes; }

Status RingShape::Check() const {
  if (slots < 1 || slots > kMostRingSlots || slot_bytes < kPage || slot_bytes % kPage != 0 ||
      slot_bytes > (uint64_t{1} << 32) - kPage) {
    return InvalidArgument("a ring of " + std::to_string(slots) + " slots of " +
                           std::to_string(slot_bytes) + " bytes");
  }
  return {};
}

StepRing::~StepRing() {
  if (bell_ >= 0) ::close(bell_);
}

StepRing::StepRing(StepRing&& other) noexcept { *this = std::move(other); }

StepRing& StepRing::operator=(StepRing&& other) noexcept {
  std::swap(region_, other.region_);
  std::swap(shape_, other.shape_);
  std::swap(bell_, other.bell_);
  return *this;
}

Result<StepRing> StepRing::Create(const RingShape& shape) {
  PREFIXD_TRY(shape.Check());
  StepRing ring;
  ring.shape_ = shape;
  PREFIXD_ASSIGN(ring.region_, SharedRegion::Create(shape.bytes()));
  ring.bell_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (ring.bell_ < 0) {
    return Error{Code::kResourceExhausted, std::string("eventfd: ") + std::strerror(errno)};
  }
  return ring;
}

Result<StepRing> StepRing::Map(int memory, int bell, const RingShape& shape) {
  StepRing ring;
  ring.bell_ = bell;
  const Status fits = shape.Check();
  if (!fits.ok()) {
    ::close(memory);
    return fits.error();
  }
  ring.shape_ = shape;
  PREFIXD_ASSIGN(ring.region_, SharedRegion::Map(memory, shape.bytes()));
  ring.region_.CloseFd();
  return ring;
}

std::span<std::byte> StepRing::slot(uint32_t i) const {
  PREFIXD_CHECK(i < shape_.slots, i, shape_.slots);
  return region_.bytes().subspan(kPage + i * shape_.slot_bytes, shape_.slot_bytes);
}

uint32_t* StepRing::word(uint32_t line, uint32_t i) const {
  PREFIXD_CHECK(line <= shape_.slots, line, shape_.slots);
  return reinterpret_cast<uint32_t*>(region_.bytes().data() + line * kLine) + i;
}

// Either the daemon's thread sees the state after it has stopped polling, or the client sees that
// it has: both orders are sequentially consistent. So are those of Sleep, Answer and Wake.
void StepRing::Ask(uint32_t i) const {
  Atomic(word(i + 1, 2)).store(0);
  Atomic(word(i + 1, 0)).store(kAsked);
  if (Atomic(word(0, 0)).load() != 0) return;
  const uint64_t one = 1;
  while (::write(bell_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

bool StepRing::answered(uint32_t i) const { return Atomic(word(i + 1, 0)).load() == kAnswered; }

void StepRing::Sleep(uint32_t i, std::chrono::nanoseconds time) const {
  uint32_t* const state = word(i + 1, 0);
  Atomic(word(i + 1, 1)).store(1);
  const uint32_t seen = Atomic(state).load();
  if (seen != kAnswered) {
    const auto s = std::chrono::duration_cast<std::chrono::seconds>(time);
    const timespec wait{static_cast<time_t>(s.count()), static_cast<long>((time - s).count())};
    ::syscall(SYS_futex, state, FUTEX_WAIT, seen, &wait, nullptr, 0);
  }
  Atomic(word(i + 1, 1)).store(0);
}

bool StepRing::asked(uint32_t i) const { return Atomic(word(i + 1, 0)).load() == kAsked; }

void StepRing::Cancel(uint32_t i) const { Atomic(word(i + 1, 2)).store(1); }

void StepRing::Answer(uint32_t i) const { Atomic(word(i + 1, 0)).store(kAnswered); }

void StepRing::Wake(uint32_t i) const {
  if (Atomic(word(i + 1, 1)).load() == 0) return;
  ::syscall(SYS_futex, word(i + 1, 0), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void StepRing::SetPolling(bool polling) const { Atomic(word(0, 0)).store(polling ? 1 : 0); }

void PollPause(uint32_t round) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
  if (round % 32 == 31) ::sched_yield();
}

}  // namespace prefixd
