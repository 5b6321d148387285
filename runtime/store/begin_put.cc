#include "runtime/store/begin_put.h"

#include <chrono>
#include <utility>

#include "base/session_arguments.h"
#include "runtime/ingest/joint_put.h"
#include "runtime/ingest/put_stream.h"
#include "runtime/store/lookup.h"

namespace prefixd {
namespace {

// An open put keeps the prompt's ids twice, and its chained hashes.
constexpr uint64_t kPutTokenBytes = 2 * sizeof(uint32_t) + 4;
constexpr uint64_t kMaxTtlSeconds = 1000ull * 365 * 24 * 3600;

}  // namespace

Status CheckTtl(uint64_t ttl_seconds) {
  if (ttl_seconds <= kMaxTtlSeconds) return {};
  return InvalidArgument("ttl_seconds is at most 1000 years; 0 keeps the prefix for ever");
}

Result<std::unique_ptr<PutStream>> BeginStorePut(const std::shared_ptr<Core>& core,
                                                 const PutSpec& spec, bool live) {
  PREFIXD_ASSIGN(const auto model, core->models.Find(spec.model));
  PREFIXD_TRY(CheckTtl(spec.ttl_seconds));
  PREFIXD_ASSIGN(const auto usual, RowEncodingFromName(core->options.encoding));
  PREFIXD_ASSIGN(auto accept, AcceptanceOf(spec));
  accept.live = live;
  const KvGeometry& all = model->spec.geometry;
  PREFIXD_ASSIGN(const HeadRange heads, ResolvePutHeads(all, spec.heads));
  const auto n_tokens = static_cast<uint32_t>(spec.tokens.size());
  const auto begin = [&](std::chrono::milliseconds wait) -> Result<std::shared_ptr<JointPut>> {
    PREFIXD_ASSIGN(
        auto writer,
        core->storage->BeginPut(
            spec.model, spec.tenant, spec.tokens, spec.label,
            {spec.pinned, spec.ttl_seconds * 1000, spec.encoding.value_or(usual),
             static_cast<uint64_t>(wait.count()), spec.alone, spec.derived, accept, live}));
    // What a session moves out of its own memory it reads by what is derived.
    const bool deferred = core->options.defer_ingest && !live;
    const auto committed = [queue = core->ingest.get(), deferred](const storage::SegmentId& id) {
      if (!deferred) queue->Enqueue(id);
    };
    return std::make_shared<JointPut>(
        JointPut::Target{core, core->storage.get(), all, n_tokens, committed}, std::move(writer));
  };
  PREFIXD_ASSIGN(auto part, core->joint_puts.Enter(spec, heads, all.n_kv_heads, begin));
  PutContext context;
  context.keep_alive = core;
  context.pool = &core->pool;
  context.geometry = GeometryOf(all, heads);
  context.first_head = heads.first;
  context.prompt_tokens = n_tokens;
  context.query_samples = core->options.query_samples;
  context.wait = std::chrono::milliseconds(spec.wait_ms);
  context.rates = &core->rates;
  context.tenant = spec.tenant;
  context.model = spec.model;
  context.prefill_from = spec.prefill_from;
  uint64_t query_floats = 0;  // of one token
  for (uint32_t l = 0; l < all.n_layers; ++l) {
    query_floats += context.geometry.layer(l).query_floats();
  }
  context.fixed_bytes =
      context.query_samples * query_floats * sizeof(float) + spec.tokens.size() * kPutTokenBytes;
  PREFIXD_ASSIGN(context.memory,
                 core->memory->Of(spec.tenant).Take(MemoryKind::kPuts, context.fixed_bytes));
  return MakePutStream(std::move(context), std::move(part));
}

}  // namespace prefixd
