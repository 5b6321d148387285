// Sessions that never stop: one prompt, whose sessions append own tokens, move them out of memory,
// persist them and go on over what they persisted; and the check of what a crash left of it. What
// was acknowledged must be there, byte for byte and marked as it was; of what was not, all of it,
// the exact part of it, or nothing; and of what sessions moved, nothing.
//
// Thread-safety: one thread at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "runtime/store/local_store.h"
#include "tests/reliability/workload/journal.h"
#include "tests/support/synthetic_kv.h"

namespace prefixd::storage::reliability {

// What a process that may die has done.
struct Progress {
  static constexpr uint32_t kNever = std::numeric_limits<uint32_t>::max();
  std::atomic<uint32_t> acknowledged{0};  // tokens that are stored, the prompt's among them
  std::atomic<uint32_t> begun{0};         // those of the last persist that began
  // The first token that was computed behind an approximate step.
  std::atomic<uint32_t> derived_from{kNever};
  std::atomic<uint64_t> moves{0};  // of own tokens that left memory
  // Set before the disk goes: what is answered from then on is not believed, and may be an error.
  std::atomic<bool> cut{false};
};

// Lies in memory that a process shares with those that it forks.
class SharedProgress {
 public:
  SharedProgress();
  ~SharedProgress();
  SharedProgress(const SharedProgress&) = delete;
  SharedProgress& operator=(const SharedProgress&) = delete;
  Progress* operator->() const { return progress_; }
  // Counts in the report what was reached.
  void Report(Journal& report) const;

 private:
  Progress* const progress_;
};

class Persister {
 public:
  // The prompt, and all that sessions ever append to it.
  static constexpr uint32_t kPrompt = 100, kTokens = 6000;
  static testing::SyntheticPrompt Story(uint64_t seed);

  Persister(const std::filesystem::path& dir, const testing::SyntheticPrompt& all,
            SharedProgress& progress, Journal& report);

  // Opens the store, and puts the prompt when it has none. False: it cannot; the report has a
  // violation, unless the disk is gone.
  bool Open();
  // Goes on until the process dies, the disk goes, or nothing is left to store; `armed` is called
  // after some rounds. False: something was wrong.
  bool Run(uint64_t seed, const std::function<void()>& armed);
  void Check();

 private:
  bool Wrong(const std::string& what);
  void Must(const Status& status);
  std::vector<uint32_t> Ids(uint32_t begin, uint32_t end) const;
  uint32_t Matched(bool accept);
  std::shared_ptr<Session> Attach(uint32_t own_memory_tokens = 0);
  bool Persist(Session& session, uint32_t base, uint32_t upto);
  void StepApproximately(Session& session, uint32_t at, const StepPolicy& back);
  void CheckRows();
  void CheckNothingElse();

  const testing::SyntheticPrompt& all_;
  SharedProgress& progress_;
  Journal& report_;
  RuntimeOptions options_;
  ModelSpec spec_;
  std::unique_ptr<LocalStore> store_;
};

}  // namespace prefixd::storage::reliability
