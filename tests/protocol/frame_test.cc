// Tests frames and their control parts: round trips, and hostile bytes, which must neither crash a
// reader nor make it allocate more than was sent.
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "protocol/codec.h"
#include "protocol/frame.h"
#include "protocol/msgpack_check.h"
#include "tests/protocol/requests.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::wire {
namespace {

std::string Hex(std::span<const std::byte> bytes) {
  std::string text;
  for (std::byte b : bytes) {
    char pair[3];
    std::snprintf(pair, sizeof(pair), "%02x", std::to_integer<unsigned>(b));
    text += pair;
  }
  return text;
}

// The worked example of docs/protocol.md, byte for byte.
TEST(Frames, WorkedExample) {
  const Json control = {{"session", 1}, {"layer", 3}, {"kv_head", 1},
                        {"begin", 0},   {"end", 2},   {"out", {{0, 128}}}};
  const auto packed = PackControl(control);
  EXPECT_EQ(Hex(packed),
            "86a5626567696e00a3656e6402a76b765f6865616401a56c6179657203a36f7574919200cc80a7736573"
            "73696f6e01");
  FrameHeader request;
  request.type = MessageType::kReadRange;
  request.request_id = 42;
  request.control_bytes = static_cast<uint32_t>(packed.size());
  EXPECT_EQ(Hex(EncodeHeader(request)),
            "5046584402000e002a000000000000002f000000000000000000000000000000");
  FrameHeader reply;
  reply.type = MessageType::kReply;
  reply.request_id = 42;
  reply.control_bytes = static_cast<uint32_t>(PackControl(Json::object()).size());
  reply.payload_bytes = 128;
  EXPECT_EQ(Hex(EncodeHeader(reply)),
            "50465844020000802a0000000000000001000000000000008000000000000000");
}

TEST(Frames, EveryMessageHasANumberAndANameOfItsOwn) {
  const std::vector<MessageType> all = prefixd::testing::AllRequests();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all.front(), MessageType::kHello);
  // Numbers are never used again: those of messages that are gone stay free.
  for (const unsigned gone : {2u, 20u}) EXPECT_FALSE(IsRequest(static_cast<MessageType>(gone)));
  std::set<std::string_view> names;
  for (MessageType type : all) names.insert(MessageName(type));
  EXPECT_EQ(names.size(), all.size());
  for (MessageType type : {MessageType::kReply, MessageType::kError, MessageType::kProgress}) {
    EXPECT_FALSE(IsRequest(type));
    EXPECT_TRUE(names.insert(MessageName(type)).second);
  }
  EXPECT_FALSE(IsRequest(MessageType{0}));
}

TEST(Frames, HeadersRoundTripAndHostileOnesAreRefused) {
  std::mt19937_64 rng(prefixd::testing::Seed("Frames.Headers"));
  std::vector<MessageType> types = prefixd::testing::AllRequests();
  for (unsigned number : {0x0000u, 0x7fffu, 0x8000u, 0x8001u, 0x8002u, 0xffffu}) {
    types.push_back(static_cast<MessageType>(number));
  }
  std::set<MessageType> drawn;
  const FrameLimits limits{1 << 20, 1 << 28};
  for (int i = 0; i < 20000; ++i) {
    FrameHeader h;
    h.type = types[rng() % types.size()];
    drawn.insert(h.type);
    h.request_id = rng();
    h.control_bytes = rng() % (limits.control_bytes + 1);
    h.flags = rng() % (kKnownFlags + 1);
    h.payload_bytes = rng() % (limits.payload_bytes + 1);
    auto bytes = EncodeHeader(h);
    const auto back = DecodeHeader(bytes, limits);
    ASSERT_TRUE(back.ok());
    ASSERT_EQ(*back, h);
    bytes[rng() % bytes.size()] ^= std::byte(1 + rng() % 255);
    const auto flipped = DecodeHeader(bytes, limits);
    if (flipped.ok()) {  // an accepted header stays within the limits
      ASSERT_LE(flipped->control_bytes, limits.control_bytes);
      ASSERT_LE(flipped->payload_bytes, limits.payload_bytes);
      ASSERT_EQ(flipped->flags & ~kKnownFlags, 0u);
    }
  }
  EXPECT_EQ(drawn.size(), types.size());
  FrameHeader h;
  h.version = kVersion + 1;
  const auto newer = DecodeHeader(EncodeHeader(h), limits);
  ASSERT_FALSE(newer.ok());
  EXPECT_EQ(newer.error().code, Code::kFailedPrecondition);
  EXPECT_NE(newer.error().message.find("protocol version " + std::to_string(kVersion + 1)),
            std::string::npos);
}

TEST(Frames, ExtentsNeverOverflow) {
  EXPECT_TRUE(CheckExtent({0, 100}, 100).ok());
  EXPECT_TRUE(CheckExtent({100, 0}, 100).ok());
  EXPECT_FALSE(CheckExtent({1, 100}, 100).ok());
  EXPECT_FALSE(CheckExtent({101, 0}, 100).ok());
  EXPECT_FALSE(CheckExtent({UINT64_MAX, 2}, 100).ok());
  EXPECT_FALSE(CheckExtent({2, UINT64_MAX}, 100).ok());
  EXPECT_FALSE(CheckExtent({UINT64_MAX - 50, 100}, 100).ok());
}

Json RandomJson(std::mt19937_64& rng, int depth) {
  switch (rng() % (depth > 0 ? 9 : 7)) {
    case 0:
      return nullptr;
    case 1:
      return rng() % 2 == 0;
    case 2:
      return rng() >> (rng() % 64);
    case 3:
      return -static_cast<int64_t>(rng() >> (1 + rng() % 62));
    case 4:
      return 1.0 / double(1 + rng() % 100);
    case 5:
      return float(rng() % 100);
    case 6:
      return std::string(rng() % 300, 'x');
    case 7: {
      Json list = Json::array();
      for (size_t i = rng() % 20; i > 0; --i) list.push_back(RandomJson(rng, depth - 1));
      return list;
    }
    default: {
      Json map = Json::object();
      for (size_t i = rng() % 20; i > 0; --i) {
        map[std::to_string(rng() % 1000)] = RandomJson(rng, depth - 1);
      }
      return map;
    }
  }
}

// The check accepts everything that the library writes, and no truncation of it. Bytes that it
// accepts after random damage can be parsed without deep recursion or allocations beyond the input.
TEST(Frames, ControlPartsUnderDamage) {
  std::mt19937_64 rng(prefixd::testing::Seed("Frames.ControlParts"));
  for (int i = 0; i < 1500; ++i) {
    Json json = {{"a", RandomJson(rng, 4)}, {"b", RandomJson(rng, 2)}};
    std::vector<std::byte> bytes = PackControl(json);
    auto back = UnpackControl(bytes);
    ASSERT_TRUE(back.ok());
    ASSERT_EQ(*back, json);
    ASSERT_FALSE(CheckMsgpack(std::span(bytes).first(rng() % bytes.size()), kMaxControlDepth).ok());
    for (int flips = 1 + int(rng() % 4); flips > 0; --flips) {
      bytes[rng() % bytes.size()] = std::byte(rng());
    }
    (void)UnpackControl(bytes);  // either result is right; it must return
  }
}

TEST(Frames, HostileControlParts) {
  // The hostile inputs are a million nested lists, an array and a string of 4 GiB in six bytes, and
  // bytes after the end.
  EXPECT_FALSE(UnpackControl(std::vector<std::byte>(1 << 20, std::byte{0x91})).ok());
  EXPECT_FALSE(UnpackControl(std::vector<std::byte>(1 << 20, std::byte{0x81})).ok());
  for (uint8_t tag : {0xdd, 0xdf, 0xdb, 0xc6, 0xc1, 0xc7, 0xd8}) {
    std::vector<std::byte> bytes(6, std::byte{0xff});
    bytes[0] = std::byte{tag};
    EXPECT_FALSE(UnpackControl(bytes).ok()) << int(tag);
  }
  EXPECT_FALSE(UnpackControl(std::vector<std::byte>{std::byte{0x80}, std::byte{0x80}}).ok());
  EXPECT_FALSE(UnpackControl(std::vector<std::byte>{std::byte{0x90}}).ok());  // no map
  EXPECT_TRUE(UnpackControl({}).ok());
}

}  // namespace
}  // namespace prefixd::wire
