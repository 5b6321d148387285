#include "decoder/checkpoint/json_file.h"

#include "tensors/mapped_file.h"

namespace prefixd::decoder {

Result<std::string> ReadTextFile(const std::filesystem::path& path) {
  constexpr size_t kMaxBytes = 64 << 20;
  PREFIXD_ASSIGN(const MappedFile file, MappedFile::Open(path));
  const auto bytes = file.bytes();
  if (bytes.size() > kMaxBytes) {
    return InvalidArgument(path.string() + ": is larger than 64 MB; this is no JSON of a model");
  }
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Result<nlohmann::json> ParseJsonObject(std::string_view text, std::string_view label) {
  nlohmann::json parsed = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) {
    return InvalidArgument(std::string(label) + ": is not JSON; copy or download it again");
  }
  if (!parsed.is_object()) return InvalidArgument(std::string(label) + ": is not a JSON object");
  return parsed;
}

}  // namespace prefixd::decoder
