#include "runtime/store/host_pinning.h"

#include <utility>

#include "prefixd/result.h"
#include "storage/io/errors.h"

#if defined(PREFIXD_HAVE_CUDA)
#include "gpu/device/host_register.h"
#include "prefixd/gpu/device.h"
#endif

namespace prefixd {
namespace {

#if defined(PREFIXD_HAVE_CUDA)
Status Probe() {
  PREFIXD_ASSIGN(const gpu::DeviceInfo device, gpu::ProbeDevice());
  return {};
}
Status Register(std::span<std::byte> block, bool taken) {
  return taken ? gpu::RegisterHostMemory(block) : gpu::UnregisterHostMemory(block);
}
#else
Status Probe() { return Error{Code::kUnavailable, "this build of prefixd has no CUDA"}; }
Status Register(std::span<std::byte>, bool) { return Probe(); }
#endif

}  // namespace

std::shared_ptr<HostPinning> HostPinning::Open() {
  auto pinning = std::make_shared<HostPinning>();
  if (Status there = Probe(); !there.ok()) {
    pinning->usable_ = false;
    pinning->Fail(there.error().message);
  }
  return pinning;
}

std::function<void(std::span<std::byte>, bool)> HostPinning::Hook(
    std::shared_ptr<HostPinning> pinning) {
  if (!pinning->usable_) return nullptr;
  return
      [p = std::move(pinning)](std::span<std::byte> block, bool taken) { p->Block(block, taken); };
}

void HostPinning::Block(std::span<std::byte> block, bool taken) {
  // A block that could not be registered cannot be unregistered either, so only the first failure
  // is kept.
  if (Status done = Register(block, taken); !done.ok()) Fail(done.error().message);
}

void HostPinning::Fail(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (!failure_.empty()) return;
  failure_ = why;
  storage::LogWarning("the host tier is not (wholly) registered with a GPU: " + why);
}

std::string HostPinning::state() const {
  std::lock_guard lock(mutex_);
  return failure_.empty() ? "registered" : failure_;
}

}  // namespace prefixd
