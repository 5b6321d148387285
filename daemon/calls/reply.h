// Packs the control part of an answer, on the thread that made it: large ones would keep the io
// thread from all other connections.
//
// Thread-safety: free functions.
#pragma once

#include "base/memory_budget.h"
#include "daemon/calls/message.h"

namespace prefixd::daemon {

// Moves response->control into response->packed, charged to the account until it is sent. A reply
// that no frame can carry, or that there is no memory for, becomes the error kResourceExhausted.
void PackReply(const MemoryAccount& account, wire::MessageType type, uint64_t max_payload_bytes,
               Response* response);

}  // namespace prefixd::daemon
