// Opens the weight files of a Hugging Face checkpoint directory: one model.safetensors, or the
// shards that model.safetensors.index.json names.
//
// Thread-safety: any number of threads may call const methods.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "decoder/checkpoint/config.h"
#include "prefixd/result.h"
#include "tensors/safetensors.h"

namespace prefixd::decoder {

class Checkpoint {
 public:
  // Opens and validates every file; refuses truncated ones.
  static Result<Checkpoint> Open(const std::filesystem::path& directory);

  // Reads like SafetensorsFile::ReadFloats, from the file that has the tensor.
  Result<std::vector<float>> ReadFloats(std::string_view name,
                                        std::span<const uint64_t> shape) const;
  bool Has(std::string_view name) const;

  // Returns BLAKE2b-256 in hex over the bytes of all weight files, in the order of their names.
  Result<std::string> Digest() const;

 private:
  explicit Checkpoint(std::vector<SafetensorsFile> files) : files_(std::move(files)) {}

  const SafetensorsFile& FileOf(std::string_view name) const;

  std::vector<SafetensorsFile> files_;  // at least one, sorted by path
};

// Describes the digest of the weights, the architecture and RoPE: another run of the model can use
// stored keys and values only if all three agree. The result goes into ModelSpec::identity
// (prefixd/model.h).
Result<std::vector<std::pair<std::string, std::string>>> ModelIdentity(
    const std::filesystem::path& directory, const ModelConfig& config);

}  // namespace prefixd::decoder
