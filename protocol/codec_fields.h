// What travels of each type: its fields and their names on the wire, said once for encoding and
// decoding. codec.cc alone includes this.
#pragma once

#include <concepts>
#include <type_traits>

#include "prefixd/options.h"
#include "protocol/codec.h"

namespace prefixd::wire {

// Matches T and const T, so that one description serves encoding and decoding.
template <typename T, typename U>
concept Is = std::same_as<std::remove_const_t<T>, U>;

template <class V>
void Describe(V& v, Is<Hello> auto& s) {
  v("client", s.client), v("tenant", s.tenant), v("token", s.token);
  v("admin", s.admin), v("shared_memory", s.shared_memory);
}
template <class V>
void Describe(V& v, Is<HelloReply> auto& s) {
  v("server", s.server), v("pid", s.pid), v("max_payload_bytes", s.max_payload_bytes);
  v("max_calls", s.max_calls), v("region_bytes", s.region_bytes), v("admin", s.admin);
}
template <class V>
void Describe(V& v, Is<ServerStats> auto& s) {
  v("version", s.version), v("address", s.address), v("dir", s.dir), v("pid", s.pid);
  v("uptime_ms", s.uptime_ms), v("connections", s.connections);
  v("connections_total", s.connections_total), v("connections_refused", s.connections_refused);
  v("calls", s.calls), v("calls_failed", s.calls_failed);
  v("protocol_errors", s.protocol_errors), v("bytes_in", s.bytes_in);
  v("bytes_out", s.bytes_out), v("shared_memory_bytes", s.shared_memory_bytes);
}
template <class V>
void Describe(V& v, Is<LayerGeometry> auto& s) {
  v("scale", s.scale), v("softcap", s.softcap), v("sliding_window", s.sliding_window);
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
void Describe(V& v, Is<PutSpec> auto& s) {
  v("model", s.model), v("tenant", s.tenant), v("label", s.label);
  v("pinned", s.pinned), v("ttl_seconds", s.ttl_seconds), v("encoding", s.encoding);
}
template <class V>
void Describe(V& v, Is<RuntimeOptions> auto& s) {
  v("dir", s.dir), v("io", s.io), v("host_tier_bytes", s.host_tier_bytes);
  v("host_tier_shares", s.host_tier_shares), v("host_tier_hugetlb", s.host_tier_hugetlb);
  v("host_tier_mlock", s.host_tier_mlock), v("pin_host_tier", s.pin_host_tier);
  v("selector_memory_bytes", s.selector_memory_bytes);
  v("min_free_bytes", s.min_free_bytes), v("read_deadline_ms", s.read_deadline_ms);
  v("quota_bytes", s.quota_bytes), v("tenant_quota_bytes", s.tenant_quota_bytes);
  v("tenant_quotas", s.tenant_quotas), v("evict", s.evict), v("maintenance_ms", s.maintenance_ms);
  v("threads", s.threads), v("compute", s.compute), v("anchors", s.anchors);
  v("checkpoint_tokens", s.checkpoint_tokens), v("estimators", s.estimators);
  v("clusters", s.clusters), v("phi_features", s.phi_features), v("encoding", s.encoding);
  v("query_samples", s.query_samples), v("choice_budgets", s.choice_budgets);
  v("build_codes", s.build_codes), v("codes_min_tokens", s.codes_min_tokens);
  v("recall_target", s.recall_target);
  v("build_ivf", s.build_ivf), v("ivf_min_tokens", s.ivf_min_tokens), v("settle", s.settle);
  v("settle_min_tokens", s.settle_min_tokens), v("settle_chunk_tokens", s.settle_chunk_tokens);
  v("merge_max_tokens", s.merge_max_tokens), v("max_sessions", s.max_sessions);
  v("scrub_bytes_per_second", s.scrub_bytes_per_second);
  v("scrub_interval_hours", s.scrub_interval_hours);
}
template <class V>
void Describe(V& v, Is<Retention> auto& s) {
  v("pinned", s.pinned), v("ttl_seconds", s.ttl_seconds);
}
template <class V>
void Describe(V& v, Is<PrefixMatch> auto& s) {
  v("prefix", s.prefix), v("n_tokens", s.n_tokens), v("stored_tokens", s.stored_tokens);
}
template <class V>
void Describe(V& v, Is<PutResult> auto& s) {
  v("prefix", s.prefix), v("n_tokens", s.n_tokens), v("stored_tokens", s.stored_tokens);
  v("bytes", s.bytes), v("seconds", s.seconds);
  v("encoding", s.encoding), v("encoding_error", s.encoding_error);
}
template <class V>
void Describe(V& v, Is<StepPolicy> auto& s) {
  v("mode", s.mode), v("estimator", s.estimator), v("budget", s.budget), v("k", s.k);
  v("l_gen", s.l_gen), v("selector", s.selector);
  v("adaptive", s.adaptive), v("report_missing", s.report_missing), v("fixed", s.fixed);
  v("sharing", s.sharing), v("window", s.window);
  v("prefetch", s.prefetch);
}
template <class V>
void Describe(V& v, Is<StepPolicy::Sharing> auto& s) {
  v("block", s.block), v("similarity", s.similarity), v("dilation", s.dilation);
  v("across", s.across);
}
template <class V>
void Describe(V& v, Is<StepPolicy::Window> auto& s) {
  v("phi", s.phi), v("alpha", s.alpha);
}
template <class V>
void Describe(V& v, Is<StepPolicy::Prefetch> auto& s) {
  v("forward", s.forward), v("back", s.back), v("max_mib", s.max_mib);
}
template <class V>
void Describe(V& v, Is<StepPolicy::Fixed> auto& s) {
  v("layer", s.layer), v("kv_head", s.kv_head), v("estimator", s.estimator);
}
template <class V>
void Describe(V& v, Is<AttachSpec> auto& s) {
  v("model", s.model), v("tenant", s.tenant), v("prefix", s.prefix), v("n_tokens", s.n_tokens);
  v("policy", s.policy);
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
  v("parts", s.parts);
}
template <class V>
void Describe(V& v, Is<Ledger> auto& s) {
  v("steps", s.steps), v("anchor_tokens", s.anchor_tokens);
  v("retrieved_tokens", s.retrieved_tokens), v("summary_tokens", s.summary_tokens);
  v("charged_summary_tokens", s.charged_summary_tokens);
  v("logical_bytes", s.logical_bytes), v("physical_bytes", s.physical_bytes);
  v("summary_bytes", s.summary_bytes), v("feature_tokens", s.feature_tokens);
  v("feature_bytes", s.feature_bytes);
  v("ahead_bytes", s.ahead_bytes), v("ahead_used_bytes", s.ahead_used_bytes);
  v("keys_scanned", s.keys_scanned), v("scan_bytes", s.scan_bytes);
  v("selections", s.selections), v("retrievals", s.retrievals);
  v("rho_z_sum", s.rho_z_sum), v("rho_z_count", s.rho_z_count);
  v("select_ns", s.select_ns), v("read_ns", s.read_ns), v("compute_ns", s.compute_ns);
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
  v("settled", s.settled), v("pinned", s.pinned), v("expires_unix_ms", s.expires_unix_ms);
  v("quarantine", s.quarantine);
  v("ingest", s.ingest), v("ingest_error", s.ingest_error);
  v("encoding", s.encoding), v("encoding_error", s.encoding_error);
}
template <class V>
void Describe(V& v, Is<PrefixDetail> auto& s) {
  v("summary", s.summary), v("chain", s.chain), v("blobs", s.blobs), v("choices", s.choices);
  v("indexes", s.indexes);
}
template <class V>
void Describe(V& v, Is<HostTierTenant> auto& s) {
  v("tenant", s.tenant), v("bytes", s.bytes), v("memory_bytes", s.memory_bytes);
  v("share_bytes", s.share_bytes), v("pinned_bytes", s.pinned_bytes), v("hits", s.hits);
  v("misses", s.misses), v("evictions", s.evictions);
}
template <class V>
void Describe(V& v, Is<TenantStats> auto& s) {
  v("tenant", s.tenant), v("bytes", s.bytes), v("reserved_bytes", s.reserved_bytes);
  v("quota_bytes", s.quota_bytes), v("evictions", s.evictions);
  v("evicted_bytes", s.evicted_bytes);
}
template <class V>
void Describe(V& v, Is<RuntimeStats> auto& s) {
  v("version", s.version), v("compute", s.compute), v("io_backend", s.io_backend);
  v("uptime_ms", s.uptime_ms), v("models", s.models), v("prefixes", s.prefixes);
  v("sessions", s.sessions), v("sessions_total", s.sessions_total), v("steps", s.steps);
  v("steps_joined", s.steps_joined);
  v("bytes_on_disk", s.bytes_on_disk), v("bytes_free", s.bytes_free);
  v("bytes_written", s.bytes_written), v("bytes_read", s.bytes_read);
  v("host_tier_bytes", s.host_tier_bytes), v("host_tier_capacity", s.host_tier_capacity);
  v("host_hits", s.host_hits), v("host_misses", s.host_misses);
  v("checksum_failures", s.checksum_failures), v("puts", s.puts);
  v("puts_aborted", s.puts_aborted), v("ingest_queue", s.ingest_queue);
  v("bytes_rewritten", s.bytes_rewritten), v("settled", s.settled), v("merged", s.merged);
  v("rewrite_queue", s.rewrite_queue);
  v("load_queue", s.load_queue), v("ahead_queue", s.ahead_queue);
  v("ahead_bytes", s.ahead_bytes), v("ahead_used_bytes", s.ahead_used_bytes);
  v("ahead_vain_bytes", s.ahead_vain_bytes);
  v("selector_memory_bytes", s.selector_memory_bytes);
  v("selector_memory_capacity", s.selector_memory_capacity);
  v("shared_rows_bytes", s.shared_rows_bytes);
  v("shared_rows_capacity", s.shared_rows_capacity);
  v("host_tier_pinned", s.host_tier_pinned), v("host_evictions", s.host_evictions);
  v("host_tier_huge_pages", s.host_tier_huge_pages), v("host_tier_gpu", s.host_tier_gpu);
  v("host_tenants", s.host_tenants);
  v("quota_bytes", s.quota_bytes), v("evictions", s.evictions);
  v("evicted_bytes", s.evicted_bytes), v("expired", s.expired), v("tenants", s.tenants);
  v("scrub_bytes", s.scrub_bytes), v("scrub_damaged", s.scrub_damaged);
  v("verified_since_unix_ms", s.verified_since_unix_ms);
}
template <class V>
void Describe(V& v, Is<VerifySummary> auto& s) {
  v("segments", s.segments), v("pages", s.pages), v("blobs", s.blobs), v("bytes", s.bytes);
  v("damaged", s.damaged);
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
