#include "tests/support/count_allocations.h"

#include <cstdlib>
#include <new>

namespace prefixd::testing {

std::atomic<uint64_t> allocations{0};

}  // namespace prefixd::testing

namespace {

void* Allocate(std::size_t size, std::size_t alignment) {
  prefixd::testing::allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = alignment > 0
                     ? std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
                     : std::malloc(size);
  if (!memory) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t size) { return Allocate(size, 0); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
