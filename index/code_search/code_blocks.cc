#include "index/code_search/code_blocks.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace prefixd::index {
namespace {

constexpr size_t kLine = 64, kHugePage = size_t{2} << 20;

}  // namespace

CodeMemory::CodeMemory(size_t bytes) : size_(bytes) {
  const bool huge = bytes >= kHugePage;
  const size_t alignment = huge ? kHugePage : kLine;
  const size_t whole = (bytes + alignment - 1) / alignment * alignment;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, whole > 0 ? whole : kLine)));
  if (!data_) throw std::bad_alloc();
  // Fewer misses of the translation buffers; a kernel that has none to give changes nothing.
  if (huge) madvise(data_.get(), whole, MADV_HUGEPAGE);
  std::memset(data_.get(), 0, bytes);
}

void CodeMemory::Free::operator()(std::byte* p) const { std::free(p); }

}  // namespace prefixd::index
