#include <nlohmann/json.hpp>
#include <optional>

#include "tensors/safetensors_header.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

using nlohmann::json;

// Returns length, JSON and data as one file.
Bytes FileOf(std::string_view text, size_t data_bytes) {
  Bytes file(8 + text.size() + data_bytes);
  const uint64_t length = text.size();
  std::memcpy(file.data(), &length, sizeof(length));
  std::memcpy(file.data() + 8, text.data(), text.size());
  return file;
}

// Returns the text of a header equal to `header`.
std::string TextOf(const SafetensorsHeader& header) {
  json text = json::object();
  if (!header.metadata.empty()) text[std::string(kSafetensorsMetadataKey)] = header.metadata;
  for (const TensorInfo& t : header.tensors) {
    text[t.name] = {
        {"dtype", TensorTypeName(t.type)}, {"shape", t.shape}, {"data_offsets", {t.begin, t.end}}};
  }
  return text.dump();
}

bool Equal(const SafetensorsHeader& a, const SafetensorsHeader& b) {
  return a.metadata == b.metadata &&
         std::ranges::equal(a.tensors, b.tensors, [](const TensorInfo& x, const TensorInfo& y) {
           return x.name == y.name && x.type == y.type && x.shape == y.shape &&
                  x.elements == y.elements && x.begin == y.begin && x.end == y.end;
         });
}

void Check(const Bytes& file) {
  const auto header = ParseSafetensorsHeader(file, "input");
  if (!header.ok()) return;
  FUZZ_EXPECT(header->data_start >= 8 && header->data_start <= file.size());
  const uint64_t data_bytes = file.size() - header->data_start;
  uint64_t covered = 0;
  for (size_t i = 0; i < header->tensors.size(); ++i) {
    const TensorInfo& t = header->tensors[i];
    FUZZ_EXPECT(i == 0 || header->tensors[i - 1].name < t.name);
    FUZZ_EXPECT(t.begin <= t.end && t.end <= data_bytes);
    const auto bits = static_cast<unsigned __int128>(t.elements) * TensorTypeBits(t.type);
    FUZZ_EXPECT(bits == static_cast<unsigned __int128>(t.end - t.begin) * 8);
    covered += t.end - t.begin;
  }
  FUZZ_EXPECT(covered == data_bytes);
  const auto back = ParseSafetensorsHeader(FileOf(TextOf(*header), data_bytes), "again");
  FUZZ_EXPECT(back.ok() && Equal(*header, *back));
}

std::string Name(FuzzedDataProvider& in) {
  std::string name = in.ConsumeRandomLengthString(20);
  for (char& c : name) c = static_cast<char>(c & 0x7f);  // JSON requires UTF-8
  return name;
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  switch (Whole<uint8_t>(in) % 3) {
    case 0:
      Check(Rest(in));
      break;
    case 1: {  // any text, with a length that fits
      const size_t data_bytes = Whole<uint8_t>(in);
      Check(FileOf(in.ConsumeRemainingBytesAsString(), data_bytes));
      break;
    }
    case 2: {
      SafetensorsHeader header;
      uint64_t at = 0;
      for (int n = in.ConsumeIntegralInRange<int>(0, 6); n > 0; --n) {
        TensorInfo t;
        t.name = Name(in) + std::to_string(n);
        t.type = in.PickValueInArray({TensorType::kF32, TensorType::kBf16, TensorType::kU8,
                                      TensorType::kI64, TensorType::kBool});
        t.elements = 1;
        for (int d = in.ConsumeIntegralInRange<int>(0, 3); d > 0; --d) {
          t.shape.push_back(in.ConsumeIntegralInRange<uint64_t>(0, 5));
          t.elements *= t.shape.back();
        }
        t.begin = at;
        t.end = at += t.elements * TensorTypeBits(t.type) / 8;
        header.tensors.push_back(std::move(t));
      }
      for (int n = in.ConsumeIntegralInRange<int>(0, 3); n > 0; --n) {
        header.metadata[Name(in)] = Name(in);
      }
      std::ranges::sort(header.tensors, {}, &TensorInfo::name);
      const Bytes file = FileOf(TextOf(header), at);
      const auto back = ParseSafetensorsHeader(file, "made");
      FUZZ_EXPECT(back.ok() && Equal(header, *back));
      CheckDamaged(in, file, Check);
      break;
    }
  }
}

}  // namespace prefixd::fuzz
