#include "runtime/ingest/joint_put.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/call_scope.h"
#include "base/capture_errors.h"
#include "base/session_arguments.h"
#include "runtime/derived/blob_names.h"
#include "storage/io/errors.h"

namespace prefixd {
namespace {

using Clock = std::chrono::steady_clock;

// When a client that waits for other parts may ask again.
constexpr uint32_t kAskAgainMs = 5;

std::string Named(HeadRange heads) {
  return "KV heads " + std::to_string(heads.first) + ".." +
         std::to_string(uint64_t{heads.first} + heads.n);
}

bool Overlap(HeadRange a, HeadRange b) {
  return a.first < b.first + b.n && b.first < a.first + a.n;
}

bool SamePrompt(const PutSpec& a, const PutSpec& b) {
  return a.model == b.model && a.tenant == b.tenant && a.tokens == b.tokens;
}

// Parts decide together what is stored; how long each waits is its own matter.
Status CheckAlike(const PutSpec& a, const PutSpec& b) {
  const char* differs = a.label != b.label                             ? "label"
                        : a.pinned != b.pinned                         ? "pinned"
                        : a.ttl_seconds != b.ttl_seconds               ? "ttl_seconds"
                        : a.encoding != b.encoding                     ? "encoding"
                        : a.derived != b.derived                       ? "derived"
                        : a.accept_approximate != b.accept_approximate ? "accept_approximate"
                        : a.lineage != b.lineage                       ? "lineage"
                                                                       : nullptr;
  if (differs == nullptr) return {};
  return InvalidArgument(std::string("the parts of a put are equal but for their heads; ") +
                         differs + " is not that of the parts under way");
}

}  // namespace

// ---- JointPut -----------------------------------------------------------------------------------

Status JointPut::Enter(HeadRange heads) {
  std::lock_guard lock(mutex_);
  const auto taken =
      std::ranges::find_if(parts_, [&](const Part& part) { return Overlap(part.heads, heads); });
  if (taken != parts_.end()) {
    return Error{Code::kUnavailable, Named(heads) + " of this prompt overlap " +
                                         Named(taken->heads) +
                                         ", which another part is putting; wait for it (wait_ms) "
                                         "or try again"};
  }
  if (state_ != State::kOpen) return Error{Code::kUnavailable, "this put is ending; try again"};
  parts_.push_back({heads, false, {}});
  return {};
}

Status JointPut::CheckOpen() {
  std::lock_guard lock(mutex_);
  if (state_ == State::kOpen) return {};
  return broken_ ? *broken_ : PutEnded();
}

Status JointPut::CheckRun(HeadRange heads, uint32_t layer, uint32_t first, uint32_t n) {
  PREFIXD_ASSIGN(const CallLock writing, CallLock::Take(writing_));
  PREFIXD_TRY(CheckOpen());
  return writer_->CheckRun(layer, heads, first, n);
}

Status JointPut::WriteRows(HeadRange heads, uint32_t layer, uint32_t first, uint32_t n,
                           std::span<const std::byte> rows) {
  PREFIXD_ASSIGN(const CallLock writing, CallLock::Take(writing_));
  PREFIXD_TRY(CheckOpen());
  PREFIXD_TRY(writer_->AwaitRoom(n));
  return writer_->WriteRows(layer, heads, first, n, rows);
}

HeadRange JointPut::Uncommitted() const {
  std::vector<bool> committed(target_.geometry.n_kv_heads);
  for (const Part& part : parts_) {
    if (part.committed) std::fill_n(committed.begin() + part.heads.first, part.heads.n, true);
  }
  const auto first = std::ranges::find(committed, false);
  const auto end = std::find(first, committed.end(), true);
  return {static_cast<uint32_t>(first - committed.begin()), static_cast<uint32_t>(end - first)};
}

Result<PutResult> JointPut::Commit(HeadRange heads, QuerySamples samples,
                                   std::chrono::milliseconds wait) {
  const auto until = Clock::now() + wait;
  bool last = false;
  std::vector<QuerySamples> of_heads;
  {
    PREFIXD_ASSIGN(const CallLock writing, CallLock::Take(writing_));
    {
      std::lock_guard lock(mutex_);
      if (state_ == State::kOpen) {
        PREFIXD_TRY(writer_->CheckComplete(heads));
        Part& part = *std::ranges::find(parts_, heads, &Part::heads);
        part.samples = std::move(samples);
        part.committed = true;
        // Where nothing is new there are no other parts.
        last = missing_.size() == 0 || Uncommitted().n == 0;
        if (last) {
          of_heads = TakeSamples();
          state_ = State::kEnding;
        }
      }
    }
    if (last) {
      std::optional<Result<PutResult>> result;
      const CarriedScope to_the_end(nullptr);  // once begun, nothing ends it early
      const Status done = CaptureErrors([&]() -> Status {
        result = Finish(std::move(of_heads));
        return {};
      });
      End(done.ok() ? *std::move(result) : Result<PutResult>(done.error()));
    }
  }
  if (last && registry_) registry_->Ended(*this);
  std::unique_lock lock(mutex_);
  for (auto now = Clock::now(); state_ == State::kOpen && now < until; now = Clock::now()) {
    PREFIXD_TRY(CheckCall());
    changed_.wait_until(lock, std::min(until, now + kCallSlice));
  }
  PREFIXD_TRY(AwaitInCall(changed_, lock, [&] { return state_ != State::kEnding; }));
  if (state_ == State::kEnded) return *result_;
  return Error{Code::kFailedPrecondition,
               Named(Uncommitted()) +
                   " of this put are not committed yet; commit again to wait for their parts "
                   "(wait_ms), or abort",
               kAskAgainMs};
}

std::vector<QuerySamples> JointPut::TakeSamples() {
  parts_.sort([](const Part& a, const Part& b) { return a.heads.first < b.heads.first; });
  std::vector<QuerySamples> samples;
  samples.reserve(parts_.size());
  for (Part& part : parts_) samples.push_back(std::move(part.samples));
  return samples;
}

// Makes the segment visible and keeps the samples of all its heads.
Result<PutResult> JointPut::Finish(std::vector<QuerySamples> of_heads) {
  PREFIXD_ASSIGN(const storage::SegmentId id, writer_->Commit());
  storage::PrefixStore& storage = *target_.storage;
  PutResult result;
  result.prefix = id.ToString();
  result.n_tokens = target_.prompt_tokens;
  result.stored_tokens = writer_->range().size();  // none, if another put came first
  result.seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
  const auto stored = storage.GetPrefix(id);
  if (stored.ok()) {
    result.encoding = stored->encoding;
    result.encoding_error = stored->encoding_error;
    result.exact_tokens = std::min(stored->exact_tokens, target_.prompt_tokens);
    const bool derived = result.exact_tokens < target_.prompt_tokens;
    if (derived) result.lineage = storage::LineageName(stored->lineage);
  }
  if (result.stored_tokens == 0) return result;
  PREFIXD_ASSIGN(const auto& info, stored);
  result.bytes = info.own_bytes;
  // The rows are durable whatever fails here: without samples the prefix is merely untuned.
  const QuerySamples samples = JoinHeads(std::move(of_heads));
  if (!samples.empty() && info.n_tokens == target_.prompt_tokens) {
    Status kept = storage.PutBlob(id, kQueriesBlob, kQueriesProducer, samples.Serialize());
    if (!kept.ok()) {
      storage::LogWarning("the sampled queries of prefix " + id.ToString() +
                          " could not be stored, so it is untuned: " + kept.error().message);
    }
  }
  target_.committed(id);
  return result;
}

// Ends the put with its parts' result; writing_ is held.
void JointPut::End(Result<PutResult> result) {
  writer_.reset();  // frees what an aborted put had, before anybody hears of it
  std::lock_guard lock(mutex_);
  result_ = std::move(result);
  state_ = State::kEnded;
  changed_.notify_all();
}

void JointPut::Leave(HeadRange heads) {
  const CarriedScope to_the_end(nullptr);  // without limits the lock is always taken
  {
    const auto writing = CallLock::Take(writing_);
    std::optional<Error> broken;
    {
      std::lock_guard lock(mutex_);
      if (state_ != State::kOpen) return;
      state_ = State::kEnding;
      broken_ = broken = Error{Code::kUnavailable,
                               "the part of " + Named(heads) +
                                   " of this put was aborted, or its client is gone; nothing of "
                                   "the put is stored: begin it again"};
    }
    writer_->Abort();
    End(*std::move(broken));
  }
  if (registry_) registry_->Ended(*this);
}

// ---- JointPuts ----------------------------------------------------------------------------------

JointPuts::Entries::iterator JointPuts::Find(const PutSpec& spec) {
  return std::ranges::find_if(entries_,
                              [&](const Entry& entry) { return SamePrompt(entry.spec, spec); });
}

void JointPuts::Ended(const JointPut& put) {
  std::lock_guard lock(mutex_);
  entries_.remove_if([&](const Entry& entry) { return entry.put.lock().get() == &put; });
  changed_.notify_all();
}

Result<std::unique_ptr<PutPart>> JointPuts::Enter(const PutSpec& spec, HeadRange heads,
                                                  uint32_t n_kv_heads, const Begin& begin) {
  const auto until = Clock::now() + std::chrono::milliseconds(spec.wait_ms);
  const auto left = [&] {
    return std::max(std::chrono::milliseconds(0),
                    std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()));
  };
  std::unique_ptr<PutPart> part;
  const auto begin_part = [&]() -> Status {
    PREFIXD_ASSIGN(auto put, begin(left()));
    part = std::make_unique<PutPart>(std::move(put), heads);
    return part->Enter();
  };
  if (heads.n == n_kv_heads) {
    PREFIXD_TRY(begin_part());
    return part;
  }
  std::unique_lock lock(mutex_);
  for (auto entry = Find(spec); entry != entries_.end(); entry = Find(spec)) {
    PREFIXD_TRY(CheckAlike(spec, entry->spec));
    std::shared_ptr<JointPut> put = entry->put.lock();
    if (!put) {  // another part begins it, and waits no longer than that part may
      changed_.wait_for(lock, kCallSlice);
      PREFIXD_TRY(CheckCall());
      continue;
    }
    part = std::make_unique<PutPart>(std::move(put), heads);
    Status entered = part->Enter();
    if (entered.ok()) return part;
    part.reset();
    if (Clock::now() >= until) return std::move(entered).error();
    changed_.wait_until(lock, std::min(until, Clock::now() + kCallSlice));
    PREFIXD_TRY(CheckCall());
  }
  const auto entry = entries_.insert(entries_.end(), {spec, {}});
  lock.unlock();
  const Status begun = CaptureErrors(begin_part);
  lock.lock();
  if (begun.ok() && part->range().size() > 0) {
    part->put_->registry_ = this;
    entry->put = part->put_;
  } else {
    entries_.erase(entry);  // other parts find out for themselves
  }
  changed_.notify_all();
  PREFIXD_TRY(begun);
  return part;
}

}  // namespace prefixd
