// Fuzzes how a daemon or a client reads the bytes of a socket: frame header, control part, the
// value types in it, and extents.
#include <nlohmann/json.hpp>

#include "prefixd/attach.h"
#include "prefixd/explain.h"
#include "prefixd/kv_shape.h"
#include "prefixd/ledger.h"
#include "prefixd/lifetime.h"
#include "prefixd/lists.h"
#include "prefixd/match.h"
#include "prefixd/model.h"
#include "prefixd/options.h"
#include "prefixd/policy.h"
#include "prefixd/prefix_summary.h"
#include "prefixd/put.h"
#include "prefixd/rewrite.h"
#include "prefixd/runtime_stats.h"
#include "prefixd/session_info.h"
#include "prefixd/verify.h"
#include "protocol/codec.h"
#include "protocol/frame.h"
#include "protocol/msgpack_check.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

using namespace prefixd::wire;

void CheckHeader(std::span<const std::byte, kHeaderBytes> bytes) {
  const FrameLimits limits;
  const auto header = DecodeHeader(bytes, limits);
  if (!header.ok()) return;
  FUZZ_EXPECT(header->control_bytes <= limits.control_bytes);
  FUZZ_EXPECT(header->payload_bytes <= limits.payload_bytes);
  FUZZ_EXPECT(std::ranges::equal(EncodeHeader(*header), bytes));
  FUZZ_EXPECT(IsRequest(header->type) ? MessageName(header->type) != "unknown" : true);
}

// Equal bytes are equal values: every field is written.
template <typename T>
void CheckType(const Json& json) {
  const auto value = FromJson<T>(json, "x");
  if (!value.ok()) {
    FUZZ_EXPECT(value.error().message.starts_with("x"));
    return;
  }
  const Json written = ToJson(*value);
  const auto back = FromJson<T>(written, "x");
  FUZZ_EXPECT(back.ok() && PackControl(ToJson(*back)) == PackControl(written));
}

template <typename... T>
void CheckTypes(const Json& json) {
  (CheckType<T>(json), ...);
}

void CheckFields(const Json& json) {
  if (!json.is_object()) return;
  (void)Field<bool>(json, "admin").ok();
  (void)Field<uint32_t>(json, "layer").ok();
  (void)Field<uint64_t>(json, "session").ok();
  (void)Field<double>(json, "budget").ok();
  (void)Field<std::string>(json, "prefix").ok();
  (void)Field<TokenRange>(json, "range").ok();
  const auto extents = Field<std::vector<Extent>>(json, "extents");
  if (!extents.ok()) return;
  for (const Extent& e : *extents) {
    constexpr uint64_t kArea = 1 << 16;
    const bool inside =
        static_cast<unsigned __int128>(e.offset) + e.length <= kArea && e.offset <= kArea;
    FUZZ_EXPECT(CheckExtent(e, kArea).ok() == inside);
  }
}

void CheckJson(const Json& json) {
  CheckTypes<Hello, HelloReply, ServerStats, Extent, KvGeometry, ModelSpec, PutSpec, PersistSpec,
             Lifetime, RuntimeOptions, MatchSpec, PrefixMatch, PutResult, StepPolicy, AttachSpec,
             SessionInfo, Ledger, StepInfo, SessionReport, PrefixSummary, PrefixDetail,
             RuntimeStats, VerifySummary, ExplainSpec, Explanation, RewriteResult, TokenRange,
             HeadRange, Selection, ListSpec, ModelPage, PrefixPage, std::vector<ModelSpec>,
             std::vector<PrefixSummary>>(json);
  CheckFields(json);
  const Error error = ErrorFromJson(json);
  const Error back = ErrorFromJson(ErrorToJson(error));
  FUZZ_EXPECT(back.code == error.code && back.message == error.message);
}

void CheckControl(std::span<const std::byte> bytes) {
  const auto json = UnpackControl(bytes);
  if (!json.ok()) return;
  FUZZ_EXPECT(bytes.empty() || CheckMsgpack(bytes, kMaxControlDepth).ok());
  const auto memory = ControlMemory(bytes.empty() ? PackControl(*json) : bytes);
  FUZZ_EXPECT(memory.ok() && *memory >= bytes.size() && *memory <= 128 * (bytes.size() + 1));
  const std::vector<std::byte> packed = PackControl(*json);
  const auto back = UnpackControl(packed);
  FUZZ_EXPECT(back.ok() && PackControl(*back) == packed);
  CheckJson(*json);
}

FrameHeader MakeHeader(FuzzedDataProvider& in) {
  FrameHeader h;
  h.type = static_cast<MessageType>(Whole<uint16_t>(in));
  h.request_id = Whole<uint64_t>(in);
  h.control_bytes = in.ConsumeIntegralInRange<uint32_t>(0, kMaxRequestControlBytes);
  h.flags = in.ConsumeIntegralInRange<uint32_t>(0, kKnownFlags);
  h.payload_bytes = in.ConsumeIntegralInRange<uint64_t>(0, kMaxPayloadBytes);
  return h;
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  switch (Whole<uint8_t>(in) % 4) {
    case 0: {
      const Bytes bytes = Rest(in);
      if (bytes.size() < kHeaderBytes) break;
      CheckHeader(std::span(bytes).first<kHeaderBytes>());
      break;
    }
    case 1: {
      const FrameHeader header = MakeHeader(in);
      auto bytes = EncodeHeader(header);
      const auto back = DecodeHeader(bytes, {});
      FUZZ_EXPECT(back.ok() && *back == header);
      Damage(in, bytes);
      CheckHeader(bytes);
      break;
    }
    case 2:
      CheckControl(Rest(in));
      break;
    case 3: {  // model files and `prefixctl` read text
      const Json json = Json::parse(in.ConsumeRemainingBytesAsString(), nullptr, false);
      if (!json.is_discarded()) CheckJson(json);
      break;
    }
  }
}

}  // namespace prefixd::fuzz
