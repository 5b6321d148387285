// The rows inside the state of one sequence, as llama_state_seq_get_data returns and
// llama_state_seq_set_data takes it (a file of llama_state_seq_save_file has it behind its tokens):
// [token][KV head][dim] per layer, keys of all layers first, then values. llama.cpp does not
// promise this layout: Parse checks every field and the length, so that another one is refused and
// never misread. It takes caches with values that are not transposed (flash attention), one stream,
// and one position for each token.
//
// Thread-safety: plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace llama_example {

// Keys or values of one layer, in ggml's type.
struct LayerRows {
  int32_t type = 0;
  uint64_t row_bytes = 0;  // of one token, all KV heads
  bool operator==(const LayerRows&) const = default;
};

class SequenceState {
 public:
  // Reads what llama_state_seq_get_data wrote. False, with a sentence, where the layout is another.
  bool Parse(std::vector<uint8_t> bytes, std::string* error);
  // Makes a state of the same layers with `n` tokens at positions [0, n). Its rows are zeros.
  SequenceState Resized(uint32_t n) const;

  const std::vector<uint8_t>& bytes() const { return bytes_; }
  uint32_t n_tokens() const { return n_tokens_; }
  uint32_t n_layers() const { return static_cast<uint32_t>(keys_.size()); }
  const LayerRows& keys(uint32_t layer) const { return keys_[layer]; }
  const LayerRows& values(uint32_t layer) const { return values_[layer]; }

  // Rows of tokens [first, first + n) of a layer.
  std::span<std::byte> k(uint32_t layer, uint32_t first, uint32_t n);
  std::span<std::byte> v(uint32_t layer, uint32_t first, uint32_t n);

 private:
  std::span<std::byte> Rows(const LayerRows& rows, uint64_t offset, uint32_t first, uint32_t n);

  std::vector<uint8_t> bytes_;
  uint32_t n_tokens_ = 0;
  std::vector<LayerRows> keys_, values_;
  std::vector<uint64_t> key_offsets_, value_offsets_;
};

}  // namespace llama_example
