// Copies rows from wherever they lie into shared memory, a tile ahead of the computation. Internal
// to gpu/.
//
// All threads of a block do three steps: they look up and check the addresses of a tile; they copy
// its bytes as they are, 16 bytes a thread and neighbouring threads in one row, during the
// computation on the tile before; they decode them to float32 and check them. With four blocks on a
// multiprocessor some tens of kilobytes are in flight at any time, more than any bus needs.
#pragma once

#include "gpu/device/async_copy.cuh"
#include "gpu/step/group_view.cuh"

namespace prefixd::gpu::internal {

struct RowTiles {
  const StepParams& p;
  const GroupRows& rows;
  uint32_t group;
  DeviceRow* address;  // [kTile], for the tile that is fetched next
  std::byte* raw;      // [kTile][RawRow::bytes]
  float *k, *v;        // [kTile][Pad4(key_dim)], [kTile][Pad4(value_dim)]

  // Looks up rows [begin, begin + n). A null or misaligned row would end the whole CUDA context, so
  // it is refused and read as zeros.
  __device__ void LookUp(uint32_t begin, uint32_t n) const {
    const uint32_t r = threadIdx.x;
    if (r >= n) return;
    DeviceRow row = RowAddress(p, rows.first + begin + r);
    const uintptr_t element = ElementBytes(p.shape.row.dtype);
    if (!row.key || !row.value || reinterpret_cast<uintptr_t>(row.key) % element != 0 ||
        reinterpret_cast<uintptr_t>(row.value) % element != 0) {
      Fault(p.args.errors, group, GroupFault::kAddress, begin + r);
      row = {};
    }
    address[r] = row;
  }

  // Fetches the bytes of the n rows whose addresses were looked up (a barrier lies between).
  __device__ void Fetch(uint32_t n) const {
    const RawRow at(p.shape.row);
    const uint32_t units = at.bytes / 16, key_units = at.value_at / 16;
    for (uint32_t i = threadIdx.x; i < n * units; i += kThreads) {
      const uint32_t r = i / units, unit = i % units;
      const DeviceRow row = address[r];
      const bool key = unit < key_units;
      const uint32_t offset = 16 * (key ? unit : unit - key_units);
      const auto* part = static_cast<const std::byte*>(key ? row.key : row.value);
      FetchUnit(raw + size_t{r} * at.bytes + 16 * unit, part, offset,
                key ? at.key_bytes : at.value_bytes);
    }
  }

  // Decodes to float32, rows from n on as zeros, so that nothing uninitialised is multiplied, and
  // reports elements that are not finite. kept: where the rows are also stored in global memory, or
  // null.
  __device__ void Decode(uint32_t begin, uint32_t n, float* kept) const {
    const RowShape& shape = p.shape.row;
    const RawRow at(shape);
    const uint32_t dh = shape.key_dim, width = dh + shape.value_dim;
    const uint32_t lane = threadIdx.x % kWarp;
    for (uint32_t r = threadIdx.x / kWarp; r < kTile; r += kWarps) {
      const std::byte* row = raw + size_t{r} * at.bytes;
      bool key_bad = false, value_bad = false;
      for (uint32_t e = lane; e < dh; e += kWarp) {
        const float x = r < n ? Element(row, shape.dtype, e) : 0.0f;
        k[r * Pad4(dh) + e] = x;
        if (kept && r < n) kept[size_t{r} * width + e] = x;
        key_bad |= !Finite(x);
      }
      for (uint32_t e = lane; e < shape.value_dim; e += kWarp) {
        const float x = r < n ? Element(row + at.value_at, shape.dtype, e) : 0.0f;
        v[r * Pad4(shape.value_dim) + e] = x;
        if (kept && r < n) kept[size_t{r} * width + dh + e] = x;
        value_bad |= !Finite(x);
      }
      if (key_bad) Fault(p.args.errors, group, GroupFault::kRow, 2 * (begin + r));
      if (value_bad) Fault(p.args.errors, group, GroupFault::kRow, 2 * (begin + r) + 1);
    }
  }

 private:
  // Fetches bytes [offset, offset + 16) of a part that may end before.
  __device__ void FetchUnit(std::byte* to, const std::byte* part, uint32_t offset,
                            uint32_t part_bytes) const {
    if (part && reinterpret_cast<uintptr_t>(part) % 16 == 0 && offset + 16 <= part_bytes) {
      CopyAsync16(to, part + offset);
      return;
    }
    for (uint32_t b = 0; b < 16; b += 2) {  // an element is two or four bytes
      const bool there = part && offset + b < part_bytes;
      *reinterpret_cast<uint16_t*>(to + b) =
          there ? *reinterpret_cast<const uint16_t*>(part + offset + b) : uint16_t{0};
    }
  }
};

}  // namespace prefixd::gpu::internal
