// Encodes where rows lie in a tenant's region of the host tier, and where they go: what a daemon
// answers instead of rows that its client copies itself (docs/protocol.md, "Rows in place").
//
//   offset size
//        0    4  copies
//        4    4  places
//        8   32  each copy: from u64, to u64, to_step u32, first place u32, bytes u16, parts u16,
//                step u16, flags u16
//      ...    2  each place
//
// Part i of a copy lies in the region at from + i * step, and goes to byte to + place * to_step of
// the keys or values, where place is i, or the place of that number from the first place on.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/result.h"
#include "prefixd/row_ref.h"

namespace prefixd::wire {

// The arrays that rows go to, keys and values apart.
struct RowArrays {
  std::span<std::byte> k, v;
};

uint64_t EncodedCopiesBytes(std::span<const RowCopy> copies);
// Every copy lies within `region` and goes into one of the arrays, by at most 4 GiB from part to
// part.
std::vector<std::byte> EncodeCopies(std::span<const RowCopy> copies,
                                    std::span<const std::byte> region, const RowArrays& to);

struct DecodedCopies {
  std::vector<RowCopy> copies;
  std::vector<uint16_t> places;  // that copies point into
};
// kUnavailable: copies that leave the region or the arrays, or write more or fewer bytes than these
// have.
Result<DecodedCopies> DecodeCopies(std::span<const std::byte> bytes,
                                   std::span<const std::byte> region, const RowArrays& to);

}  // namespace prefixd::wire
