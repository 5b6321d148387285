// Copies rows from wherever they lie into shared memory, a tile ahead of the computation. Internal
// to gpu/.
//
// A tile's addresses are loaded two tiles ahead and checked one tile ahead; its bytes are then
// copied as they are, 16 bytes a thread and neighbouring threads in one row, during the computation
// on the tile before; each thread decodes to float32, and checks, what it has copied itself.
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

  // Returns the address of this thread's row of [begin, begin + n).
  __device__ DeviceRow LookUp(uint32_t begin, uint32_t n) const {
    const uint32_t r = threadIdx.x;
    return r < n ? RowAddress(p, rows.first + begin + r) : DeviceRow{};
  }

  // Checks the address that was looked up. A null or misaligned row would end the whole CUDA
  // context, so it is refused and read as zeros.
  __device__ void Check(DeviceRow row, uint32_t begin, uint32_t n) const {
    const uint32_t r = threadIdx.x;
    if (r >= n) return;
    const uintptr_t element = ElementBytes(p.shape.row.dtype);
    if (!row.key || !row.value || reinterpret_cast<uintptr_t>(row.key) % element != 0 ||
        reinterpret_cast<uintptr_t>(row.value) % element != 0) {
      Fault(p.args.errors, group, GroupFault::kAddress, begin + r);
      row = {};
    }
    address[r] = row;
  }

  // Fetches the bytes of the n rows whose addresses were checked (a barrier lies between).
  __device__ void Fetch(uint32_t n) const {
    const RawRow at(p.shape.row);
    const Share share(at);
    if (share.row >= share.at_once) return;
    const bool key = share.offset < at.value_at;
    const uint32_t offset = key ? share.offset : share.offset - at.value_at;
    for (uint32_t r = share.row; r < n; r += share.at_once) {
      const auto* part = static_cast<const std::byte*>(key ? address[r].key : address[r].value);
      FetchUnit(raw + size_t{r} * at.bytes + share.offset, part, offset,
                key ? at.key_bytes : at.value_bytes);
    }
  }

  // Decodes to float32, rows from n on as zeros, so that nothing uninitialised is multiplied, and
  // reports elements that are not finite. kept: where the rows are also stored in global memory, or
  // null.
  __device__ void Decode(uint32_t begin, uint32_t n, float* kept) const {
    const RowShape& shape = p.shape.row;
    const RawRow at(shape);
    const Share share(at);
    if (share.row >= share.at_once) return;
    const bool key = share.offset < at.value_at;
    const uint32_t dim = key ? shape.key_dim : shape.value_dim;
    const uint32_t first =
        (key ? share.offset : share.offset - at.value_at) / ElementBytes(shape.dtype);
    float* const to = (key ? k : v) + first;
    for (uint32_t r = share.row; r < kTile; r += share.at_once) {
      float x[8] = {};
      if (r < n) Unit(raw + size_t{r} * at.bytes + share.offset, x);
      bool bad = false;
#pragma unroll
      for (uint32_t e = 0; e < 8; ++e) bad |= !Finite(x[e]);
      if (bad) Fault(p.args.errors, group, GroupFault::kRow, 2 * (begin + r) + !key);
      // A unit is one or two runs of four; the last vector may end before the unit does.
      float* row = to + size_t{r} * Pad4(dim);
      auto* runs = reinterpret_cast<float4*>(row);
      if (first < Pad4(dim)) runs[0] = make_float4(x[0], x[1], x[2], x[3]);
      const bool second = shape.dtype != DType::kF32 && first + 4 < Pad4(dim);
      if (second) runs[1] = make_float4(x[4], x[5], x[6], x[7]);
      if (!kept || r >= n) continue;
      const uint32_t width = shape.key_dim + shape.value_dim;
      float* out = kept + size_t{r} * width + (key ? 0 : shape.key_dim) + first;
#pragma unroll
      for (uint32_t e = 0; e < 8; ++e) {
        if (first + e < dim && (e < 4 || shape.dtype != DType::kF32)) out[e] = x[e];
      }
    }
  }

 private:
  // A Share is what a thread copies and decodes: 16 bytes of every so many rows.
  struct Share {
    uint32_t at_once, row, offset;
    __device__ explicit Share(const RawRow& at)
        : at_once(kThreads / (at.bytes / 16)),
          row(threadIdx.x / (at.bytes / 16)),
          offset(threadIdx.x % (at.bytes / 16) * 16) {}
  };

  // Decodes 16 bytes: eight elements, or four of float32 and zeros behind.
  __device__ void Unit(const std::byte* bytes, float (&x)[8]) const {
    const uint4 four = *reinterpret_cast<const uint4*>(bytes);
    const uint32_t word[4] = {four.x, four.y, four.z, four.w};
    const DType dtype = p.shape.row.dtype;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (dtype == DType::kF32) {
        x[i] = __uint_as_float(word[i]);
      } else {
        const float2 pair = Unpack(dtype, word[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }

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
