// Encodes and checks the frames that a client and the daemon exchange; docs/protocol.md describes
// every message.
//
// A frame is a fixed header of 32 little-endian bytes, a control part (MessagePack) and a payload
// (raw tensor bytes):
//
//   offset size field
//        0    4 magic            "PFXD"
//        4    2 version          2
//        6    2 type             MessageType
//        8    8 request_id       chosen by the client, repeated in the reply; never 0 in a request
//       16    4 control_bytes
//       20    4 flags            kFlag...
//       24    8 payload_bytes
//
// Nothing here does I/O or throws. Thread-safety: plain values and pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd::wire {

inline constexpr uint32_t kMagic = 0x44584650;  // "PFXD" in memory
inline constexpr uint16_t kVersion = 2;
inline constexpr size_t kHeaderBytes = 32;

// These limits hold on both sides; the daemon announces its own payload limit at hello.
inline constexpr uint32_t kMaxRequestControlBytes = 1u << 20;
inline constexpr uint32_t kMaxReplyControlBytes = 64u << 20;
inline constexpr uint64_t kMaxPayloadBytes = 4ull << 30;
inline constexpr uint32_t kMaxControlDepth = 16;  // nesting of MessagePack containers
inline constexpr uint32_t kMaxStepsPerMessage = 4096;
inline constexpr size_t kTensorAlignment = 64;  // bytes; for tensors that the client places

// Tensors of the request (and of its reply) lie in the connection's shared memory.
inline constexpr uint32_t kFlagShared = 1u << 0;
// A file descriptor of memory travels with this frame: the connection's shared memory (hello
// reply), or a tenant's part of the host tier, read-only (read_in_place reply).
inline constexpr uint32_t kFlagRegion = 1u << 1;
// The connection's ring comes with this frame (hello reply): a descriptor of memory and one of an
// eventfd, behind that of the region if there is one.
inline constexpr uint32_t kFlagRing = 1u << 2;
inline constexpr uint32_t kKnownFlags = kFlagShared | kFlagRegion | kFlagRing;

enum class MessageType : uint16_t {
  kHello = 1,
  kRegisterModel = 3,
  kBeginPut = 4,
  kPutWrite = 5,
  kPutQueries = 6,
  kPutCommit = 7,
  kPutAbort = 8,
  kMatch = 9,
  kAttach = 10,
  kStep = 11,
  kAttendExact = 12,
  kReadRows = 13,
  kReadRange = 14,
  kSelect = 15,
  kSummary = 16,
  kSetPolicy = 17,
  kReport = 18,
  kDetach = 19,
  kPrefix = 21,
  kRemove = 22,
  kVerify = 23,
  kWaitReady = 24,
  kStats = 25,
  kCancel = 26,
  kReadInPlace = 27,
  kReleaseRows = 28,
  kSetLifetime = 29,
  kReadLayer = 30,
  kReadTokens = 31,
  kAppend = 32,
  kTruncate = 33,
  kFork = 34,
  kPersist = 35,
  kForkPersisted = 36,
  kListModels = 40,
  kListPrefixes = 41,
  kModel = 42,
  kRemoveModel = 43,
  kExplain = 44,
  kRewrite = 45,
  kSnapshot = 46,
  kCompress = 47,
  kReply = 0x8000,     // request_id names the request that it answers
  kError = 0x8001,     // control: {code, message}; request_id 0: the connection is closed after it
  kProgress = 0x8002,  // control: {done, total, unit}; any number before the reply
};

// Returns a stable name for logs ("step"); "unknown" for a number that is none of the above.
std::string_view MessageName(MessageType type);
bool IsRequest(MessageType type);

struct FrameHeader {
  uint16_t version = kVersion;
  MessageType type = MessageType::kHello;
  uint64_t request_id = 0;
  uint32_t control_bytes = 0;
  uint32_t flags = 0;
  uint64_t payload_bytes = 0;
  bool operator==(const FrameHeader&) const = default;
};

struct FrameLimits {
  uint32_t control_bytes = kMaxRequestControlBytes;
  uint64_t payload_bytes = kMaxPayloadBytes;
};

std::array<std::byte, kHeaderBytes> EncodeHeader(const FrameHeader& header);

// Checks the whole header before the caller allocates memory by it: kInvalidArgument for a foreign
// magic, unknown flags or lengths over the limits; kFailedPrecondition for another protocol
// version. The caller passes a private copy of the bytes, which the peer cannot change meanwhile.
Result<FrameHeader> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes,
                                 const FrameLimits& limits);

// A run of bytes in a data area: the frame's payload, or the shared memory.
struct Extent {
  uint64_t offset = 0;
  uint64_t length = 0;
};

// kInvalidArgument when the extent does not lie inside `area_bytes` (no overflow).
Status CheckExtent(const Extent& extent, uint64_t area_bytes);

}  // namespace prefixd::wire
