// Converts the runtime's value types to JSON and back (MessagePack on the wire, text in
// `prefixctl --json` and in model files). Internal to this project: it names the JSON library.
//
// One description per type serves both directions. Decoding is tolerant of absent and of unknown
// fields (newer peers add some) and strict about types and ranges. Nothing here throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "prefixd/selection.h"
#include "protocol/frame.h"
#include "protocol/server_stats.h"

namespace prefixd::wire {

using Json = nlohmann::json;

// The first message of a connection.
struct Hello {
  std::string client;  // name and version, for the daemon's log
  std::string tenant;
  std::string token;   // TCP, when the daemon requires one
  bool admin = false;  // see every tenant; the daemon's own user and tokens with the right admin
  bool shared_memory = false;
  uint32_t ring = 0;  // version of the frames of steps that the client speaks; 0: no ring
};

struct HelloReply {
  std::string server;  // "prefixd 0.1.0"
  uint32_t pid = 0;
  uint64_t max_payload_bytes = 0;
  uint32_t max_calls = 0;     // in flight on one connection
  uint64_t region_bytes = 0;  // 0: no shared memory
  bool admin = false;
  uint32_t ring_slots = 0;  // 0: no ring
  uint64_t ring_slot_bytes = 0;
};

// Instantiated for every type below; see codec.cc.
//   Hello, HelloReply, ServerStats, Extent, KvGeometry, ModelSpec, PutSpec (no tokens),
//   PersistSpec, Lifetime, RuntimeOptions (prefixd/options.h), MatchSpec (no tokens), PrefixMatch,
//   ExplainSpec (no tokens), Explanation, RewriteResult,
//   PutResult, StepPolicy, AttachSpec (no tokens), SessionInfo, Ledger, StepInfo, SessionReport,
//   PrefixSummary, PrefixDetail, HostTierTenant, MemoryOfKind, MemoryOfTenant, TenantStats,
//   RuntimeStats, VerifySummary, TokenRange, HeadRange, Selection (no ids), ListSpec, ModelPage,
//   PrefixPage
template <typename T>
Json ToJson(const T& value);
// kInvalidArgument names the field ("attach.policy.budget: expected a number").
template <typename T>
Result<T> FromJson(const Json& json, std::string_view what);

// An error travels as {code, message}, the message cut to kMaxErrorBytes. A malformed one decodes
// to a kInternal error.
inline constexpr size_t kMaxErrorBytes = 4096;
Json ErrorToJson(const Error& error);
Error ErrorFromJson(const Json& json);

// Returns one field of an object; kInvalidArgument when absent or of the wrong type or range.
//   T: bool, uint32_t, uint64_t, double, std::string, std::vector<uint64_t>, std::vector<Extent>
template <typename T>
Result<T> Field(const Json& json, const char* key);

std::vector<std::byte> PackControl(const Json& json);
// Checks nesting and lengths, and returns about how much memory the unpacked control part takes.
Result<uint64_t> ControlMemory(std::span<const std::byte> bytes);
// Checks nesting and lengths first (msgpack_check.h). An empty span is an empty object.
Result<Json> UnpackControl(std::span<const std::byte> bytes);

// Tokens and row ids travel as little-endian uint32 in the payload.
std::span<const std::byte> BytesOf(std::span<const uint32_t> values);
std::span<const std::byte> BytesOf(std::span<const float> values);
std::span<std::byte> WritableBytesOf(std::span<float> values);

}  // namespace prefixd::wire
