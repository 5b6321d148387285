// Simulates a user of the store that never stops: random operations, each announced and
// acknowledged in the journal, each answer compared with the truth. A new feature joins with a row
// in kOperations (workload.cc).
//
// Thread-safety: one thread at a time.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "storage/store/prefix_store.h"
#include "tests/reliability/workload/truth.h"

namespace prefixd::storage::reliability {

StoreOptions WorkloadOptions(const std::filesystem::path& dir);
ModelRecord WorkloadModel();
// The longest prompts have two chunks, the rows of each in reverse order.
ReclusterOptions WorkloadSettling();
// Every third prompt's rows are stored in 8 bits.
RowEncoding EncodingOf(uint32_t prompt);
TokenRange OwnTokens(const PrefixInfo& segment);
// Which rows a compressed segment keeps, half of them, of each KV head others.
std::vector<uint32_t> KeptRows(TokenRange own, uint32_t kv_head);
// Returns "" when the prompt is right, down to the encoding of its own rows and to those that are
// left of it; otherwise the difference.
Result<std::string> Compare(const StoredPrefix& prefix, uint32_t number, const Prompt& prompt);

// Undoes what Workload::Spoil did to files; Verify then lifts the quarantines.
void RepairSpoiled(const std::filesystem::path& dir, const Truth& truth);

struct WorkloadPlan {
  std::filesystem::path dir;  // the store's directory
  uint64_t seed = 0;
  uint64_t operations = UINT64_MAX;
  bool errors_are_fine = false;  // the disk fails: an operation may fail, never lie
  // Also damage bytes now and then, which the store must find; then repair them.
  bool spoil = false;
  IoBackend io = IoBackend::kThreads;
  uint32_t max_prompts = 6;    // removals keep the store about this small
  uint32_t merge_percent = 0;  // percentage of the operations, beyond their weight

  // Every fourth seed's store has a quota that its prompts exceed: it evicts.
  uint64_t quota_bytes() const { return (seed >> 8) % 4 == 0 ? 160 << 10 : 0; }
};

class Workload {
 public:
  Workload(WorkloadPlan plan, Truth& truth, Journal& journal);
  ~Workload();

  // First undoes the damage of a workload that was killed while it spoiled. False when the store
  // cannot be opened; the journal gets a violation unless errors are fine.
  bool Open();
  void Close();
  void Run();

  // These are single steps, for harnesses with a story of their own. False: the step failed.
  bool Put();
  bool PutBlob();
  bool Remove();
  bool Read();
  bool Match();
  bool GetBlob();
  bool AbortPut();
  bool Recluster();
  bool Compact();
  bool Compress();
  bool Retain();
  bool Expire();
  bool Maintain();
  bool Verify();
  bool Reopen();
  bool Spoil();

 private:
  void Tell(Event event);
  // Reports an error: a violation unless errors are fine. Always returns false.
  bool Refused(const char* what, const Error& error);
  void LookAround();
  // Returns whether the error is that of a full store, which the plan's quota allows.
  bool OutOfRoom(const Error& error) const;
  // Runs `act`, which may evict; finds out afterwards what it evicted.
  bool MakingRoom(const std::function<bool()>& act);
  bool Has(const Prompt& p) const;
  bool PutFresh();
  bool PutBlobOf(uint32_t number);
  std::vector<NewBlob> SomeBlobs(Event* as);
  std::optional<uint32_t> SomeSure();
  // Returns a prompt that ends in a segment which continues another.
  std::optional<uint32_t> SomeContinuing();
  Tokens FreshTokens(uint32_t tenant, uint32_t* parent_tenant);
  void CheckRead(uint32_t number, bool damaged);

  const WorkloadPlan plan_;
  Truth& truth_;
  Journal& journal_;
  std::mt19937_64 rng_;
  ModelRecord model_;
  std::unique_ptr<PrefixStore> store_;
  bool opened_ = false;
};

}  // namespace prefixd::storage::reliability
