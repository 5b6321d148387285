#include "tensors/safetensors_header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

namespace prefixd {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
// A well-formed header nests {"name": {"shape": [..]}} and nothing deeper.
constexpr int kMaxDepth = 3;

uint64_t ReadLittleEndian64(std::span<const std::byte> bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) value |= std::to_integer<uint64_t>(bytes[i]) << (8 * i);
  return value;
}

// Makes errors about one file, all in one form.
class Complaint {
 public:
  explicit Complaint(std::string_view label) : label_(label) {}

  Error File(const std::string& what) const { return {Code::kCorrupt, label_ + ": " + what}; }
  Error Tensor(std::string_view name, const std::string& what) const {
    return File("tensor " + QuoteName(name) + " " + what + "; write the file again");
  }

 private:
  std::string label_;
};

// Returns the JSON or why it is invalid. nlohmann keeps the last of equal keys; they are refused,
// because two readers could see two different tensors.
Result<json> ParseObject(std::string_view text, const Complaint& complaint) {
  std::vector<std::set<std::string>> keys;  // keys of each open object
  std::optional<std::string> duplicate;
  bool too_deep = false;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
        keys.emplace_back();
        break;
      case json::parse_event_t::object_end:
        if (!keys.empty()) keys.pop_back();
        break;
      case json::parse_event_t::key:
        if (!keys.empty() && parsed.is_string()) {
          auto [it, fresh] = keys.back().insert(parsed.get_ref<const std::string&>());
          if (!fresh && !duplicate) duplicate = *it;
        }
        break;
      default:
        break;
    }
    // Deeper values are discarded, so that a hostile header cannot build a deep tree.
    if (depth > kMaxDepth) too_deep = true;
    return !too_deep;
  };
  json parsed = json::parse(text, watch, /*allow_exceptions=*/false);
  if (too_deep) return complaint.File("the header nests too deeply; this is no safetensors file");
  if (duplicate) {
    return complaint.File("the header names " + QuoteName(*duplicate) +
                          " twice; write the file again");
  }
  if (parsed.is_discarded() || !parsed.is_object()) {
    return complaint.File(
        "the header is not a JSON object; the file is damaged or no safetensors file");
  }
  return parsed;
}

Result<std::map<std::string, std::string>> ParseMetadata(const json& value,
                                                         const Complaint& complaint) {
  if (!value.is_object()) return complaint.File("__metadata__ is not an object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      return complaint.File("__metadata__ " + QuoteName(key) +
                            " is not a string; the format allows only strings there");
    }
    metadata.emplace(key, text.get_ref<const std::string&>());
  }
  return metadata;
}

// Returns the product of the shape and the bytes it takes; nothing on overflow or when the bits
// fill no whole number of bytes.
std::optional<std::pair<uint64_t, uint64_t>> ElementsAndBytes(std::span<const uint64_t> shape,
                                                              TensorType type) {
  uint64_t elements = 1, bits = 0;
  for (const uint64_t dim : shape) {
    if (__builtin_mul_overflow(elements, dim, &elements)) return std::nullopt;
  }
  if (__builtin_mul_overflow(elements, uint64_t{TensorTypeBits(type)}, &bits)) return std::nullopt;
  if (bits % 8 != 0) return std::nullopt;
  return std::pair{elements, bits / 8};
}

Result<TensorInfo> ParseTensor(const std::string& name, const json& value, uint64_t data_bytes,
                               const Complaint& complaint) {
  TensorInfo info;
  info.name = name;
  const auto member = [&](const char* key) {
    const auto it = value.is_object() ? value.find(key) : value.end();
    return it != value.end() ? &*it : nullptr;
  };
  const json* dtype = value.is_object() ? member("dtype") : nullptr;
  const json* shape = value.is_object() ? member("shape") : nullptr;
  const json* offsets = value.is_object() ? member("data_offsets") : nullptr;
  if (dtype == nullptr || shape == nullptr || offsets == nullptr || value.size() != 3) {
    return complaint.Tensor(name, "must have exactly dtype, shape and data_offsets");
  }
  const auto type =
      dtype->is_string() ? TensorTypeFromName(dtype->get_ref<const std::string&>()) : std::nullopt;
  if (!type) return complaint.Tensor(name, "has an unknown dtype");
  info.type = *type;

  if (!shape->is_array()) return complaint.Tensor(name, "has a shape that is not a list");
  for (const json& dim : *shape) {
    if (!dim.is_number_unsigned()) {
      return complaint.Tensor(name, "has a shape that is not a list of whole numbers");
    }
    info.shape.push_back(dim.get<uint64_t>());
  }
  if (!offsets->is_array() || offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() ||
      !(*offsets)[1].is_number_unsigned()) {
    return complaint.Tensor(name, "has data_offsets that are not two whole numbers");
  }
  info.begin = (*offsets)[0].get<uint64_t>();
  info.end = (*offsets)[1].get<uint64_t>();
  if (info.begin > info.end) return complaint.Tensor(name, "ends before it begins");

  const auto sizes = ElementsAndBytes(info.shape, info.type);
  if (!sizes) {
    return complaint.Tensor(name, "has the impossible shape " + ShapeString(info.shape));
  }
  info.elements = sizes->first;
  if (sizes->second != info.end - info.begin) {
    return complaint.Tensor(name, "of shape " + ShapeString(info.shape) + " and dtype " +
                                      std::string(TensorTypeName(info.type)) + " needs " +
                                      std::to_string(sizes->second) + " bytes but has " +
                                      std::to_string(info.end - info.begin));
  }
  if (info.end > data_bytes) {
    return complaint.File("is truncated: tensor " + QuoteName(name) + " ends at byte " +
                          std::to_string(info.end) + " of the data but only " +
                          std::to_string(data_bytes) + " are there; copy or download it again");
  }
  return info;
}

Status CheckCoverage(const std::vector<TensorInfo>& tensors, uint64_t data_bytes,
                     const Complaint& complaint) {
  std::vector<const TensorInfo*> order;
  order.reserve(tensors.size());
  for (const TensorInfo& info : tensors) order.push_back(&info);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::pair{a->begin, a->end} < std::pair{b->begin, b->end};
  });
  uint64_t covered = 0;
  for (const TensorInfo* info : order) {
    if (info->begin < covered) return complaint.Tensor(info->name, "overlaps another tensor");
    if (info->begin > covered) {
      return complaint.Tensor(info->name, "leaves unused bytes before it");
    }
    covered = info->end;
  }
  if (covered != data_bytes) {
    return complaint.File("has " + std::to_string(data_bytes - covered) +
                          " bytes behind the last tensor; write the file again");
  }
  return {};
}

}  // namespace

Result<SafetensorsHeader> ParseSafetensorsHeader(std::span<const std::byte> file,
                                                 std::string_view label) {
  const Complaint complaint(label);
  if (file.size() < kLengthBytes) {
    return complaint.File("is truncated: " + std::to_string(file.size()) +
                          " bytes cannot be a safetensors file; copy or download it again");
  }
  const uint64_t header_bytes = ReadLittleEndian64(file);
  if (header_bytes > kSafetensorsMaxHeaderBytes) {
    return complaint.File("claims a header of " + std::to_string(header_bytes) +
                          " bytes (limit 100 MB); this is no safetensors file");
  }
  if (header_bytes > file.size() - kLengthBytes) {
    return complaint.File("is truncated: the header has " + std::to_string(header_bytes) +
                          " bytes but the file only " + std::to_string(file.size()) +
                          "; copy or download it again");
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes,
                              header_bytes);
  if (text.empty() || text.front() != '{') {
    return complaint.File("the header does not begin with '{'; this is no safetensors file");
  }
  PREFIXD_ASSIGN(const json object, ParseObject(text, complaint));

  SafetensorsHeader header;
  header.data_start = kLengthBytes + header_bytes;
  const uint64_t data_bytes = file.size() - header.data_start;
  for (const auto& [name, value] : object.items()) {
    if (name == kSafetensorsMetadataKey) {
      PREFIXD_ASSIGN(header.metadata, ParseMetadata(value, complaint));
      continue;
    }
    PREFIXD_ASSIGN(TensorInfo info, ParseTensor(name, value, data_bytes, complaint));
    header.tensors.push_back(std::move(info));
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  PREFIXD_TRY(CheckCoverage(header.tensors, data_bytes, complaint));
  return header;
}

std::string QuoteName(std::string_view name) {
  constexpr size_t kMaxBytes = 120;
  std::string out = "'";
  for (const char c : name.substr(0, kMaxBytes)) {
    out += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  }
  return out + (name.size() > kMaxBytes ? "...'" : "'");
}

std::string ShapeString(std::span<const uint64_t> shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    if (i == 7 && shape.size() > 8) {
      out += ", ...";
      break;
    }
  }
  return out + "]";
}

}  // namespace prefixd
