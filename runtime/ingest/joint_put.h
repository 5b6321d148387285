// Joins the parts of a put. The ranks of an engine each put the rows of their own KV heads; these
// parts fill one segment, and the last commit makes it visible. A put of all heads has one part.
//
// Thread-safety: JointPuts: all methods may be called concurrently. A PutPart is used by one thread
// at a time, different parts of a put by any.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "prefixd/store.h"
#include "runtime/derived/query_samples.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

class JointPuts;

// What the parts of one put share; PutPart and JointPuts alone use it.
class JointPut {
 public:
  // What a put needs of its store.
  struct Target {
    std::shared_ptr<void> keep_alive;  // the store's shared state, and the JointPuts
    storage::PrefixStore* storage = nullptr;
    KvGeometry geometry;
    uint32_t prompt_tokens = 0;
    // Called when the segment is committed and its query samples are stored.
    std::function<void(const storage::SegmentId&)> committed;
  };
  JointPut(Target target, std::unique_ptr<storage::SegmentWriter> writer)
      : target_(std::move(target)), writer_(std::move(writer)), missing_(writer_->range()) {}

 private:
  friend class JointPuts;
  friend class PutPart;
  enum class State : uint8_t { kOpen, kEnding, kEnded };
  struct Part {
    HeadRange heads;
    bool committed = false;
    QuerySamples samples;
  };

  // kUnavailable: a part has some of these heads, or the put has ended.
  Status Enter(HeadRange heads);
  Status CheckRun(HeadRange heads, uint32_t layer, uint32_t first, uint32_t n);
  Status WriteRows(HeadRange heads, uint32_t layer, uint32_t first, uint32_t n,
                   std::span<const std::byte> rows);
  Result<PutResult> Commit(HeadRange heads, QuerySamples samples, std::chrono::milliseconds wait);
  void Leave(HeadRange heads);

  Status CheckOpen();
  // The first heads that no part has committed; n 0: there are none. mutex_ is held.
  HeadRange Uncommitted() const;
  // Takes the samples of all parts, in order of heads. mutex_ is held.
  std::vector<QuerySamples> TakeSamples();
  Result<PutResult> Finish(std::vector<QuerySamples> of_heads);
  void End(Result<PutResult> result);

  const Target target_;
  JointPuts* registry_ = nullptr;  // where other parts find this put
  // Guards writer_; locked before mutex_. A part may write for as long as the disk takes.
  CallMutex writing_;
  std::unique_ptr<storage::SegmentWriter> writer_;
  const TokenRange missing_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  State state_ = State::kOpen;
  std::list<Part> parts_;
  std::optional<Error> broken_;              // from the moment when a part leaves
  std::optional<Result<PutResult>> result_;  // once it has ended
};

// One part's hold on its put. Destruction before the commit ends the put for all its parts.
class PutPart {
 public:
  PutPart(std::shared_ptr<JointPut> put, HeadRange heads) : put_(std::move(put)), heads_(heads) {}
  ~PutPart() {
    if (entered_) put_->Leave(heads_);
  }
  PutPart(const PutPart&) = delete;
  PutPart& operator=(const PutPart&) = delete;

  // As SegmentWriter's, for this part's heads.
  TokenRange range() const { return put_->missing_; }
  Status CheckRun(uint32_t layer, uint32_t first, uint32_t n) {
    return put_->CheckRun(heads_, layer, first, n);
  }
  Status WriteRows(uint32_t layer, uint32_t first, uint32_t n, std::span<const std::byte> rows) {
    return put_->WriteRows(heads_, layer, first, n, rows);
  }
  // Waits for the other parts; the last stores the segment and the samples of all.
  // kFailedPrecondition: rows of this part are missing, or parts still are after `wait`; the put
  // goes on, and so it does where the call ends before (base/call_scope.h).
  Result<PutResult> Commit(QuerySamples samples, std::chrono::milliseconds wait) {
    return put_->Commit(heads_, std::move(samples), wait);
  }

 private:
  friend class JointPuts;
  Status Enter() {
    PREFIXD_TRY(put_->Enter(heads_));
    entered_ = true;
    return {};
  }

  const std::shared_ptr<JointPut> put_;
  const HeadRange heads_;
  bool entered_ = false;
};

// Knows the puts in parts that are under way.
class JointPuts {
 public:
  // Begins a put, waiting so long for others of the same tokens.
  using Begin = std::function<Result<std::shared_ptr<JointPut>>(std::chrono::milliseconds wait)>;

  // Enters the put under way that `spec` is a part of, or one that it begins. heads: resolved, of
  // the model's `n_kv_heads`. kInvalidArgument names how the spec differs from the other parts'.
  Result<std::unique_ptr<PutPart>> Enter(const PutSpec& spec, HeadRange heads, uint32_t n_kv_heads,
                                         const Begin& begin);

 private:
  friend class JointPut;
  struct Entry {
    PutSpec spec;
    std::weak_ptr<JointPut> put;  // empty while it is being begun
  };
  using Entries = std::list<Entry>;
  Entries::iterator Find(const PutSpec& spec);
  void Ended(const JointPut& put);

  std::mutex mutex_;  // locked before JointPut::mutex_
  std::condition_variable changed_;
  Entries entries_;
};

}  // namespace prefixd
