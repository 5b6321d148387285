// A request and its reply between connection and handler, with the memory that they are charged for
// and the id under which logs name them. Plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/memory_budget.h"
#include "prefixd/result.h"
#include "protocol/codec.h"
#include "protocol/frame.h"

namespace prefixd::daemon {

struct Request {
  wire::MessageType type = wire::MessageType::kHello;
  bool shared = false;  // tensors lie in the connection's region
  wire::Json control = wire::Json::object();
  std::vector<std::byte> payload;
  std::string id = {};  // RequestId
};

struct Response {
  std::optional<Error> error;
  // Of a call that is answered all the same: its first step that failed.
  std::optional<Error> failed_step;
  // The error asks the client to come again, as part of an ordinary put: nothing failed.
  bool waits = false;
  wire::Json control = wire::Json::object();
  std::vector<std::byte> payload;
  int fd = -1;                       // sent with the reply
  std::shared_ptr<const void> held;  // keeps fd open until then
  MemoryCharge memory;               // the payload's
  std::vector<std::byte> packed;     // the control part, as PackReply (reply.h) leaves it
  MemoryCharge packed_memory;
};

// Small messages are counted and never refused: a client must be able to detach, cancel and ask why
// when memory is short.
inline constexpr uint64_t kSmallMessageBytes = 64u << 10;
inline Result<MemoryCharge> TakeForMessage(const MemoryAccount& account, uint64_t bytes) {
  if (bytes > kSmallMessageBytes) return account.Take(MemoryKind::kMessages, bytes);
  return account.Charge(MemoryKind::kMessages, bytes);
}

// The id under which a call stands in logs: "c12-345", and with what the client calls it
// "c12-345/NAME". Steps that come through a ring have no number: "c12-ring".
std::string RequestId(uint64_t connection, uint64_t number, const wire::Json& control);
inline constexpr size_t kMaxTraceBytes = 64;

}  // namespace prefixd::daemon
