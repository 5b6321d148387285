// Encodes text in the byte-level vocabulary of the model in models/: ids 0..255 are bytes, 256
// begins a prompt (BOS), 257 ends a text (EOS).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "decoder/checkpoint/config.h"
#include "prefixd/result.h"

namespace prefixd::decoder {

class ByteTokenizer {
 public:
  static constexpr uint32_t kBos = 256, kEos = 257;

  // kInvalidArgument: the vocabulary cannot hold the 256 bytes, or the configuration gives BOS or
  // EOS other ids, so that the model needs its own tokenizer.
  static Result<ByteTokenizer> For(const ModelConfig& config);

  bool has_bos() const { return vocab_size_ > kBos; }
  // Returns one id per byte, after BOS if `with_bos` is set and the vocabulary has it. Any bytes
  // are valid.
  std::vector<uint32_t> Encode(std::string_view text, bool with_bos) const;
  // Returns the bytes of ids below 256; other ids are skipped.
  std::string Decode(std::span<const uint32_t> ids) const;

 private:
  explicit ByteTokenizer(uint32_t vocab_size) : vocab_size_(vocab_size) {}

  uint32_t vocab_size_;
};

}  // namespace prefixd::decoder
