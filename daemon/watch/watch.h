// Keeps what an operator wants to see of a running daemon beside its counters: how long calls took,
// which sessions are attached, what each prefix saved, and what went wrong last. All of it begins
// with the process, and each list has a bound.
//
// Thread-safety: all methods may be called concurrently. Took is for every step; the others lock.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/watch/latencies.h"
#include "prefixd/ledger.h"
#include "prefixd/policy.h"
#include "prefixd/result.h"
#include "prefixd/session.h"

namespace prefixd::daemon {

// kStep: a call with steps, one or a batch. kPut: from the beginning of a put to its commit.
enum class Timed : uint8_t { kStep, kAttach, kMatch, kPut, kCommit };
inline constexpr std::array<std::string_view, 5> kTimedNames = {"step", "attach", "match", "put",
                                                                "commit"};

inline constexpr size_t kCodes = static_cast<size_t>(Code::kInternal) + 1;

class Watch {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMostPrefixes = 4096, kMostModels = 1024, kMostFailures = 64;
  static constexpr size_t kMostPoints = 360, kRecentPoints = 12;
  static constexpr std::chrono::seconds kPointEvery{5};

  void Took(Timed what, Clock::duration time) { latencies_[static_cast<size_t>(what)].Add(time); }

  // An attached session: its prefix saved the prefill of its tokens. Returns a number for Detached.
  uint64_t Attached(const std::shared_ptr<Session>& session);
  // One that continues another of this engine, which has the tokens already: it saved nothing.
  uint64_t Forked(const std::shared_ptr<Session>& session);
  void Detached(uint64_t number, const Ledger& total);
  // A put stored so many tokens: the pace of a model's prefills, as far as the daemon can know it.
  void Stored(const std::string& model, uint32_t tokens, Clock::duration time);

  struct Failure {
    int64_t unix_ms = 0;
    std::string tenant;
    std::string call;     // "attach"
    std::string request;  // its id
    Code code = Code::kInternal;
    std::string message;
  };
  // A call was answered by an error. Changes nothing where it throws for want of memory.
  void Failed(std::string_view tenant, std::string_view call, std::string_view request,
              const Error& error);

  // Adds a point to the history of steps, to be called every kPointEvery.
  void AddPoint(int64_t unix_ms);

  struct Attachment {
    uint64_t number = 0;
    std::string tenant, model, prefix;
    uint32_t n_tokens = 0;
    uint64_t attached_ms = 0;  // how long it has been
    StepPolicy policy;
    Ledger ledger;
  };
  struct Saved {
    std::string tenant, model;
    uint32_t n_tokens = 0;  // of the longest attach
    uint64_t attaches = 0, tokens = 0;
    double seconds = 0;         // by the pace of the model's puts
    uint64_t timed_tokens = 0;  // those of `tokens` whose time was known
    int64_t last_unix_ms = 0;
  };
  struct Point {
    int64_t unix_ms = 0;
    uint64_t calls = 0;
    double p50_seconds = 0, p99_seconds = 0;
  };
  struct Report {
    std::vector<Attachment> sessions;
    Ledger ledger;  // of all sessions since the start
    std::map<std::string, Saved> saved;
    Saved saved_by_all;  // also by prefixes that are forgotten; no tenant, model or length
    std::deque<Failure> failures;  // the last one first
    std::array<uint64_t, kCodes> failed{};
    std::array<LatencyCounts, kTimedNames.size()> latencies;
    LatencyCounts recent;      // steps of the last minute
    std::deque<Point> points;  // the earliest first
  };
  // tenant: of this one alone, as far as it tells tenants apart; nullopt: of all. Asks every
  // session for its ledger.
  Report Take(const std::optional<std::string>& tenant) const;

 private:
  void NoteFailure(std::string_view tenant, std::string_view call, std::string_view request,
                   const Error& error);
  void DropFailure();                                        // failures_mutex_ is held
  uint64_t Follow(const std::shared_ptr<Session>& session);  // sessions_mutex_ is held

  struct Live {
    std::weak_ptr<Session> session;
    Clock::time_point since;
  };
  struct Pace {
    uint64_t tokens = 0;
    double seconds = 0;
  };

  std::array<Latencies, kTimedNames.size()> latencies_;
  std::array<std::atomic<uint64_t>, kCodes> failed_{};

  mutable std::mutex sessions_mutex_;
  uint64_t next_ = 1;
  std::map<uint64_t, Live> live_;
  Ledger ended_;
  std::map<std::string, Saved> saved_;  // by prefix
  Saved saved_by_all_;
  std::map<std::string, Pace> paces_;  // by model

  mutable std::mutex failures_mutex_;
  std::deque<Failure> failures_;
  Clock::time_point failures_since_{};
  std::map<std::string, size_t, std::less<>> failures_noted_;  // since then, by tenant

  mutable std::mutex points_mutex_;
  std::deque<LatencyCounts> marks_;
  std::deque<Point> points_;
};

}  // namespace prefixd::daemon
