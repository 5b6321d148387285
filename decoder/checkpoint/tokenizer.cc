#include "decoder/checkpoint/tokenizer.h"

namespace prefixd::decoder {

Result<ByteTokenizer> ByteTokenizer::For(const ModelConfig& config) {
  if (config.vocab_size < 256) {
    return InvalidArgument("tokenizer: a vocabulary of " + std::to_string(config.vocab_size) +
                           " cannot hold all bytes; this model is not byte-level");
  }
  const bool other_bos = config.bos.has_value() && *config.bos != kBos;
  const bool other_eos = !config.eos.empty() && config.eos.front() != kEos;
  if (other_bos || other_eos) {
    return InvalidArgument(
        "tokenizer: bos_token_id must be 256 and eos_token_id 257; this model is not byte-level");
  }
  return ByteTokenizer(config.vocab_size);
}

std::vector<uint32_t> ByteTokenizer::Encode(std::string_view text, bool with_bos) const {
  std::vector<uint32_t> ids;
  ids.reserve(text.size() + 1);
  if (with_bos && has_bos()) ids.push_back(kBos);
  for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  return ids;
}

std::string ByteTokenizer::Decode(std::span<const uint32_t> ids) const {
  std::string text;
  for (const uint32_t id : ids) {
    if (id < 256) text += static_cast<char>(id);
  }
  return text;
}

}  // namespace prefixd::decoder
