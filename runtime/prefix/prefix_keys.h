// Exact keys of the mid region of a prefix, of all heads or of some, for selection. Prefixes of
// which one continues the other may share them: the longer one writes its keys behind those of the
// shorter one, which never change.
//
// Thread-safety: ranges of different tokens may be used concurrently.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/prefix/selector_memory.h"
#include "storage/io/file.h"

namespace prefixd {

class PrefixKeys {
 public:
  // strides: [heads] bytes of a key; 0 where none are kept. memory: of `room` tokens of all others.
  // bad_alloc as with any allocation.
  PrefixKeys(const std::vector<size_t>& strides, uint32_t room, SelectorMemory::Lease memory)
      : room_(room), memory_(std::move(memory)) {
    heads_.reserve(strides.size());
    for (const size_t stride : strides) {
      bytes_ += uint64_t{stride} * room;
      heads_.push_back(stride > 0 ? storage::AlignedBuffer(stride * room)
                                  : storage::AlignedBuffer());
    }
  }

  uint32_t room() const { return room_; }  // tokens
  uint64_t bytes() const { return bytes_; }
  bool has(size_t head) const { return heads_[head].data() != nullptr; }
  std::byte* rows(size_t head) const { return heads_[head].data(); }  // REQUIRES: has(head)
  // Takes the tokens [from, to) for one prefix to write; false: there is no room, or another one
  // has taken what is behind `from`.
  bool Take(uint32_t from, uint32_t to) {
    return to <= room_ && taken_.compare_exchange_strong(from, to);
  }

 private:
  const uint32_t room_;
  uint64_t bytes_ = 0;
  const SelectorMemory::Lease memory_;
  std::vector<storage::AlignedBuffer> heads_;
  std::atomic<uint32_t> taken_{0};
};

}  // namespace prefixd
