// Describes what travels of each type: its fields and their names on the wire, once for encoding
// and decoding. Only codec.cc includes this.
#pragma once

#include <concepts>
#include <type_traits>

#include "base/tables/statistics.h"
#include "prefixd/attach.h"
#include "prefixd/compress.h"
#include "prefixd/estimate.h"
#include "prefixd/explain.h"
#include "prefixd/ingest.h"
#include "prefixd/kv_shape.h"
#include "prefixd/lifetime.h"
#include "prefixd/lists.h"
#include "prefixd/match.h"
#include "prefixd/model.h"
#include "prefixd/partition.h"
#include "prefixd/policy.h"
#include "prefixd/prefix_summary.h"
#include "prefixd/put.h"
#include "prefixd/rewrite.h"
#include "prefixd/session_info.h"
#include "prefixd/stored_part.h"
#include "prefixd/verify.h"
#include "protocol/codec.h"
#include "protocol/server_stats.h"

namespace prefixd::wire {

// Matches T and const T, so that one description serves encoding and decoding.
template <typename T, typename U>
concept Is = std::same_as<std::remove_const_t<T>, U>;

// Statistics travel under the names in their table.
template <class V, class S>
requires HasStatistics<std::remove_const_t<S>>
void Describe(V& v, S& s) {
  ForEachStatistic<std::remove_const_t<S>>([&](const auto& x) { v.Add(x, s.*x.member); });
}
template <class V>
void Describe(V& v, Is<Hello> auto& s) {
  v("client", s.client), v("tenant", s.tenant), v("token", s.token);
  v("admin", s.admin), v("shared_memory", s.shared_memory);
  v("ring", s.ring);
}
template <class V>
void Describe(V& v, Is<HelloReply> auto& s) {
  v("server", s.server), v("pid", s.pid), v("max_payload_bytes", s.max_payload_bytes);
  v("max_calls", s.max_calls), v("region_bytes", s.region_bytes), v("admin", s.admin);
  v("ring_slots", s.ring_slots), v("ring_slot_bytes", s.ring_slot_bytes);
}
template <class V>
void Describe(V& v, Is<LayerGeometry> auto& s) {
  v("scale", s.scale), v("softcap", s.softcap), v("sliding_window", s.sliding_window);
  v("n_q_heads", s.n_q_heads), v("n_kv_heads", s.n_kv_heads);
  v("key_dim", s.key_dim), v("value_dim", s.value_dim), v("stored", s.stored);
}
template <class V>
void Describe(V& v, Is<KvGeometry> auto& s) {
  v("n_layers", s.n_layers), v("n_q_heads", s.n_q_heads), v("n_kv_heads", s.n_kv_heads);
  v("key_dim", s.key_dim), v("value_dim", s.value_dim), v("dtype", s.dtype);
  v("layers", s.layers);
}
template <class V>
void Describe(V& v, Is<ModelSpec> auto& s) {
  v("name", s.name), v("geometry", s.geometry), v("identity", s.identity);
  v("feature_maps", s.feature_maps);
}
template <class V>
void Describe(V& v, Is<EncodingError> auto& s) {
  v("key_max", s.key_max), v("key_rms", s.key_rms);
  v("value_max", s.value_max), v("value_rms", s.value_rms);
}
template <class V>
void Describe(V& v, Is<StoredPart> auto& s) {
  v("tokens", s.tokens), v("encoding", s.encoding), v("chunk_tokens", s.chunk_tokens);
}
template <class V>
void Describe(V& v, Is<HeadRange> auto& s) {
  v("first_head", s.first), v("n_heads", s.n);
}
template <class V>
void Describe(V& v, Is<PutSpec> auto& s) {
  v("model", s.model), v("tenant", s.tenant), v("label", s.label);
  v("pinned", s.pinned), v("ttl_seconds", s.ttl_seconds), v("encoding", s.encoding);
  v("wait_ms", s.wait_ms), v("alone", s.alone);
  v("derived", s.derived), v("accept_approximate", s.accept_approximate);
  v("lineage", s.lineage), v("prefill_from", s.prefill_from);
  Describe(v, s.heads);
}
template <class V>
void Describe(V& v, Is<PersistSpec> auto& s) {
  v("label", s.label), v("pinned", s.pinned), v("ttl_seconds", s.ttl_seconds);
  v("encoding", s.encoding), v("wait_ms", s.wait_ms), v("alone", s.alone);
  v("derived", s.derived);
}
template <class V>
void Describe(V& v, Is<Lifetime> auto& s) {
  v("pinned", s.pinned), v("ttl_seconds", s.ttl_seconds);
}
template <class V>
void Describe(V& v, Is<EngineSpeed> auto& s) {
  v("prefill_tokens_per_second", s.prefill_tokens_per_second);
  v("cached_tokens", s.cached_tokens), v("answer_tokens", s.answer_tokens);
}
template <class V>
void Describe(V& v, Is<TimeEstimate> auto& s) {
  v("seconds", s.seconds), v("source", s.source);
}
template <class V>
void Describe(V& v, Is<ReuseEstimate> auto& s) {
  v("tokens", s.tokens), v("memory_bytes", s.memory_bytes), v("disk_bytes", s.disk_bytes);
  v("restore", s.restore), v("retrieve", s.retrieve), v("recompute", s.recompute);
  v("prefill_tokens_per_second", s.prefill_tokens_per_second), v("advice", s.advice);
}
template <class V>
void Describe(V& v, Is<MatchSpec> auto& s) {
  v("model", s.model), v("tenant", s.tenant);
  v("accept_approximate", s.accept_approximate), v("lineage", s.lineage);
  v("engine", s.engine), v("accept_compressed", s.accept_compressed);
}
template <class V>
void Describe(V& v, Is<PrefixMatch> auto& s) {
  v("prefix", s.prefix), v("n_tokens", s.n_tokens), v("stored_tokens", s.stored_tokens);
  v("exact_tokens", s.exact_tokens), v("estimate", s.estimate), v("compressed", s.compressed);
}
template <class V>
void Describe(V& v, Is<ExplainSpec> auto& s) {
  Describe(v, s.match);
  v("identity", s.identity);
}
template <class V>
void Describe(V& v, Is<FieldDifference> auto& s) {
  v("field", s.field), v("asked", s.asked), v("stored", s.stored);
}
template <class V>
void Describe(V& v, Is<Miss> auto& s) {
  v("reason", s.reason), v("text", s.text), v("n_tokens", s.n_tokens), v("prefix", s.prefix);
  v("model", s.model), v("unix_ms", s.unix_ms), v("differs", s.differs);
  v("asked_token", s.asked_token), v("stored_token", s.stored_token);
}
template <class V>
void Describe(V& v, Is<Explanation> auto& s) {
  v("match", s.match), v("asked_tokens", s.asked_tokens), v("misses", s.misses);
}
template <class V>
void Describe(V& v, Is<RewriteResult> auto& s) {
  v("segments", s.segments), v("rewritten", s.rewritten), v("bytes", s.bytes), v("left", s.left);
}
template <class V>
void Describe(V& v, Is<CompressSpec> auto& s) {
  v("keep", s.keep), v("policy", s.policy), v("scorers", s.scorers);
  v("max_error", s.max_error), v("dry_run", s.dry_run);
}
template <class V>
void Describe(V& v, Is<CompressReport::Layer> auto& s) {
  v("layer", s.layer), v("error_before", s.error_before), v("error_after", s.error_after);
  v("worst_after", s.worst_after);
}
template <class V>
void Describe(V& v, Is<CompressReport> auto& s) {
  v("compressed", s.compressed), v("refused", s.refused), v("own_tokens", s.own_tokens);
  v("kept_tokens", s.kept_tokens);
  v("bytes_before", s.bytes_before), v("bytes_after", s.bytes_after);
  v("queries_scored", s.queries_scored), v("queries_measured", s.queries_measured);
  v("measured_tokens", s.measured_tokens), v("retrieved_tokens", s.retrieved_tokens);
  v("error_before", s.error_before), v("error_after", s.error_after), v("layers", s.layers);
}
template <class V>
void Describe(V& v, Is<PutResult> auto& s) {
  v("prefix", s.prefix), v("n_tokens", s.n_tokens), v("stored_tokens", s.stored_tokens);
  v("bytes", s.bytes), v("seconds", s.seconds);
  v("encoding", s.encoding), v("encoding_error", s.encoding_error);
  v("exact_tokens", s.exact_tokens), v("lineage", s.lineage);
}
template <class V>
void Describe(V& v, Is<StepPolicy> auto& s) {
  v("mode", s.mode), v("estimator", s.estimator), v("budget", s.budget), v("k", s.k);
  v("l_gen", s.l_gen), v("selector", s.selector);
  v("adaptive", s.adaptive), v("report_missing", s.report_missing), v("fixed", s.fixed);
  v("spread", s.spread);
  v("sharing", s.sharing), v("prefetch", s.prefetch), v("retain", s.retain);
}
template <class V>
void Describe(V& v, Is<StepPolicy::Sharing> auto& s) {
  v("block", s.block), v("similarity", s.similarity), v("dilation", s.dilation);
  v("across", s.across);
}
template <class V>
void Describe(V& v, Is<StepPolicy::Prefetch> auto& s) {
  v("forward", s.forward), v("back", s.back), v("max_mib", s.max_mib);
}
template <class V>
void Describe(V& v, Is<StepPolicy::Retain> auto& s) {
  v("tokens", s.tokens), v("by", s.by);
}
template <class V>
void Describe(V& v, Is<StepPolicy::Fixed> auto& s) {
  v("layer", s.layer), v("kv_head", s.kv_head), v("estimator", s.estimator);
}
template <class V>
void Describe(V& v, Is<AttachSpec> auto& s) {
  v("model", s.model), v("tenant", s.tenant), v("prefix", s.prefix), v("n_tokens", s.n_tokens);
  v("policy", s.policy), v("accept_approximate", s.accept_approximate);
  v("lineage", s.lineage), v("call_timeout_ms", s.call_timeout_ms);
  v("own_memory_tokens", s.own_memory_tokens);
  v("engine", s.engine), v("accept_compressed", s.accept_compressed);
}
template <class V>
void Describe(V& v, Is<Anchors> auto& s) {
  v("n_sink", s.n_sink), v("n_tail", s.n_tail);
}
template <class V>
void Describe(V& v, Is<SessionInfo> auto& s) {
  v("id", s.id), v("model", s.model), v("tenant", s.tenant), v("prefix", s.prefix);
  v("n_tokens", s.n_tokens), v("geometry", s.geometry), v("anchors", s.anchors);
  v("estimator", s.estimator), v("d_phi", s.d_phi), v("attach_seconds", s.attach_seconds);
  v("parts", s.parts), v("exact_tokens", s.exact_tokens);
  v("estimate", s.estimate), v("own_memory_tokens", s.own_memory_tokens);
  v("compressed", s.compressed);
}
template <class V>
void Describe(V& v, Is<StepInfo> auto& s) {
  v("k", s.k), v("ledger", s.ledger), v("k_per_head", s.k_per_head);
  v("rho_z", s.rho_z), v("missing", s.missing);
}
template <class V>
void Describe(V& v, Is<MissingMass> auto& s) {
  v("delta", s.delta), v("certified", s.certified);
}
template <class V>
void Describe(V& v, Is<SessionReport> auto& s) {
  v("info", s.info), v("total", s.total), v("per_head", s.per_head);
  v("own_tokens", s.own_tokens), v("own_moved", s.own_moved);
  v("own_retained", s.own_retained);
}
template <class V>
void Describe(V& v, Is<HeadChoice> auto& s) {
  v("layer", s.layer), v("kv_head", s.kv_head), v("chosen", s.chosen), v("budget", s.budget);
  v("errors", s.errors);
}
template <class V>
void Describe(V& v, Is<IndexRecall> auto& s) {
  v("layer", s.layer), v("kv_head", s.kv_head), v("index", s.index), v("queries", s.queries);
  v("k", s.k), v("recall", s.recall), v("mass", s.mass), v("effort", s.effort);
  v("used", s.used);
}
template <class V>
void Describe(V& v, Is<EstimatorError> auto& s) {
  v("estimator", s.estimator), v("error", s.error);
}
template <class V>
void Describe(V& v, Is<PrefixSummary> auto& s) {
  v("id", s.id), v("model", s.model), v("tenant", s.tenant), v("label", s.label);
  v("n_tokens", s.n_tokens), v("own_tokens", s.own_tokens), v("children", s.children);
  v("own_bytes", s.own_bytes), v("created_unix_ms", s.created_unix_ms);
  v("last_used_unix_ms", s.last_used_unix_ms), v("quarantined", s.quarantined);
  v("reclustered", s.reclustered), v("pinned", s.pinned), v("expires_unix_ms", s.expires_unix_ms);
  v("quarantine", s.quarantine);
  v("ingest", s.ingest), v("ingest_error", s.ingest_error);
  v("encoding", s.encoding), v("encoding_error", s.encoding_error);
  v("exact_tokens", s.exact_tokens);
  v("kept_tokens", s.kept_tokens), v("saved_bytes", s.saved_bytes);
}
template <class V>
void Describe(V& v, Is<ListSpec> auto& s) {
  v("after", s.after), v("limit", s.limit), v("tenant", s.tenant);
}
template <class V>
void Describe(V& v, Is<ModelPage> auto& s) {
  v("models", s.models), v("next", s.next);
}
template <class V>
void Describe(V& v, Is<PrefixPage> auto& s) {
  v("prefixes", s.prefixes), v("next", s.next);
}
template <class V>
void Describe(V& v, Is<PrefixDetail> auto& s) {
  v("summary", s.summary), v("chain", s.chain), v("blobs", s.blobs), v("choices", s.choices);
  v("indexes", s.indexes);
}
template <class V>
void Describe(V& v, Is<VerifySummary> auto& s) {
  v("segments", s.segments), v("pages", s.pages), v("blobs", s.blobs), v("bytes", s.bytes);
  v("damaged", s.damaged), v("covered", s.covered), v("unread", s.unread);
}
template <class V>
void Describe(V& v, Is<Cut> auto& s) {
  v("score", s.score), v("kind", s.kind);
}
template <class V>
void Describe(V& v, Is<Selection> auto& s) {
  v("cuts", s.cuts), v("keys_scanned", s.keys_scanned), v("bytes_scanned", s.bytes_scanned);
}

}  // namespace prefixd::wire
