// Attaches a decoder to one stored prefix: it passes queries in and gets partial attention states.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "prefixd/estimator_variant.h"
#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/policy.h"
#include "prefixd/put.h"
#include "prefixd/result.h"
#include "prefixd/row_ref.h"
#include "prefixd/selection.h"
#include "prefixd/session_info.h"

namespace prefixd {

// The order of the rows of several tokens and KV heads: that of puts, or head by head.
enum class KvOrder : uint8_t {
  kTokenMajor = 0,  // [n][n_kv_heads][dim]
  kHeadMajor = 1,   // [n_kv_heads][n][dim]
};

// Rows of some KV heads of one layer.
struct LayerSlice {
  uint32_t layer = 0;
  TokenRange tokens;
  HeadRange heads;
  KvOrder order = KvOrder::kTokenMajor;
};

// A slice and where its rows go, as Session::ReadLayer has them.
struct LayerRead {
  LayerSlice slice;
  std::span<std::byte> k, v;
};

// Rows read in place: verified bytes that do not change until the last copy of this object is gone,
// also after Detach. Rows of a remote session keep this promise while its connection lives; after
// that they may change. Keep them for a step, not for a session: held rows cannot make room for
// others. Thread-safety: a plain value; destroying the last copy may send a message to the daemon.
struct RowsInPlace {
  // The mapped memory of all rows of a tenant.
  struct Region {
    uint64_t id = 0;
    std::span<const std::byte> bytes;
    int fd = -1;  // to pass on, read-only; -1: not possible. The region owns it.
  };
  std::vector<RowRef> rows;  // in the order of the ids; both pointers lie in the region
  Region region;
  std::shared_ptr<const void> hold;
};

// Where the rows of a slice lie in the host tier, and where its reader wants them: for who copies
// them himself, to a device for instance. The copies cover both arrays and do not overlap; `to` of
// a copy points into the reader's arrays and was not looked at. Otherwise as RowsInPlace.
struct LayerInPlace {
  std::vector<RowCopy> copies;
  RowsInPlace::Region region;
  std::shared_ptr<const void> hold;
};

// Attends over a stored prefix and, where the decoder appends them, over the session's *own
// tokens*: what was asked and generated behind the prefix. Each KV head of a layer takes own tokens
// in their order and counts its own: a call appends behind the last one of each head that it names.
// While the decoder computes a token the layers that it has passed have one more than the others.
//
// Own tokens lie in memory (kind own_tokens of the store's budget) until the session ends, unless
// own_memory_tokens bounds them (below), and belong to it alone: no other session sees them, and
// nothing is stored for others but what Persist stores. Over a connection they end with it: after
// that the session fails with kUnavailable, because it would answer without them, until
// Truncate(0).
//
// A session that was attached with own_memory_tokens keeps about so many of them in memory. Beyond
// that the oldest tokens that all heads have move to the store, many at once and in the background;
// from then on steps read them as they read the prefix: retrieved and estimated, as the policy
// says, where those in memory are read exactly. Nothing else changes for the engine, which goes on
// counting own tokens from the prefix's end. Nobody else sees what was moved; forks share it, and
// it goes with the last session that has it. Layers with a sliding window must be appended to, as
// nothing moves before all heads have it. Step, Select and SummaryBytes are refused
// (kFailedPrecondition) while it has own tokens, since they are of the prefix without them.
//
// Thread-safety: steps of one session may run concurrently (different layers or batches). Calls
// that append to one head, and Truncate beside any that appends, are made one after the other;
// kFailedPrecondition otherwise.
class Session {
 public:
  virtual ~Session() = default;
  virtual const SessionInfo& info() const = 0;
  virtual StepPolicy policy() const = 0;
  // kInfeasible when the budget cannot pay for anchors and estimator; the policy is then unchanged.
  virtual Status SetPolicy(const StepPolicy& policy) = 0;

  // Computes attention of one decode step over the stored prefix (docs/mathematics.md), for some KV
  // heads of a layer and the h = heads.n * group_size() query heads of their groups:
  //   q: [h][key_dim] float32, after RoPE -> y: [h][value_dim], lse: [h] (natural log).
  // The decoder merges (y, lse) with the state of its own tokens: MergeStates; those that the
  // session has are not attended to. A head's answer, and what it is charged, do not depend on
  // which other heads step with it.
  virtual Status Step(uint32_t layer, HeadRange heads, std::span<const float> q, std::span<float> y,
                      std::span<float> lse, StepInfo* info) = 0;
  // Does the same for all heads.
  Status Step(uint32_t layer, std::span<const float> q, std::span<float> y, std::span<float> lse,
              StepInfo* info) {
    return Step(layer, HeadRange{}, q, y, lse, info);
  }
  // Computes exact attention of a block of queries (the new question) in one pass over the prefix:
  //   q: [n][h][key_dim] -> y: [n][h][value_dim], lse: [n][h], with h query heads as in Step.
  // Where these heads have own tokens, the queries are those of own tokens behind which `own_after`
  // others follow (0: of the last n), and each attends to the own tokens up to its own as well:
  // Append the block's rows first. kInvalidArgument when a head has fewer own tokens than n +
  // own_after.
  virtual Status AttendExact(uint32_t layer, HeadRange heads, uint32_t n, uint32_t own_after,
                             std::span<const float> q, std::span<float> y,
                             std::span<float> lse) = 0;
  Status AttendExact(uint32_t layer, HeadRange heads, uint32_t n, std::span<const float> q,
                     std::span<float> y, std::span<float> lse) {
    return AttendExact(layer, heads, n, 0, q, y, lse);
  }
  Status AttendExact(uint32_t layer, uint32_t n, std::span<const float> q, std::span<float> y,
                     std::span<float> lse) {
    return AttendExact(layer, HeadRange{}, n, 0, q, y, lse);
  }

  // Appends n own tokens to some KV heads of a layer, in order:
  //   k: [n][heads.n][key_dim], v: [n][heads.n][value_dim], in the geometry's dtype, keys after
  //   RoPE.
  // A layer with a sliding window needs them for Persist alone: the engine attends over it itself.
  // Borrowed for the call. kInvalidArgument: sizes, NaN or Inf; kResourceExhausted: no memory. A
  // refused call has changed nothing; a remote one that takes several messages may have appended
  // the tokens before the refused message. The same call may be repeated, and goes on; Truncate
  // goes back.
  virtual Status Append(uint32_t layer, HeadRange heads, uint32_t n, std::span<const std::byte> k,
                        std::span<const std::byte> v) = 0;
  Status Append(uint32_t layer, uint32_t n, std::span<const std::byte> k,
                std::span<const std::byte> v) {
    return Append(layer, HeadRange{}, n, k, v);
  }
  // Decodes one token of a layer: appends its row, as Append does, and attends with its queries
  // over the prefix, as Step does, and exactly over all own tokens, the appended one included; q, y
  // and lse as in Step. A call that fails has appended nothing and may be repeated.
  virtual Status StepAppend(uint32_t layer, HeadRange heads, std::span<const float> q,
                            std::span<const std::byte> k, std::span<const std::byte> v,
                            std::span<float> y, std::span<float> lse, StepInfo* info) = 0;
  Status StepAppend(uint32_t layer, std::span<const float> q, std::span<const std::byte> k,
                    std::span<const std::byte> v, std::span<float> y, std::span<float> lse,
                    StepInfo* info) {
    return StepAppend(layer, HeadRange{}, q, k, v, y, lse, info);
  }
  // Keeps the first n own tokens of every head; a head with no more keeps all of its. Costs the
  // same whatever n, unless some that go were moved: then the session attaches to what is left of
  // those, as Attach would (kInfeasible, too). kInvalidArgument when no head has as many as n.
  virtual Status Truncate(uint32_t n) = 0;
  // Attaches another session to the same prefix with this one's policy, limits and own tokens as
  // they are now. The two share their memory and go on apart. Its ledger begins at 0.
  virtual Result<std::shared_ptr<Session>> Fork() = 0;

  // Stores the first tokens.size() own tokens, whose ids these are, as a prefix that continues this
  // session's: the put of all ids up to there, durable and visible when it returns. Rows that are
  // stored already are not stored again, so that each call stores what is new. The session goes on
  // as before, with its own tokens as they are; ForkPersisted leaves them behind.
  //
  // Rows are derived (PutSpec::derived) from the first token on that was not whole yet when a step
  // below mode full began, and where the prefix has derived tokens; PutResult::lineage then names
  // them. Own tokens of which only the last are derived take two puts, the exact ones first.
  //
  // kInvalidArgument: no ids, or more than there are own tokens. kFailedPrecondition: some heads
  // lack rows of these tokens; the first is named (heads of a tensor-parallel rank are stored by
  // PutSpec::heads instead). Otherwise it is refused as Store::BeginPut and PutStream::Commit are.
  // A refused call has changed nothing of the session; of two puts the first may be stored.
  virtual Result<PutResult> Persist(std::span<const uint32_t> tokens, const PersistSpec& spec) = 0;
  Result<PutResult> Persist(std::span<const uint32_t> tokens) { return Persist(tokens, {}); }
  // Goes on over what the last Persist stored: as Fork, but attached to the stored own tokens, all
  // but the last `window` of them, with the others as its own tokens. This session may then be
  // detached, which frees their memory. Own tokens are counted anew: the first is the one behind
  // info().n_tokens. Summaries and indexes of what was stored are ready after
  // Store::WaitReady(PutResult::prefix); before that it attaches as Store::Attach does.
  // kFailedPrecondition: no own tokens are stored, or they were truncated since. kNotFound: they
  // were evicted or removed; Persist stores them again.
  virtual Result<std::shared_ptr<Session>> ForkPersisted(uint32_t window) = 0;

  // Reads rows for engines that compute themselves. ids ascending; out: [ids.size()][row bytes].
  virtual Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                          std::span<std::byte> out) = 0;
  // Returns the same rows in place in the host tier, without a copy; all of them or an error.
  // kFailedPrecondition: rows larger than a page, no host tier, or a client over TCP; use ReadRows.
  // kResourceExhausted: the tenant reads as much in place as it may (half its share of the tier).
  virtual Result<RowsInPlace> ReadInPlace(uint32_t layer, uint32_t kv_head,
                                          std::span<const uint32_t> ids) = 0;
  // Reads a run of rows of one head: out [range.size()][row bytes].
  virtual Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range,
                           std::span<std::byte> out) = 0;
  // Reads keys and values apart, in the geometry's dtype: k [n][heads.n][key_dim] and v
  // [n][heads.n][value_dim], or head-major. Runs that end at chunk ends of info().parts (RunEnd)
  // cost the least.
  Status ReadLayer(const LayerSlice& slice, std::span<std::byte> k, std::span<std::byte> v) {
    const LayerRead read{slice, k, v};
    return ReadLayers({&read, 1}, nullptr);
  }
  // Reads several slices without a pause between them; prefixd/restore.h reads a whole prefix with
  // it. Unless null, done(i) is called once `reads[i]` has its rows: in their order, one call at a
  // time, from any thread; false ends the call with kCancelled. After an error some of the other
  // rows may have been written. The time of a call (AttachSpec::call_timeout_ms) is that of each 32
  // MiB.
  virtual Status ReadLayers(std::span<const LayerRead> reads,
                            const std::function<bool(size_t)>& done) = 0;
  // Returns where the rows of a slice lie that is in the host tier as a whole, and reads nothing:
  // kNotFound where some of it is not, otherwise errors as of ReadInPlace; ReadLayer then. A client
  // of a daemon has no need of it (kFailedPrecondition): its ReadLayers copies from there itself.
  virtual Result<LayerInPlace> FindLayerInPlace(const LayerRead& /*read*/) {
    return Error{Code::kFailedPrecondition,
                 "only a store in the process itself says where layers lie; use ReadLayer"};
  }
  // Reads the token ids of a run of the prefix, as they were put: out [range.size()].
  virtual Status ReadTokens(TokenRange range, std::span<uint32_t> out) = 0;
  // Selects alone: ids and cuts of one KV head for its group's queries q [G][key_dim].
  virtual Result<Selection> Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                                   uint32_t k) = 0;
  // Returns the serialised summary of one head's mid region that the estimator reads
  // (attention/estimators/moments.h, phi_cache.h, clusters.h). kNotFound for phi when the model has
  // no feature maps; kInvalidArgument for none and auto, which have no summary.
  virtual Result<std::vector<std::byte>> SummaryBytes(uint32_t layer, uint32_t kv_head,
                                                      const EstimatorVariant& variant) = 0;
  Result<std::vector<std::byte>> PhiCacheBytes(uint32_t layer, uint32_t kv_head) {
    return SummaryBytes(layer, kv_head, EstimatorKind::kPhi);
  }
  Result<std::vector<std::byte>> MomentBytes(uint32_t layer, uint32_t kv_head) {
    return SummaryBytes(layer, kv_head, EstimatorKind::kMoment);
  }

  // Ends the calls of this session that run now, on any thread, with kCancelled: soon, not at once,
  // and a call that is about to end may still succeed. Later calls are not concerned, and a call
  // that was ended may be repeated. Any thread may call it; it does not wait.
  virtual void Cancel() = 0;

  // What was read so far; after Detach what that returned. Over a connection it is asked for each
  // time, and fails as any other call does: it never answers with an old report.
  virtual Result<SessionReport> report() const = 0;
  // Ends the session and returns its ledger; later calls fail with kFailedPrecondition. Where the
  // daemon went away, the session has ended with it, and the ledger is the last one that `report`
  // returned (empty where it was never asked).
  virtual Result<SessionReport> Detach() = 0;
};

}  // namespace prefixd
