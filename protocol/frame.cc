#include "protocol/frame.h"

#include <string>

namespace prefixd::wire {
namespace {

template <typename T>
void Store(std::byte* at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) at[i] = std::byte(uint64_t{value} >> (8 * i) & 0xff);
}

template <typename T>
T Load(const std::byte* at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t(at[i]) << (8 * i);
  return static_cast<T>(value);
}

}  // namespace

std::string_view MessageName(MessageType type) {
  switch (type) {
    case MessageType::kHello:
      return "hello";
    case MessageType::kRegisterModel:
      return "register_model";
    case MessageType::kBeginPut:
      return "begin_put";
    case MessageType::kPutWrite:
      return "put_write";
    case MessageType::kPutQueries:
      return "put_queries";
    case MessageType::kPutCommit:
      return "put_commit";
    case MessageType::kPutAbort:
      return "put_abort";
    case MessageType::kMatch:
      return "match";
    case MessageType::kAttach:
      return "attach";
    case MessageType::kStep:
      return "step";
    case MessageType::kAttendExact:
      return "attend_exact";
    case MessageType::kReadRows:
      return "read_rows";
    case MessageType::kReadRange:
      return "read_range";
    case MessageType::kSelect:
      return "select";
    case MessageType::kSummary:
      return "summary";
    case MessageType::kSetPolicy:
      return "set_policy";
    case MessageType::kReport:
      return "report";
    case MessageType::kDetach:
      return "detach";
    case MessageType::kPrefix:
      return "prefix";
    case MessageType::kRemove:
      return "remove";
    case MessageType::kVerify:
      return "verify";
    case MessageType::kWaitReady:
      return "wait_ready";
    case MessageType::kStats:
      return "stats";
    case MessageType::kCancel:
      return "cancel";
    case MessageType::kReadInPlace:
      return "read_in_place";
    case MessageType::kReleaseRows:
      return "release_rows";
    case MessageType::kReadLayer:
      return "read_layer";
    case MessageType::kReadTokens:
      return "read_tokens";
    case MessageType::kAppend:
      return "append";
    case MessageType::kTruncate:
      return "truncate";
    case MessageType::kFork:
      return "fork";
    case MessageType::kPersist:
      return "persist";
    case MessageType::kForkPersisted:
      return "fork_persisted";
    case MessageType::kListModels:
      return "list_models";
    case MessageType::kListPrefixes:
      return "list_prefixes";
    case MessageType::kModel:
      return "model";
    case MessageType::kRemoveModel:
      return "remove_model";
    case MessageType::kExplain:
      return "explain";
    case MessageType::kRewrite:
      return "rewrite";
    case MessageType::kSnapshot:
      return "snapshot";
    case MessageType::kCompress:
      return "compress";
    case MessageType::kSetLifetime:
      return "set_lifetime";
    case MessageType::kReply:
      return "reply";
    case MessageType::kError:
      return "error";
    case MessageType::kProgress:
      return "progress";
  }
  return "unknown";
}

bool IsRequest(MessageType type) {
  // The compiler makes sure that MessageName knows every message, so no upper bound is kept here.
  return type < MessageType::kReply && MessageName(type) != "unknown";
}

std::array<std::byte, kHeaderBytes> EncodeHeader(const FrameHeader& header) {
  std::array<std::byte, kHeaderBytes> bytes{};
  Store(&bytes[0], kMagic);
  Store(&bytes[4], header.version);
  Store(&bytes[6], static_cast<uint16_t>(header.type));
  Store(&bytes[8], header.request_id);
  Store(&bytes[16], header.control_bytes);
  Store(&bytes[20], header.flags);
  Store(&bytes[24], header.payload_bytes);
  return bytes;
}

Result<FrameHeader> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes,
                                 const FrameLimits& limits) {
  if (Load<uint32_t>(&bytes[0]) != kMagic) {
    return InvalidArgument("not a prefixd frame (wrong magic); is the other side prefixd?");
  }
  FrameHeader header;
  header.version = Load<uint16_t>(&bytes[4]);
  if (header.version != kVersion) {
    return Error{Code::kFailedPrecondition, "the other side speaks protocol version " +
                                                std::to_string(header.version) +
                                                ", this side version " + std::to_string(kVersion) +
                                                "; update the older of client and daemon"};
  }
  header.type = static_cast<MessageType>(Load<uint16_t>(&bytes[6]));
  header.request_id = Load<uint64_t>(&bytes[8]);
  header.control_bytes = Load<uint32_t>(&bytes[16]);
  header.flags = Load<uint32_t>(&bytes[20]);
  header.payload_bytes = Load<uint64_t>(&bytes[24]);
  if ((header.flags & ~kKnownFlags) != 0) {
    return InvalidArgument("frame with unknown flags " + std::to_string(header.flags));
  }
  if (header.control_bytes > limits.control_bytes) {
    return InvalidArgument("control part of " + std::to_string(header.control_bytes) +
                           " bytes; the limit is " + std::to_string(limits.control_bytes));
  }
  if (header.payload_bytes > limits.payload_bytes) {
    return InvalidArgument("payload of " + std::to_string(header.payload_bytes) +
                           " bytes; the limit is " + std::to_string(limits.payload_bytes));
  }
  return header;
}

Status CheckExtent(const Extent& extent, uint64_t area_bytes) {
  if (extent.offset > area_bytes || extent.length > area_bytes - extent.offset) {
    return InvalidArgument("tensor at offset " + std::to_string(extent.offset) + " of " +
                           std::to_string(extent.length) + " bytes lies outside the " +
                           std::to_string(area_bytes) + " bytes of the data area");
  }
  return {};
}

}  // namespace prefixd::wire
