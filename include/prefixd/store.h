// Stores prefixes: one interface over an embedded store and a running daemon's, which behave alike
// (prefixd/client.h opens either).
//
// Thread-safety: a Store and its Sessions may be used by any number of threads; one PutStream is
// used by one thread at a time. Sessions and PutStreams keep what they need of their Store alive.
// Over a connection calls are answered in turn.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "prefixd/attach.h"
#include "prefixd/compress.h"
#include "prefixd/explain.h"
#include "prefixd/kv_shape.h"
#include "prefixd/lifetime.h"
#include "prefixd/lists.h"
#include "prefixd/match.h"
#include "prefixd/model.h"
#include "prefixd/partition.h"
#include "prefixd/prefix_summary.h"
#include "prefixd/progress.h"
#include "prefixd/put.h"
#include "prefixd/result.h"
#include "prefixd/rewrite.h"
#include "prefixd/runtime_stats.h"
#include "prefixd/session.h"
#include "prefixd/session_info.h"
#include "prefixd/snapshot.h"
#include "prefixd/verify.h"

namespace prefixd {

// Runs one put: rows stream in layer by layer (or in any order), so that the put overlaps with the
// prefill. Destruction without Commit aborts: nothing becomes visible, nothing leaks.
//
// Several puts, of any processes, may be the parts of one, each with the rows of its KV heads
// (PutSpec::heads), as the ranks of an engine have them. The prefix becomes visible when the last
// part commits. When a part ends without that, the others fail with kUnavailable.
class PutStream {
 public:
  virtual ~PutStream() = default;
  // Tokens that are not stored yet: only these need rows; others are ignored.
  virtual TokenRange missing() const = 0;
  // k: [n][n_kv_heads][key_dim], v: [n][n_kv_heads][value_dim], in the geometry's dtype, for tokens
  // [first, first + n) of `layer`; a part passes its own heads alone, here and below. Borrowed for
  // the call. Tokens outside missing() are skipped. kInvalidArgument: sizes, NaN or Inf (named by
  // layer and token), tokens written before. No part of a refused run is written; a remote run that
  // takes several messages may have been written up to the refused one, which progress() shows. The
  // put can go on, or be aborted.
  virtual Status Write(uint32_t layer, uint32_t first, uint32_t n, std::span<const std::byte> k,
                       std::span<const std::byte> v) = 0;
  // Returns how much of missing() this part has written. Commit requires all of it.
  virtual PutProgress progress() const = 0;
  // Optional: passes the prefill's own queries q [n][n_q_heads][key_dim] float32, for tokens
  // [first, first + n). A reservoir of them is kept to choose estimators per head.
  virtual Status WriteQueries(uint32_t layer, uint32_t first, uint32_t n,
                              std::span<const float> q) = 0;
  // Makes the put durable and visible before it returns. Summaries and indexes follow in the
  // background (Store::WaitReady). kFailedPrecondition: rows are missing (the first is named), and
  // the put can go on; any other failure ends it. A commit of tokens that another put committed
  // meanwhile stores nothing: PutResult::stored_tokens is 0.
  // A part waits until all parts have committed, up to PutSpec::wait_ms; all get one result. When
  // the time is over the heads that lack are named (kFailedPrecondition), and it may commit again.
  virtual Result<PutResult> Commit() = 0;
  // Drops what was written. Any thread's later calls fail with kFailedPrecondition.
  virtual void Abort() = 0;
};

// One layer step of one session; a batch may mix prefixes and models.
struct StepRequest {
  Session* session = nullptr;
  uint32_t layer = 0;
  std::span<const float> q;  // of the query heads of `heads`, as in Session::Step
  std::span<float> y;
  std::span<float> lse;
  StepInfo* info = nullptr;  // optional
  Status status;             // out: this request's own status
  HeadRange heads = {};
  // With `append` the step is a StepAppend: the token's own k and v of `heads`, as there.
  bool append = false;
  std::span<const std::byte> k = {}, v = {};
};

// Longer deadlines of MatchAsync count as this.
inline constexpr std::chrono::milliseconds kMaxMatchDeadline{24 * 3600'000};

// A match that Store::MatchAsync began. Any thread may use it; it may outlive its Store. Destroying
// it gives the match up.
class PendingMatch {
 public:
  virtual ~PendingMatch() = default;
  // Whether Get returns at once: the answer is there, or the deadline has passed.
  virtual bool ready() const = 0;
  // Waits for the answer, up to the deadline, and then fails with kDeadlineExceeded. A later call
  // returns the answer if it has come meanwhile.
  virtual Result<PrefixMatch> Get() = 0;
};

class Store {
 public:
  virtual ~Store() = default;

  // Idempotent for an equal spec; new feature maps replace the old ones (phi caches are rebuilt).
  // Beyond RuntimeOptions::max_models the least recently used model that nothing is stored for
  // makes room; kResourceExhausted when there is none.
  virtual Status RegisterModel(const ModelSpec& spec) = 0;
  virtual Result<ModelSpec> Model(std::string_view name) = 0;  // kNotFound
  // Models are common to all tenants: ListSpec::tenant has no meaning here.
  virtual Result<ModelPage> ListModels(const ListSpec& spec) = 0;
  // kFailedPrecondition names how many segments of the model are stored. Over a connection it is
  // for the daemon's own user and for admins.
  virtual Status RemoveModel(std::string_view name) = 0;

  // kNotFound: no such model. kResourceExhausted: no room for these rows beside what must stay, or
  // too many puts are open. Destroying the stream before its commit aborts the put.
  virtual Result<std::unique_ptr<PutStream>> BeginPut(const PutSpec& spec) = 0;
  // Returns the longest stored prefix of the spec's tokens; an empty match is no error. It ends
  // before the first derived token that the spec does not take.
  virtual Result<PrefixMatch> Match(const MatchSpec& spec) = 0;
  // Does the same for callers that must not wait, such as schedulers: returns at once, however slow
  // the disk or the daemon. `spec` is copied. `deadline` counts from now. A match that missed it
  // goes on, so that the next match of these tokens finds open what this one has read.
  // kResourceExhausted when too many matches wait. Over a connection matches use others of their
  // own: they neither delay other calls nor wait for them.
  virtual Result<std::unique_ptr<PendingMatch>> MatchAsync(const MatchSpec& spec,
                                                           std::chrono::milliseconds deadline) = 0;
  // Says why a match of these tokens finds as many as it does, and no more. It looks at what the
  // tenant has stored, and had, and at nothing of any other; what went long ago is forgotten.
  virtual Result<Explanation> Explain(const ExplainSpec& spec) = 0;
  // Waits until the prefix's summaries, indexes and choices are ready; fails with the reason
  // otherwise.
  virtual Status WaitReady(std::string_view prefix, const ProgressFn& progress) = 0;

  // kNotFound when no stored prefix matches; kFailedPrecondition when the named prefix has derived
  // tokens that the spec does not take.
  virtual Result<std::shared_ptr<Session>> Attach(const AttachSpec& spec) = 0;
  // Runs layer steps of several sessions of this store together: selection, reads and attention of
  // every (session, KV head) are spread over the compute threads, and sessions on one prefix are
  // searched in one pass; each gets the result of a step alone. Over a connection one message
  // carries them all. Every request gets its own status; a request for another store's session
  // fails.
  virtual void StepBatch(std::span<StepRequest> requests) = 0;

  // kInvalidArgument when `after` is no page's `next`.
  virtual Result<PrefixPage> ListPrefixes(const ListSpec& spec) = 0;
  // kNotFound when there is none, or it is another tenant's.
  virtual Result<PrefixDetail> Prefix(std::string_view prefix) = 0;
  // Returns whose the prefix is (kNotFound: nobody's). A store of this process reads nothing that
  // the prefix consists of, so that the time does not tell whether there is one.
  virtual Result<std::string> TenantOf(std::string_view prefix) {
    auto detail = Prefix(prefix);
    if (!detail.ok()) return detail.error();
    return std::move(detail->summary.tenant);
  }
  // Removes the name; tokens that other prefixes continue stay with those. kNotFound, or
  // kFailedPrecondition while a session has it open.
  virtual Status Remove(std::string_view prefix) = 0;
  // Durable when it returns. kNotFound when the prefix was removed or has expired.
  virtual Status SetLifetime(std::string_view prefix, const Lifetime& lifetime) = 0;
  // Rewrites what a prefix needs now, whatever the options say about doing so in the background.
  // Sessions go on, and answers stay the same. What cannot be rewritten now stays, and the result
  // says why.
  virtual Result<RewriteResult> Rewrite(std::string_view prefix, RewriteKind kind,
                                        const ProgressFn& progress) = 0;
  // Compresses the segment in which the prefix ends, for good, once what that does to attention
  // over the prefix is measured (compress.h). kFailedPrecondition while others need its rows
  // (prefixes that continue it or end in it), while it is open or its summaries are not ready, and
  // where the policy needs queries and the put kept none. Reading, restoring, continuing and exact
  // attention of a compressed prefix are refused.
  virtual Result<CompressReport> Compress(std::string_view prefix, const CompressSpec& spec,
                                          const ProgressFn& progress) = 0;
  // Keeps all that is committed now as it is, for a copy of it. Over a connection only the daemon's
  // own user may do it, over its Unix socket. kFailedPrecondition while there is another one.
  virtual Result<std::unique_ptr<Snapshot>> TakeSnapshot() = 0;
  // Reads and checks every segment that the prefix needs ("": the whole store, over a connection
  // all of the tenant's), each once; progress counts all of them. A segment that is removed
  // meanwhile is no error.
  virtual Result<VerifySummary> Verify(std::string_view prefix, const ProgressFn& progress) = 0;
  // Does the same for all segments of one tenant.
  virtual Result<VerifySummary> VerifyTenant(std::string_view tenant,
                                             const ProgressFn& progress) = 0;
  // What the store holds, has done and takes of memory since it was opened.
  virtual Result<RuntimeStats> Stats() = 0;
};

}  // namespace prefixd
