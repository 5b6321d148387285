#include "daemon/calls/reply.h"

#include <string>
#include <utility>

namespace prefixd::daemon {
namespace {

// Whether a call of that type has done what must not be done twice.
bool Changes(wire::MessageType type) {
  switch (type) {
    case wire::MessageType::kAttach:
    case wire::MessageType::kStep:  // which may append
    case wire::MessageType::kAppend:
    case wire::MessageType::kFork:
    case wire::MessageType::kForkPersisted:
    case wire::MessageType::kPersist:
    case wire::MessageType::kPutCommit:
      return true;
    default:
      return false;
  }
}

Status Pack(const MemoryAccount& account, wire::MessageType type, uint64_t max_payload_bytes,
            Response* response) {
  if (response->payload.size() > max_payload_bytes) {
    return Error{Code::kResourceExhausted, "the answer has " +
                                               std::to_string(response->payload.size()) +
                                               " bytes of tensors, and a message has at most " +
                                               std::to_string(max_payload_bytes) +
                                               " (limits.max_frame_mib); ask for less at a time"};
  }
  response->packed = wire::PackControl(response->control);
  response->control = wire::Json::object();
  const uint64_t bytes = response->packed.size();
  if (bytes > wire::kMaxReplyControlBytes) {
    return Error{Code::kResourceExhausted,
                 "the answer's control part has " + std::to_string(bytes) +
                     " bytes, and a message has at most " +
                     std::to_string(wire::kMaxReplyControlBytes) +
                     "; ask for less at a time (of a list, a smaller page)"};
  }
  // Whoever heard of a refusal would do it again.
  if (Changes(type)) {
    response->packed_memory = account.Charge(MemoryKind::kMessages, bytes);
    return {};
  }
  PREFIXD_ASSIGN(response->packed_memory, TakeForMessage(account, bytes));
  return {};
}

}  // namespace

void PackReply(const MemoryAccount& account, wire::MessageType type, uint64_t max_payload_bytes,
               Response* response) {
  if (response->error) return;
  if (Status packed = Pack(account, type, max_payload_bytes, response); !packed.ok()) {
    response->error = packed.error();
    response->packed = {};
    response->payload = {};
    response->memory.Release();
    response->fd = -1;
    response->held.reset();
  }
}

}  // namespace prefixd::daemon
