// Runs matches of callers that do not wait for them (Store::MatchAsync), on a few threads: a match
// that a slow disk holds up holds up no other. Equal matches never run beside each other: a caller
// that tries again and again while the disk is slow keeps one thread busy, not all of them.
//
// Thread-safety: all methods may be called concurrently. The threads start when they are needed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "prefixd/store.h"

namespace prefixd {

class MatchCalls {
 public:
  // Finds the match. Calls run beside each other, each with another `thread` below kThreads.
  using Find = std::function<Result<PrefixMatch>(size_t thread, const MatchSpec& spec)>;
  static constexpr size_t kThreads = 4;
  static constexpr size_t kMaxWaiting = 256;

  explicit MatchCalls(Find find) : find_(std::move(find)) {}
  ~MatchCalls() { Stop(); }
  MatchCalls(const MatchCalls&) = delete;
  MatchCalls& operator=(const MatchCalls&) = delete;

  Result<std::unique_ptr<PendingMatch>> Begin(const MatchSpec& spec,
                                              std::chrono::milliseconds deadline);
  // Ends waiting matches with kCancelled, and returns when no Find runs any more.
  void Stop();

 private:
  using Clock = std::chrono::steady_clock;
  struct Answer;
  class Pending;
  struct Question {
    MatchSpec spec;
    uint64_t hash = 0;
    bool operator==(const Question&) const = default;
  };
  struct Job {
    std::shared_ptr<const Question> question;
    std::shared_ptr<Answer> answer;
    Clock::time_point latest;  // the last deadline of those who wait for it
  };

  void Work(size_t thread);
  // These need mutex_.
  bool Runs(const Question& question) const;
  std::list<Job>::iterator NextJob();
  Status StartThread();

  const Find find_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Job> waiting_;
  std::vector<std::shared_ptr<const Question>> running_;  // [thread]; null: idle
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stopping_ = false;
};

}  // namespace prefixd
