#include "examples/llama_cpp/sequence_state.h"

#include <cstring>
#include <utility>

namespace llama_example {

namespace {

constexpr uint32_t kMagic = 0xaf143cd8;
constexpr uint32_t kMaxLayers = 1024;

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <typename T>
  T Take() {
    T value{};
    if (left() < sizeof value) {
      failed_ = true;
      return value;
    }
    std::memcpy(&value, &bytes_[at_], sizeof value);
    at_ += sizeof value;
    return value;
  }
  void Skip(uint64_t n) {
    if (n > left()) failed_ = true;
    at_ += failed_ ? 0 : n;
  }
  uint64_t at() const { return at_; }
  uint64_t left() const { return bytes_.size() - at_; }
  bool failed() const { return failed_; }

 private:
  std::span<const uint8_t> bytes_;
  uint64_t at_ = 0;
  bool failed_ = false;
};

class Writer {
 public:
  template <typename T>
  void Put(T value) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    out.insert(out.end(), bytes, bytes + sizeof value);
  }
  std::vector<uint8_t> out;
};

bool ReadRows(Reader* in, uint32_t n_tokens, std::vector<LayerRows>* rows,
              std::vector<uint64_t>* offsets) {
  for (size_t layer = 0; layer < rows->size(); ++layer) {
    auto& [type, row_bytes] = (*rows)[layer];
    type = in->Take<int32_t>();
    row_bytes = in->Take<uint64_t>();
    (*offsets)[layer] = in->at();
    if (in->failed() || row_bytes == 0 || row_bytes > in->left() / n_tokens) return false;
    in->Skip(row_bytes * n_tokens);
  }
  return !in->failed();
}

}  // namespace

bool SequenceState::Parse(std::vector<uint8_t> bytes, std::string* error) {
  const auto refuse = [&](const char* why) {
    *error = std::string(
                 "this llama.cpp keeps the state of a sequence in another way than this "
                 "program knows: ") +
             why;
    return false;
  };
  bytes_ = std::move(bytes);
  Reader in(bytes_);
  if (in.Take<uint32_t>() != kMagic) return refuse("it begins with another number");
  in.Take<int32_t>();  // the sequence
  if (in.Take<uint32_t>() != 1) return refuse("it has several streams (n_seq_max is to be 1)");
  n_tokens_ = in.Take<uint32_t>();
  if (in.failed() || n_tokens_ == 0) return refuse("it has no tokens");
  for (uint32_t i = 0; i < n_tokens_; ++i) {
    const auto position = in.Take<int32_t>();
    const auto sequences = in.Take<uint32_t>();
    in.Take<int32_t>();
    if (in.failed() || position != static_cast<int32_t>(i) || sequences != 1) {
      return refuse("its tokens do not stand at the positions 0, 1, 2, ...");
    }
  }
  if (in.Take<uint32_t>() != 0) return refuse("values are transposed (flash attention is off)");
  const auto layers = in.Take<uint32_t>();
  if (in.failed() || layers == 0 || layers > kMaxLayers) return refuse("its number of layers");
  keys_.resize(layers);
  values_.resize(layers);
  key_offsets_.resize(layers);
  value_offsets_.resize(layers);
  if (!ReadRows(&in, n_tokens_, &keys_, &key_offsets_)) return refuse("its keys");
  if (!ReadRows(&in, n_tokens_, &values_, &value_offsets_)) return refuse("its values");
  if (in.left() != 0) return refuse("more follows its values");
  return true;
}

SequenceState SequenceState::Resized(uint32_t n) const {
  SequenceState state = *this;
  Writer out;
  out.Put(kMagic);
  out.Put(int32_t{0});
  out.Put(uint32_t{1});
  out.Put(n);
  for (uint32_t i = 0; i < n; ++i) {
    out.Put(static_cast<int32_t>(i));
    out.Put(uint32_t{1});
    out.Put(int32_t{0});
  }
  out.Put(uint32_t{0});
  out.Put(n_layers());
  const auto add = [&](const std::vector<LayerRows>& rows, std::vector<uint64_t>* offsets) {
    for (size_t layer = 0; layer < rows.size(); ++layer) {
      out.Put(rows[layer].type);
      out.Put(rows[layer].row_bytes);
      (*offsets)[layer] = out.out.size();
      out.out.resize(out.out.size() + rows[layer].row_bytes * n);
    }
  };
  add(keys_, &state.key_offsets_);
  add(values_, &state.value_offsets_);
  state.bytes_ = std::move(out.out);
  state.n_tokens_ = n;
  return state;
}

std::span<std::byte> SequenceState::Rows(const LayerRows& rows, uint64_t offset, uint32_t first,
                                         uint32_t n) {
  auto* begin = reinterpret_cast<std::byte*>(bytes_.data() + offset);
  return {begin + first * rows.row_bytes, n * rows.row_bytes};
}

std::span<std::byte> SequenceState::k(uint32_t layer, uint32_t first, uint32_t n) {
  return Rows(keys_[layer], key_offsets_[layer], first, n);
}

std::span<std::byte> SequenceState::v(uint32_t layer, uint32_t first, uint32_t n) {
  return Rows(values_[layer], value_offsets_[layer], first, n);
}

}  // namespace llama_example
