// Stores own tokens of a session as a prefix, and lets a session go on over it.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/capture_errors.h"
#include "base/session_arguments.h"
#include "prefixd/store.h"
#include "runtime/session/session_impl.h"

namespace prefixd {
namespace {

// Rows are handed to the put in batches of this size.
constexpr size_t kBatchBytes = 4u << 20;

Status CheckPersisted(const OwnTokens::Snapshot& own, const HeadIndex& index, size_t n) {
  if (n == 0) return InvalidArgument("there is nothing to persist: pass the ids of own tokens");
  uint32_t most = 0;
  for (const OwnRows& rows : own.heads) most = std::max(most, rows.size());
  if (n > most) {
    return InvalidArgument("the session has " + std::to_string(most) +
                           " own tokens, and the ids are of " + std::to_string(n));
  }
  const size_t head = own.shortest();
  if (n <= own.heads[head].size()) return {};
  return Error{Code::kFailedPrecondition,
               "KV head " + std::to_string(index.head_of(head)) + " of layer " +
                   std::to_string(index.layer_of(head)) + " has " +
                   std::to_string(own.heads[head].size()) + " of these " + std::to_string(n) +
                   " own tokens: persist those that all layers and heads have, or put the rows of "
                   "some heads as a part (PutSpec::heads)"};
}

}  // namespace

// Of one layer, token-major as puts take them. A run lies in the plan's prefix, or behind it.
Status SessionImpl::ReadAnywhere(const State& state, uint32_t layer, TokenRange at,
                                 std::span<std::byte> k, std::span<std::byte> v,
                                 WorkPriority priority) {
  if (at.begin < info_.n_tokens + state.plan->moved) {
    const LayerRead read{{.layer = layer, .tokens = at, .heads = {}}, k, v};
    return ReadStored(*state.plan, {&read, 1}, nullptr, priority);
  }
  const RowShape row = info_.geometry.row(layer);
  const uint32_t heads = info_.geometry.layer(layer).n_kv_heads;
  const uint32_t begin = at.begin - info_.n_tokens, end = at.end - info_.n_tokens;
  for (uint32_t h = 0; h < heads; ++h) {
    uint32_t behind = end;
    state.own.heads[HeadOf(layer, h)].Visit(begin, end, row, [&](const RowsView& rows) {
      behind -= static_cast<uint32_t>(rows.count);
      for (size_t i = 0; i < rows.count; ++i) {
        const size_t to = (behind - begin + i) * heads + h;
        std::memcpy(&k[to * row.key_bytes()], rows.key(i), row.key_bytes());
        std::memcpy(&v[to * row.value_bytes()], rows.value(i), row.value_bytes());
      }
      return true;
    });
  }
  return {};
}

Status SessionImpl::WriteMissing(PutStream& put, const State& state, WorkPriority priority) {
  const TokenRange missing = put.missing();
  const uint32_t in_memory = info_.n_tokens + state.plan->moved;  // from here on
  size_t largest = 0;                                             // of one token
  for (uint32_t l = 0; l < info_.geometry.n_layers; ++l) {
    const LayerShape shape = info_.geometry.layer(l);
    largest = std::max(largest, shape.n_kv_heads * shape.row().bytes());
  }
  if (largest == 0 || missing.size() == 0) return {};
  const auto batch = static_cast<uint32_t>(
      std::min<size_t>(std::max<size_t>(kBatchBytes / largest, 1), missing.size()));
  PREFIXD_ASSIGN(const MemoryCharge memory,
                 state.plan->prefix->account().Take(MemoryKind::kPuts, batch * largest));
  std::vector<std::byte> rows(batch * largest);
  for (uint32_t l = 0; l < info_.geometry.n_layers; ++l) {
    const LayerShape shape = info_.geometry.layer(l);
    if (shape.n_kv_heads == 0) continue;
    for (uint32_t at = missing.begin; at < missing.end;) {
      PREFIXD_TRY(CheckCall());
      uint32_t end = std::min(at + batch, missing.end);
      if (at < in_memory) end = std::min(end, in_memory);
      const size_t n = size_t{end - at} * shape.n_kv_heads;
      const auto k = std::span(rows).first(n * shape.row().key_bytes());
      const auto v = std::span(rows).subspan(k.size(), n * shape.row().value_bytes());
      PREFIXD_TRY(ReadAnywhere(state, l, {at, end}, k, v, priority));
      PREFIXD_TRY(put.Write(l, at, end - at, k, v));
      at = end;
    }
  }
  return {};
}

Result<PutResult> SessionImpl::Persist(std::span<const uint32_t> tokens, const PersistSpec& spec) {
  const CallScope scope(Limits());
  Result<PutResult> result = PutResult();
  const Status done = CaptureErrors([&]() -> Status {
    PREFIXD_ASSIGN(result, Store(tokens, spec));
    return {};
  });
  if (!done.ok()) return done.error();
  return result;
}

Result<PutResult> SessionImpl::Store(std::span<const uint32_t> tokens, const PersistSpec& spec) {
  PREFIXD_ASSIGN(const State state, TakeState());
  const Plan& plan = state.plan;
  const OwnTokens::Snapshot& own = state.own;
  PREFIXD_TRY(CheckPersisted(own, heads_, tokens.size()));
  const auto n = static_cast<uint32_t>(tokens.size());
  const storage::StoredPrefix& prefix = plan->prefix->stored();
  if (prefix.compressed()) return storage::Compressed(prefix.info().id);
  const MemoryAccount& account = plan->prefix->account();
  const bool behind_derived = info_.exact_tokens < info_.n_tokens;
  // The own tokens before the first derived one.
  uint32_t exact = spec.derived || behind_derived ? 0 : std::min(own.derived_from, n);

  PREFIXD_ASSIGN(const MemoryCharge ids,
                 account.Take(MemoryKind::kPuts, (size_t{info_.n_tokens} + n) * sizeof(uint32_t)));
  PutSpec put;
  put.model = info_.model;
  put.tenant = info_.tenant;
  put.label = spec.label;
  put.pinned = spec.pinned;
  put.ttl_seconds = spec.ttl_seconds;
  put.encoding = spec.encoding;
  put.wait_ms = spec.wait_ms;
  put.alone = spec.alone;
  put.tokens.reserve(size_t{info_.n_tokens} + n);
  const auto ids_of = prefix.tokens().first(info_.n_tokens);
  put.tokens.assign(ids_of.begin(), ids_of.end());
  PutResult all;
  const auto store = [&](uint32_t end, bool derived) -> Status {
    put.tokens.insert(put.tokens.end(), tokens.begin() + (put.tokens.size() - info_.n_tokens),
                      tokens.begin() + end);
    put.derived = derived;
    if (behind_derived) {
      put.lineage = storage::LineageName(prefix.info().lineage);
    } else if (derived) {
      put.lineage = own.stored.lineage;
    }
    PREFIXD_ASSIGN(const auto stream, services_->store.begin_put(put));
    PREFIXD_TRY(WriteMissing(*stream, state, WorkPriority::kStep));
    PREFIXD_ASSIGN(PutResult result, stream->Commit());
    result.stored_tokens += all.stored_tokens;
    result.bytes += all.bytes;
    result.seconds += all.seconds;
    all = std::move(result);
    return {};
  };
  // Again where an earlier Persist stored them: they may have been removed or evicted since.
  if (exact > 0 && exact < n) PREFIXD_TRY(store(exact, false));
  PREFIXD_TRY(store(n, exact < n));
  own_.NoteStored(own, {all.prefix, n, all.lineage});
  return all;
}

Result<std::shared_ptr<Session>> SessionImpl::ForkPersisted(uint32_t window) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const State state, TakeState());
  const OwnTokens::Snapshot& own = state.own;
  if (own.stored.tokens == 0) {
    return Error{Code::kFailedPrecondition,
                 "none of the session's own tokens are stored; Persist them first"};
  }
  const uint32_t left = own.stored.tokens - std::min(window, own.stored.tokens);
  AttachSpec spec;
  spec.model = info_.model;
  spec.tenant = info_.tenant;
  spec.prefix = own.stored.prefix;
  spec.n_tokens = info_.n_tokens + left;
  spec.policy = state.plan->policy;
  spec.accept_approximate = true;  // the session's own
  spec.call_timeout_ms = call_timeout_ms_;
  spec.own_memory_tokens = own_memory_tokens_;
  PREFIXD_ASSIGN(auto next, services_->store.attach(spec));
  auto& other = static_cast<SessionImpl&>(*next);
  PREFIXD_TRY(other.own_.CopyFrom(own, left, MovedReader(*state.plan)));
  other.NoteGrown(0);
  return next;
}

}  // namespace prefixd
