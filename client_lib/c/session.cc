// Implements the C API's puts and sessions; steps of sessions: steps.cc.
#include <algorithm>
#include <utility>
#include <vector>

#include "client_lib/c/handles.h"
#include "protocol/json_text.h"

using namespace prefixd;        // NOLINT: the C API's functions stand in the global namespace
using namespace prefixd::capi;  // NOLINT

namespace {

Result<StepPolicy> Policy(const char* json) {
  if (json == nullptr) return StepPolicy{};
  return wire::FromText<StepPolicy>(json, "policy");
}

// Returns the stream of a put that has not been committed.
Result<PutStream*> Open(const pfx_put* put) {
  if (put == nullptr) return Null("put");
  if (!put->put) {
    return Error{Code::kFailedPrecondition, "this put was committed already; begin another"};
  }
  return put->put.get();
}

// result may be null.
Status WritePutResult(const PutResult& done, pfx_put_result* result) {
  if (result == nullptr) return {};
  pfx_put_result out{};
  CopyText(done.prefix, out.prefix);
  out.n_tokens = done.n_tokens;
  out.stored_tokens = done.stored_tokens;
  out.bytes = done.bytes;
  out.seconds = done.seconds;
  out.exact_tokens = done.exact_tokens;
  CopyText(done.lineage, out.lineage);
  return WriteResult(out, result, "result");
}

// Reads the name of an encoding into the spec of a put; null: the store's own.
template <typename Spec>
Result<Spec> WithEncoding(const char* encoding) {
  wire::Json named = wire::Json::object();
  if (encoding != nullptr) named["encoding"] = encoding;
  return wire::FromText<Spec>(named.dump(), "put");
}

}  // namespace

pfx_code pfx_begin_put(pfx_store* client, const pfx_put_options* options, pfx_put** put) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    if (put == nullptr) return Null("put");
    PREFIXD_ASSIGN(const auto o, ReadOptions(options, "options"));
    PREFIXD_TRY(CheckPointers({{o.tokens, o.n_tokens}}));
    PREFIXD_ASSIGN(auto spec, WithEncoding<PutSpec>(o.encoding));
    spec.model = Text(o.model);
    spec.tenant = Text(o.tenant);
    spec.tokens.assign(o.tokens, o.tokens + o.n_tokens);
    spec.label = Text(o.label);
    spec.pinned = o.pinned != 0;
    spec.ttl_seconds = o.ttl_seconds;
    spec.wait_ms = o.wait_ms;
    spec.alone = o.alone != 0;
    if (o.streams_prefill != 0) spec.prefill_from = o.prefill_from;
    spec.derived = o.derived != 0;
    spec.accept_approximate = o.accept_approximate != 0;
    spec.lineage = Text(o.lineage);
    spec.heads = {o.first_head, o.n_heads};
    PREFIXD_ASSIGN(auto stream, client->client->BeginPut(spec));
    *put = new pfx_put{client->client, std::move(stream)};
    return {};
  });
}

pfx_code pfx_put_missing(const pfx_put* put, uint32_t* begin, uint32_t* end) {
  return Guard([&]() -> Status {
    PREFIXD_ASSIGN(const PutStream* stream, Open(put));
    if (begin == nullptr || end == nullptr) return Null("begin or end");
    const TokenRange missing = stream->missing();
    *begin = missing.begin;
    *end = missing.end;
    return {};
  });
}

pfx_code pfx_put_write(pfx_put* put, uint32_t layer, uint32_t first, uint32_t n, const void* k,
                       size_t k_bytes, const void* v, size_t v_bytes) {
  return Guard([&]() -> Status {
    PREFIXD_ASSIGN(PutStream * stream, Open(put));
    PREFIXD_TRY(CheckPointers({{k, k_bytes}, {v, v_bytes}}));
    return stream->Write(layer, first, n, Bytes(k, k_bytes), Bytes(v, v_bytes));
  });
}

pfx_code pfx_put_write_queries(pfx_put* put, uint32_t layer, uint32_t first, uint32_t n,
                               const float* q, size_t q_count) {
  return Guard([&]() -> Status {
    PREFIXD_ASSIGN(PutStream * stream, Open(put));
    PREFIXD_TRY(CheckPointers({{q, q_count}}));
    return stream->WriteQueries(layer, first, n, {q, q_count});
  });
}

pfx_code pfx_put_commit(pfx_put* put, pfx_put_result* result) {
  return Guard([&]() -> Status {
    PREFIXD_TRY(Open(put));
    if (result != nullptr) {  // checked before anything is stored
      PREFIXD_TRY(ReadOptions(result, "result"));
    }
    const Result<PutResult> committed = put->put->Commit();
    if (!committed.ok() && committed.error().code == Code::kFailedPrecondition) {
      return committed.error();  // rows or other parts are missing: the put can go on
    }
    put->put.reset();
    if (!committed.ok()) return committed.error();
    return WritePutResult(*committed, result);
  });
}

void pfx_put_free(pfx_put* put) { End(put); }

pfx_code pfx_attach(pfx_store* client, const pfx_attach_options* options, pfx_session** session) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    if (session == nullptr) return Null("session");
    PREFIXD_ASSIGN(const auto o, ReadOptions(options, "options"));
    PREFIXD_TRY(CheckPointers({{o.tokens, o.n_tokens}}));
    AttachSpec spec;
    spec.model = Text(o.model);
    spec.tenant = Text(o.tenant);
    spec.tokens.assign(o.tokens, o.tokens + o.n_tokens);
    spec.prefix = Text(o.prefix);
    spec.n_tokens = o.cut;
    spec.accept_approximate = o.accept_approximate != 0;
    spec.lineage = Text(o.lineage);
    spec.call_timeout_ms = o.call_timeout_ms;
    spec.own_memory_tokens = o.own_memory_tokens;
    spec.accept_compressed = o.accept_compressed != 0;
    spec.engine = {o.prefill_tokens_per_second, o.cached_tokens, o.answer_tokens};
    PREFIXD_ASSIGN(spec.policy, Policy(o.policy_json));
    PREFIXD_ASSIGN(auto attached, client->client->Attach(spec));
    *session = new pfx_session{client->client, std::move(attached)};
    return {};
  });
}

pfx_code pfx_session_get_shape(const pfx_session* session, pfx_session_shape* shape) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    const SessionInfo& info = session->session->info();
    const KvGeometry& g = info.geometry;
    pfx_session_shape out{};
    out.n_tokens = info.n_tokens;
    out.n_layers = g.n_layers;
    out.n_q_heads = g.n_q_heads;
    out.n_kv_heads = g.n_kv_heads;
    out.key_dim = g.key_dim;
    out.value_dim = g.value_dim;
    out.row_bytes = static_cast<uint32_t>(RowShape{g.key_dim, g.value_dim, g.dtype}.bytes());
    CopyText(DTypeName(g.dtype), out.dtype);
    out.exact_tokens = info.exact_tokens;
    out.estimate = EstimateOf(info.estimate);
    return WriteResult(out, shape, "shape");
  });
}

pfx_code pfx_session_get_layer(const pfx_session* session, uint32_t layer, pfx_layer_shape* shape) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    const KvGeometry& g = session->session->info().geometry;
    if (layer >= g.n_layers) {
      return InvalidArgument("layer " + std::to_string(layer) + " is not one of the model's " +
                             std::to_string(g.n_layers));
    }
    const LayerShape own = g.layer(layer);
    pfx_layer_shape out{};
    out.n_q_heads = own.n_q_heads;
    out.n_kv_heads = own.n_kv_heads;
    out.key_dim = own.key_dim;
    out.value_dim = own.value_dim;
    out.row_bytes = static_cast<uint32_t>(own.row().bytes());
    return WriteResult(out, shape, "shape");
  });
}

pfx_code pfx_session_set_policy(pfx_session* session, const char* policy_json) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_ASSIGN(const StepPolicy policy, Policy(policy_json));
    return session->session->SetPolicy(policy);
  });
}

pfx_code pfx_session_append(pfx_session* session, uint32_t layer, uint32_t first_head,
                            uint32_t n_heads, uint32_t n, const void* k, size_t k_bytes,
                            const void* v, size_t v_bytes) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_TRY(CheckPointers({{k, k_bytes}, {v, v_bytes}}));
    return session->session->Append(layer, {first_head, n_heads}, n, Bytes(k, k_bytes),
                                    Bytes(v, v_bytes));
  });
}

pfx_code pfx_session_truncate(pfx_session* session, uint32_t n) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    return session->session->Truncate(n);
  });
}

pfx_code pfx_session_fork(pfx_session* session, pfx_session** fork) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    if (fork == nullptr) return Null("fork");
    PREFIXD_ASSIGN(auto forked, session->session->Fork());
    *fork = new pfx_session{session->client, std::move(forked)};
    return {};
  });
}

pfx_code pfx_session_persist(pfx_session* session, const pfx_persist_options* options,
                             pfx_put_result* result) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_ASSIGN(const auto o, ReadOptions(options, "options"));
    if (result != nullptr) {  // checked before anything is stored
      PREFIXD_TRY(ReadOptions(result, "result"));
    }
    PREFIXD_TRY(CheckPointers({{o.tokens, o.n_tokens}}));
    PREFIXD_ASSIGN(auto spec, WithEncoding<PersistSpec>(o.encoding));
    spec.label = Text(o.label);
    spec.pinned = o.pinned != 0;
    spec.ttl_seconds = o.ttl_seconds;
    spec.wait_ms = o.wait_ms;
    spec.alone = o.alone != 0;
    spec.derived = o.derived != 0;
    PREFIXD_ASSIGN(const PutResult done, session->session->Persist({o.tokens, o.n_tokens}, spec));
    return WritePutResult(done, result);
  });
}

pfx_code pfx_session_fork_persisted(pfx_session* session, uint32_t window, pfx_session** fork) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    if (fork == nullptr) return Null("fork");
    PREFIXD_ASSIGN(auto next, session->session->ForkPersisted(window));
    *fork = new pfx_session{session->client, std::move(next)};
    return {};
  });
}

pfx_code pfx_read_rows(pfx_session* session, uint32_t layer, uint32_t kv_head, const uint32_t* ids,
                       size_t n_ids, void* out, size_t out_bytes) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_TRY(CheckPointers({{ids, n_ids}, {out, out_bytes}}));
    return session->session->ReadRows(layer, kv_head, {ids, n_ids}, Bytes(out, out_bytes));
  });
}

pfx_code pfx_read_range(pfx_session* session, uint32_t layer, uint32_t kv_head, uint32_t begin,
                        uint32_t end, void* out, size_t out_bytes) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_TRY(CheckPointers({{out, out_bytes}}));
    return session->session->ReadRange(layer, kv_head, {begin, end}, Bytes(out, out_bytes));
  });
}

pfx_code pfx_select(pfx_session* session, uint32_t layer, uint32_t kv_head, const float* q,
                    size_t q_count, uint32_t k, uint32_t* ids, size_t* n_ids, pfx_cut* cuts,
                    size_t n_cuts) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    if (n_ids == nullptr) return Null("n_ids");
    PREFIXD_TRY(CheckPointers({{q, q_count}, {ids, k}, {cuts, n_cuts}}));
    PREFIXD_ASSIGN(const Selection selection,
                   session->session->Select(layer, kv_head, {q, q_count}, k));
    if (selection.ids.size() > k) {
      return Error{Code::kInternal, "the selector returned more ids than were asked for"};
    }
    if (n_cuts != 0 && n_cuts != selection.cuts.size()) {
      return InvalidArgument("cuts has room for " + std::to_string(n_cuts) + "; this group has " +
                             std::to_string(selection.cuts.size()) + " query heads");
    }
    std::copy(selection.ids.begin(), selection.ids.end(), ids);
    *n_ids = selection.ids.size();
    for (size_t i = 0; i < n_cuts; ++i) {
      cuts[i] = {selection.cuts[i].score, static_cast<pfx_cut_kind>(selection.cuts[i].kind)};
    }
    return {};
  });
}

pfx_code pfx_session_cancel(pfx_session* session) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    session->session->Cancel();
    return {};
  });
}

pfx_code pfx_session_report(pfx_session* session, char** json) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_ASSIGN(const SessionReport report, session->session->report());
    return ReturnText(wire::ToText(report), json);
  });
}

pfx_code pfx_session_detach(pfx_session* session, char** json) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_ASSIGN(const SessionReport report, session->session->Detach());
    return ReturnText(wire::ToText(report), json);
  });
}

void pfx_session_free(pfx_session* session) { End(session); }
