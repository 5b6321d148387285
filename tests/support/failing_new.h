// Replaces operator new and lets the n-th allocation of chosen threads fail. Include it in one file
// of a test program.
//
// What RocksDB allocates is left alone: it does not survive an exception. The JSON library
// allocates a few dozen bytes in destructors: where it is used, only larger allocations can fail.
#pragma once

#include <dlfcn.h>
#include <execinfo.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace prefixd::testing {

enum class Victims : uint8_t { kNone, kCaller, kOthers };  // the thread that called Arm; all others

class FailingNew {
 public:
  // Makes the n-th allocation of at least `bytes` from now on fail, counted from 1; only that one.
  static void Arm(Victims victims, int64_t n, std::size_t bytes = 1) {
    void* frame = nullptr;
    ::backtrace(&frame, 1);  // allocates when it is called first
    caller() = true;
    failed() = false;
    left() = n;
    least() = bytes;
    whose() = victims;
  }
  // Returns whether an allocation failed.
  static bool Disarm() {
    whose() = Victims::kNone;
    return failed();
  }

  static bool Fails(std::size_t bytes) {
    const Victims victims = whose();
    if (victims == Victims::kNone || bytes < least() || (victims == Victims::kCaller) != caller())
      return false;
    if (left().fetch_sub(1) > 1 || failed() || InRocksDb()) return false;
    return !failed().exchange(true);
  }

 private:
  static bool InRocksDb() {
    constexpr int kDepth = 64;
    void* frames[kDepth];
    const int n = ::backtrace(frames, kDepth);
    for (int i = 0; i < n; ++i) {
      Dl_info info{};
      if (::dladdr(frames[i], &info) == 0) continue;
      if (info.dli_fname && std::strstr(info.dli_fname, "librocksdb")) return true;
    }
    return false;
  }

  static std::atomic<Victims>& whose() {
    static std::atomic<Victims> value{Victims::kNone};
    return value;
  }
  static std::atomic<std::size_t>& least() {
    static std::atomic<std::size_t> value{1};
    return value;
  }
  static std::atomic<int64_t>& left() {
    static std::atomic<int64_t> value{0};
    return value;
  }
  static std::atomic<bool>& failed() {
    static std::atomic<bool> value{false};
    return value;
  }
  static bool& caller() {
    static thread_local bool value = false;
    return value;
  }
};

inline void* AllocateOrFail(std::size_t size, std::size_t alignment) {
  void* memory = nullptr;
  if (!FailingNew::Fails(size)) {
    memory = alignment > 0
                 ? std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
                 : std::malloc(size);
  }
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace prefixd::testing

void* operator new(std::size_t size) { return prefixd::testing::AllocateOrFail(size, 0); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return prefixd::testing::AllocateOrFail(size, static_cast<std::size_t>(alignment));
}
// Compiled into their callers they would free, as g++ sees it, what operator new gave.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
