#include "decoder/checkpoint/checkpoint.h"

#include <sodium.h>

#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>

#include "decoder/checkpoint/json_file.h"

namespace prefixd::decoder {
namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// Returns the shards that the index names, sorted. Names with a path are refused, because an index
// must not make us read outside its directory.
Result<std::set<std::string>> ShardNames(const std::filesystem::path& index) {
  PREFIXD_ASSIGN(const std::string text, ReadTextFile(index));
  PREFIXD_ASSIGN(const nlohmann::json object, ParseJsonObject(text, index.string()));
  const auto map = object.find("weight_map");
  if (map == object.end() || !map->is_object() || map->empty()) {
    return InvalidArgument(index.string() + ": has no weight_map; download it again");
  }
  std::set<std::string> names;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || name.find('/') != std::string::npos || name == "..") {
      return InvalidArgument(index.string() + ": weight_map of " + QuoteName(tensor) +
                             " is not a file name");
    }
    names.insert(name);
  }
  return names;
}

std::string Number(double value) {
  std::array<char, 32> buffer{};
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return std::string(buffer.data(), error == std::errc() ? end : buffer.data());
}

}  // namespace

Result<Checkpoint> Checkpoint::Open(const std::filesystem::path& directory) {
  std::error_code ignored;
  std::vector<SafetensorsFile> files;
  if (std::filesystem::exists(directory / kSingle, ignored)) {
    PREFIXD_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(directory / kSingle));
    files.push_back(std::move(file));
  } else if (std::filesystem::exists(directory / kIndex, ignored)) {
    PREFIXD_ASSIGN(const std::set<std::string> names, ShardNames(directory / kIndex));
    for (const std::string& name : names) {
      PREFIXD_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(directory / name));
      files.push_back(std::move(file));
    }
  } else {
    return Error{Code::kNotFound, directory.string() + ": has neither " + kSingle + " nor " +
                                      kIndex + "; name the directory of a checkpoint"};
  }
  return Checkpoint(std::move(files));
}

const SafetensorsFile& Checkpoint::FileOf(std::string_view name) const {
  for (const SafetensorsFile& file : files_) {
    if (file.Find(name) != nullptr) return file;
  }
  return files_.front();  // its error says that the tensor is missing
}

Result<std::vector<float>> Checkpoint::ReadFloats(std::string_view name,
                                                  std::span<const uint64_t> shape) const {
  return FileOf(name).ReadFloats(name, shape);
}

bool Checkpoint::Has(std::string_view name) const { return FileOf(name).Find(name) != nullptr; }

Result<std::string> Checkpoint::Digest() const {
  if (sodium_init() < 0) return Error{Code::kInternal, "libsodium does not initialise"};
  std::array<unsigned char, 32> hash{};
  crypto_generichash_state state;
  crypto_generichash_init(&state, nullptr, 0, hash.size());
  for (const SafetensorsFile& file : files_) {
    const auto bytes = file.file_bytes();
    crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(bytes.data()),
                              bytes.size());
  }
  crypto_generichash_final(&state, hash.data(), hash.size());
  std::string hex(2 * hash.size() + 1, '\0');
  sodium_bin2hex(hex.data(), hex.size(), hash.data(), hash.size());
  hex.pop_back();
  return hex;
}

Result<std::vector<std::pair<std::string, std::string>>> ModelIdentity(
    const std::filesystem::path& directory, const ModelConfig& config) {
  PREFIXD_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(directory));
  PREFIXD_ASSIGN(const std::string digest, checkpoint.Digest());
  const RopeConfig& rope = config.rope;
  std::string rope_text = std::string(RopeTypeName(rope.type)) + " theta=" + Number(rope.theta);
  if (rope.type != RopeType::kDefault) rope_text += " factor=" + Number(rope.factor);
  if (rope.type == RopeType::kLlama3) {
    rope_text += " low=" + Number(rope.low_freq_factor) + " high=" + Number(rope.high_freq_factor) +
                 " original=" + std::to_string(rope.original_max_positions);
  }
  return std::vector<std::pair<std::string, std::string>>{
      {"weights", "blake2b:" + digest},
      {"architecture", config.family == Family::kQwen3 ? "qwen3" : "llama"},
      {"rope", rope_text},
  };
}

}  // namespace prefixd::decoder
