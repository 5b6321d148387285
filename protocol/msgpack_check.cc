#include "protocol/msgpack_check.h"

#include <array>
#include <string>

namespace prefixd::wire {
namespace {

constexpr uint32_t kDepthCapacity = 64;
// What the JSON library takes for values, with the allocator's own. A vector that grows has the
// place of its values twice.
constexpr uint64_t kValueBytes = 32, kArrayBytes = 48, kMapBytes = 64, kStringBytes = 64;
constexpr uint64_t kEntryBytes = 64;  // of a map, beside key and value

// One tag byte announces bytes of scalar data to skip, or items of a container to read.
struct Token {
  uint64_t length_bytes = 0;  // size of the length field that follows the tag
  uint64_t skip = 0;          // fixed data bytes after tag and length field
  uint64_t items = 0;         // container: values that follow (fixed form)
  enum class Kind : uint8_t { kScalar, kBytes, kArray, kMap, kBad } kind = Kind::kScalar;
};

Token Classify(uint8_t tag) {
  using Kind = Token::Kind;
  if (tag <= 0x7f || tag >= 0xe0) return {};
  if (tag <= 0x8f) return {0, 0, uint64_t(tag & 0x0f) * 2, Kind::kMap};
  if (tag <= 0x9f) return {0, 0, uint64_t(tag & 0x0f), Kind::kArray};
  if (tag <= 0xbf) return {0, uint64_t(tag & 0x1f), 0, Kind::kScalar};
  switch (tag) {
    case 0xc0:
    case 0xc2:
    case 0xc3:
      return {};
    case 0xc4:
    case 0xd9:
      return {1, 0, 0, Kind::kBytes};
    case 0xc5:
    case 0xda:
      return {2, 0, 0, Kind::kBytes};
    case 0xc6:
    case 0xdb:
      return {4, 0, 0, Kind::kBytes};
    case 0xca:
    case 0xce:
    case 0xd2:
      return {0, 4, 0, Kind::kScalar};
    case 0xcb:
    case 0xcf:
    case 0xd3:
      return {0, 8, 0, Kind::kScalar};
    case 0xcc:
    case 0xd0:
      return {0, 1, 0, Kind::kScalar};
    case 0xcd:
    case 0xd1:
      return {0, 2, 0, Kind::kScalar};
    case 0xdc:
      return {2, 0, 0, Kind::kArray};
    case 0xdd:
      return {4, 0, 0, Kind::kArray};
    case 0xde:
      return {2, 0, 0, Kind::kMap};
    case 0xdf:
      return {4, 0, 0, Kind::kMap};
    default:
      return {0, 0, 0, Kind::kBad};  // 0xc1 and extension types: not used by the protocol
  }
}

}  // namespace

Status CheckMsgpack(std::span<const std::byte> bytes, uint32_t max_depth, uint64_t* memory) {
  const auto bad = [](size_t at, const char* why) {
    return InvalidArgument("malformed control part at byte " + std::to_string(at) + ": " + why);
  };
  if (max_depth > kDepthCapacity) max_depth = kDepthCapacity;
  std::array<uint64_t, kDepthCapacity + 1> open{};  // values still missing, per open container
  uint32_t depth = 0;
  open[0] = 1;
  size_t at = 0;
  while (true) {
    while (open[depth] == 0) {
      if (depth == 0) {
        if (at != bytes.size()) return bad(at, "bytes after the value");
        return {};
      }
      --depth;
    }
    if (at >= bytes.size()) return bad(at, "it ends too early");
    Token token = Classify(std::to_integer<uint8_t>(bytes[at]));
    if (token.kind == Token::Kind::kBad) return bad(at, "a type that the protocol does not use");
    ++at;
    --open[depth];
    if (token.length_bytes > bytes.size() - at) return bad(at, "it ends too early");
    uint64_t length = 0;
    for (uint64_t i = 0; i < token.length_bytes; ++i) {
      length = length << 8 | std::to_integer<uint8_t>(bytes[at++]);  // MessagePack is big-endian
    }
    if (memory) {
      *memory += kValueBytes;
      if (token.kind == Token::Kind::kMap)
        *memory += kMapBytes + (token.items / 2 + length) * kEntryBytes;
      if (token.kind == Token::Kind::kArray) *memory += kArrayBytes;
      if (token.kind == Token::Kind::kBytes || token.skip > 8)
        *memory += kStringBytes + token.skip + length;
    }
    if (token.kind == Token::Kind::kScalar || token.kind == Token::Kind::kBytes) {
      const uint64_t skip = token.skip + length;
      if (skip > bytes.size() - at) return bad(at, "a length beyond its end");
      at += skip;
      continue;
    }
    const uint64_t per_entry = token.kind == Token::Kind::kMap ? 2 : 1;
    const uint64_t items = token.items + length * per_entry;
    if (items > bytes.size() - at) return bad(at, "a length beyond its end");
    if (depth == max_depth) return bad(at, "nested too deeply");
    open[++depth] = items;
  }
}

}  // namespace prefixd::wire
