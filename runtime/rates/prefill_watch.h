// Watches the rows of a put that stream in while an engine prefills, and says how fast it does.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

namespace prefixd {

// Rows of the layer that comes first are computed before the time begins, so they do not count: a
// rate that is too high would make engines compute what they could load faster. Where the engine
// waits for something else meanwhile, the rate is lower than its own.
class PrefillWatch {
 public:
  using Clock = std::chrono::steady_clock;

  // `n` tokens' rows of a layer came in a call that lasted from `begun` to `ended`.
  void Note(uint32_t layer, uint64_t n, Clock::time_point begun, Clock::time_point ended) {
    if (!first_layer_) {
      first_layer_ = layer;
      begun_ = begun;
    }
    ended_ = ended;
    counting_ = counting_ || layer != *first_layer_;
    if (counting_) token_layers_ += n;
  }
  // Tokens' rows that were computed within seconds(), in the layers of all of them.
  double tokens(uint32_t layers) const { return double(token_layers_) / std::max(layers, 1u); }
  double seconds() const { return std::chrono::duration<double>(ended_ - begun_).count(); }

 private:
  std::optional<uint32_t> first_layer_;
  bool counting_ = false;
  uint64_t token_layers_ = 0;
  Clock::time_point begun_{}, ended_{};
};

}  // namespace prefixd
