#include "base/match_calls.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include "base/capture_errors.h"

namespace prefixd {
namespace {

uint64_t HashOf(std::span<const uint32_t> tokens) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const uint32_t token : tokens) hash = (hash ^ token) * 0x100000001b3ull;
  return hash;
}

}  // namespace

struct MatchCalls::Answer {
  std::mutex mutex;
  std::condition_variable given;
  std::optional<Result<PrefixMatch>> result;

  void Give(Result<PrefixMatch> found) {
    std::lock_guard lock(mutex);
    result = std::move(found);
    given.notify_all();
  }
};

class MatchCalls::Pending final : public PendingMatch {
 public:
  Pending(std::shared_ptr<Answer> answer, std::chrono::milliseconds patience,
          Clock::time_point deadline)
      : answer_(std::move(answer)), patience_(patience), deadline_(deadline) {}

  bool ready() const override {
    std::lock_guard lock(answer_->mutex);
    return answer_->result || Clock::now() >= deadline_;
  }

  Result<PrefixMatch> Get() override {
    std::unique_lock lock(answer_->mutex);
    answer_->given.wait_until(lock, deadline_, [&] { return answer_->result.has_value(); });
    if (answer_->result) return *answer_->result;
    return Error{Code::kDeadlineExceeded,
                 "no match was found or excluded within " + std::to_string(patience_.count()) +
                     " ms: disk or daemon are slow; go on without, or try again"};
  }

 private:
  const std::shared_ptr<Answer> answer_;
  const std::chrono::milliseconds patience_;
  const Clock::time_point deadline_;
};

Result<std::unique_ptr<PendingMatch>> MatchCalls::Begin(const MatchSpec& spec,
                                                        std::chrono::milliseconds deadline) {
  deadline = std::clamp(deadline, std::chrono::milliseconds(0), kMaxMatchDeadline);
  const Clock::time_point latest = Clock::now() + deadline;
  std::unique_ptr<PendingMatch> pending;
  const Status begun = CaptureErrors([&]() -> Status {
    auto question = std::make_shared<const Question>(Question{spec, HashOf(spec.tokens)});
    std::list<Job> job;
    job.push_back({std::move(question), std::make_shared<Answer>(), latest});
    std::lock_guard lock(mutex_);
    if (stopping_) return Error{Code::kCancelled, "the store is closing"};
    // An equal match that has not begun answers this caller, too; one that runs may have missed
    // what was put since.
    const auto equal = std::ranges::find_if(
        waiting_, [&](const Job& other) { return *other.question == *job.front().question; });
    if (equal != waiting_.end()) {
      pending = std::make_unique<Pending>(equal->answer, deadline, latest);
      equal->latest = std::max(equal->latest, latest);
      return {};
    }
    if (waiting_.size() >= kMaxWaiting) {
      return Error{Code::kResourceExhausted, std::to_string(kMaxWaiting) +
                                                 " matches wait for a slow disk or daemon; try "
                                                 "again later"};
    }
    pending = std::make_unique<Pending>(job.front().answer, deadline, latest);
    if (idle_ <= waiting_.size() && threads_.size() < kThreads) PREFIXD_TRY(StartThread());
    waiting_.splice(waiting_.end(), job);
    changed_.notify_one();
    return {};
  });
  if (!begun.ok()) return begun.error();
  return pending;
}

// With at least one thread matches go on, only slower.
Status MatchCalls::StartThread() {
  threads_.reserve(kThreads);
  running_.resize(kThreads);
  try {
    threads_.emplace_back([this, thread = threads_.size()] { Work(thread); });
  } catch (const std::system_error& e) {
    if (threads_.empty()) {
      return Error{Code::kResourceExhausted, std::string("no thread for matches: ") + e.what()};
    }
  }
  return {};
}

bool MatchCalls::Runs(const Question& question) const {
  return std::ranges::any_of(running_, [&](const auto& other) {
    return other && other->hash == question.hash && *other == question;
  });
}

std::list<MatchCalls::Job>::iterator MatchCalls::NextJob() {
  return std::ranges::find_if(waiting_, [&](const Job& job) { return !Runs(*job.question); });
}

void MatchCalls::Work(size_t thread) {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto next = NextJob();
    if (next == waiting_.end() && stopping_) return;
    if (next == waiting_.end()) {
      ++idle_;
      changed_.wait(lock);
      --idle_;
      continue;
    }
    std::list<Job> job;
    job.splice(job.end(), waiting_, next);
    const Job& mine = job.front();
    if (mine.latest <= Clock::now()) continue;  // nobody waits for it any more
    running_[thread] = mine.question;
    lock.unlock();
    Result<PrefixMatch> found = Error{};
    const Status ran = CaptureErrors([&]() -> Status {
      found = find_(thread, mine.question->spec);
      return {};
    });
    mine.answer->Give(ran.ok() ? std::move(found) : Result<PrefixMatch>(ran.error()));
    lock.lock();
    running_[thread] = nullptr;
    changed_.notify_all();  // an equal match may begin now
  }
}

void MatchCalls::Stop() {
  std::list<Job> dropped;
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(waiting_);
    threads.swap(threads_);
    changed_.notify_all();
  }
  for (const Job& job : dropped) {
    job.answer->Give(Error{Code::kCancelled, "store is closing"});
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace prefixd
