#include "base/opened_here.h"

#include <pthread.h>

#include <atomic>

namespace prefixd {
namespace {

std::atomic<uint64_t> forks{0};  // between the first process and this one

}  // namespace

uint64_t OpenedHere::Generation() {
  // Where the handler cannot be kept, for lack of memory, a child is not told apart.
  static const int kept =
      ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(kept);
  return forks.load(std::memory_order_relaxed);
}

Error OpenedHere::Forked() {
  return {Code::kFailedPrecondition,
          "this was opened before fork(), by another process; connect or open again in this one "
          "(multiprocessing: the start method 'spawn', or connect in each worker)"};
}

}  // namespace prefixd
