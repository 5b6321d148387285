// The weight files of a Hugging Face checkpoint directory: one model.safetensors, or the shards
// named by model.safetensors.index.json.
//
// Thread-safety: const methods from any number of threads.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "decoder/config.h"
#include "prefixd/result.h"
#include "tensors/safetensors.h"

namespace prefixd::decoder {

class Checkpoint {
 public:
  // Opens and validates every file; truncated ones are refused here.
  static Result<Checkpoint> Open(const std::filesystem::path& directory);

  // As SafetensorsFile::ReadFloats, from whichever file has the tensor.
  Result<std::vector<float>> ReadFloats(std::string_view name,
                                        std::span<const uint64_t> shape) const;
  bool Has(std::string_view name) const;

  // BLAKE2b-256 in hex over the weight files' bytes, in the order of their names: reads all.
  Result<std::string> Digest() const;

 private:
  explicit Checkpoint(std::vector<SafetensorsFile> files) : files_(std::move(files)) {}

  const SafetensorsFile& FileOf(std::string_view name) const;

  std::vector<SafetensorsFile> files_;  // at least one, sorted by path
};

// What makes stored keys and values of this model usable by another run of it: digest of the
// weights, architecture, RoPE. For ModelSpec::identity (prefixd/types.h).
Result<std::vector<std::pair<std::string, std::string>>> ModelIdentity(
    const std::filesystem::path& directory, const ModelConfig& config);

}  // namespace prefixd::decoder
