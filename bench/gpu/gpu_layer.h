// Makes one layer of an 8B model for benchmarks of gpu/: 8 KV heads of 4 query heads, dh 128, bf16.
// It has random rows in pinned host memory or on the device, summaries of every kind, and sets that
// rotate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu/device/device_buffer.h"
#include "prefixd/gpu/step.h"

namespace prefixd::bench {

inline constexpr uint32_t kKvHeads = 8, kGroup = 4, kDim = 128, kPhiDim = 128;
inline constexpr RowShape kRow{kDim, kDim, DType::kBf16};
inline constexpr LayerGeometry kLayer{0.08838834764831845f, 0, 0};
inline constexpr uint32_t kAnchors = 20;

enum class Where { kHost, kDevice };

// Holds rows [KV head][token], random with unit variance.
struct LayerRows {
  uint32_t n_tokens = 0;
  gpu::PinnedBuffer host;
  gpu::DeviceBuffer device;

  static Result<LayerRows> Make(uint32_t n_tokens, Where where, gpu::Stream stream);
  const std::byte* Row(uint32_t head, uint32_t token) const {
    const std::byte* base = host.data() ? host.data() : device.data();
    return base + (size_t{head} * n_tokens + token) * kRow.bytes();
  }
  const std::byte* Head(uint32_t head) const { return Row(head, 0); }
};

enum class Completion { kNone, kMean, kRank8, kFullCross, kPhiStored, kPhiRecompute };

// Holds all that a step of the whole layer needs beside its rows, in one block of device memory.
class LayerStep {
 public:
  // Makes `sets` retrieved sets of k random tokens per KV head; the anchors are the first and last
  // rows.
  static Result<LayerStep> Make(const LayerRows& rows, uint32_t k, uint32_t sets,
                                const gpu::DeviceInfo& device, gpu::Stream stream);
  // Enqueues one step with set number `set`.
  Status Launch(Completion completion, uint32_t set, gpu::Stream stream);
  // Returns the first group's error; call it after waiting for the stream.
  Status Errors(gpu::Stream stream) const;
  // Returns the bytes of one step's rows.
  size_t row_bytes() const { return size_t{kKvHeads} * (k_ + kAnchors) * kRow.bytes(); }
  uint32_t sets() const { return static_cast<uint32_t>(addresses_.size()); }
  const float* queries() const { return args_.queries; }

 private:
  uint32_t k_ = 0;
  gpu::StepPlan plan_, phi_plan_;
  gpu::BatchStepArgs args_;
  gpu::DeviceBuffer memory_, workspace_, output_;
  gpu::PinnedBuffer features_;
  std::vector<const gpu::DeviceRow*> addresses_;       // [sets], on the device
  std::vector<const void* const*> feature_addresses_;  // [sets]
  std::vector<const gpu::DeviceSummary*> summaries_;   // [Completion]
};

}  // namespace prefixd::bench
