// Measures the time that a decoder spends in its attention, and moves positions where rows lie
// beyond those that the model was made for.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <utility>

#include "decoder/attention/attention_backend.h"

namespace prefixd::bench {

class TimedAttention : public decoder::AttentionBackend {
 public:
  // `inner` gets positions that are `shift` higher, and must outlive this.
  explicit TimedAttention(decoder::AttentionBackend& inner, uint32_t shift = 0)
      : inner_(inner), shift_(shift) {}

  Status Attend(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q,
                std::span<const float> k, std::span<const float> v, std::span<float> out) override {
    const auto begun = std::chrono::steady_clock::now();
    const Status status = inner_.Attend(layer, first + shift_, n, q, k, v, out);
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    return status;
  }

  // Returns the seconds since the last call of this.
  double Take() { return std::exchange(seconds_, 0.0); }

 private:
  decoder::AttentionBackend& inner_;
  uint32_t shift_;
  double seconds_ = 0;
};

}  // namespace prefixd::bench
