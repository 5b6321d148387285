#include "daemon/calls/reply.h"

#include <string>
#include <utility>

namespace prefixd::daemon {
namespace {

Status Pack(const MemoryAccount& account, uint64_t max_payload_bytes, Response* response) {
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
  PREFIXD_ASSIGN(response->packed_memory, TakeForMessage(account, bytes));
  return {};
}

}  // namespace

void PackReply(const MemoryAccount& account, uint64_t max_payload_bytes, Response* response) {
  if (response->error) return;
  if (Status packed = Pack(account, max_payload_bytes, response); !packed.ok()) {
    response->error = packed.error();
    response->packed = {};
    response->payload = {};
    response->memory.Release();
    response->fd = -1;
    response->held.reset();
  }
}

}  // namespace prefixd::daemon
