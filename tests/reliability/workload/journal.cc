#include "tests/reliability/workload/journal.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace prefixd::storage::reliability {
namespace {
constexpr size_t kWords = 1 << 20;
constexpr uint64_t kNever = ~0ull;
}  // namespace

struct Journal::Shared {
  std::atomic<uint64_t> used{0};
  std::atomic<uint64_t> cut{kNever};
  uint32_t words[kWords];
};

std::string Event::Text(size_t from) const {
  if (words.size() <= from) return "";
  std::string text(words[from], '\0');
  std::memcpy(text.data(), words.data() + from + 1, text.size());
  return text;
}

Journal::Journal() {
  void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("journal");
    std::abort();
  }
  shared_ = new (memory) Shared;
}

Journal::~Journal() { ::munmap(shared_, sizeof(Shared)); }

void Journal::Append(const Event& event) {
  const std::lock_guard lock(mutex_);
  const uint64_t at = shared_->used;
  const uint64_t end = at + 2 + event.words.size();
  if (end > kWords) {
    std::fprintf(stderr, "the journal is full\n");
    std::_Exit(79);
  }
  shared_->words[at] = static_cast<uint32_t>(event.kind);
  shared_->words[at + 1] = static_cast<uint32_t>(event.words.size());
  std::memcpy(shared_->words + at + 2, event.words.data(), event.words.size() * 4);
  shared_->used.store(end, std::memory_order_release);
}

void Journal::AppendText(EventKind kind, std::string_view text, std::vector<uint32_t> words) {
  const size_t at = words.size();
  words.resize(at + 1 + (text.size() + 3) / 4);
  words[at] = static_cast<uint32_t>(text.size());
  std::memcpy(words.data() + at + 1, text.data(), text.size());
  Append({kind, std::move(words)});
}

void Journal::Cut() { shared_->cut = shared_->used.load(std::memory_order_acquire); }

std::vector<Event> Journal::Take() {
  std::vector<Event> events;
  const uint64_t used = shared_->used.load(std::memory_order_acquire);
  for (uint64_t at = 0; at < used;) {
    const uint32_t n = shared_->words[at + 1];
    const uint32_t* words = shared_->words + at + 2;
    events.push_back(
        {static_cast<EventKind>(shared_->words[at]), {words, words + n}, at >= shared_->cut});
    at += 2 + n;
  }
  shared_->used = 0;
  shared_->cut = kNever;
  return events;
}

}  // namespace prefixd::storage::reliability
