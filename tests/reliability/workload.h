// A user of the store who never stops: random operations, each announced and acknowledged in the
// journal, each answer compared with the truth. New features join in by adding a row to
// kOperations (workload.cc).
//
// Thread-safety: one thread at a time.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "storage/store/prefix_store.h"
#include "tests/reliability/truth.h"

namespace prefixd::storage::reliability {

StoreOptions WorkloadOptions(const std::filesystem::path& dir);
ModelRecord WorkloadModel();
// Two chunks of its longest prompts, the rows of each the other way round.
SettleOptions WorkloadSettling();
// Every third prompt's rows are stored in 8 bits.
RowEncoding EncodingOf(uint32_t prompt);
// "" when the prompt is what it must be, down to the encoding of its own rows; otherwise what not.
Result<std::string> Compare(const StoredPrefix& prefix, uint32_t number, const Prompt& prompt);

// Undoes what Workload::Spoil did to files; Verify then lifts the quarantines.
void RepairSpoiled(const std::filesystem::path& dir, const Truth& truth);

struct WorkloadPlan {
  std::filesystem::path dir;  // of the store
  uint64_t seed = 0;
  uint64_t operations = UINT64_MAX;
  bool errors_are_fine = false;  // the disk fails: an operation may fail, never lie
  bool spoil = false;            // also damage bytes now and then, and have them found and repaired
  IoBackend io = IoBackend::kThreads;
  uint32_t max_prompts = 6;    // removals keep the store about this small
  uint32_t merge_percent = 0;  // of the operations, beyond their weight

  // Every fourth seed's store has a quota that its prompts exceed: it evicts.
  uint64_t quota_bytes() const { return (seed >> 8) % 4 == 0 ? 160 << 10 : 0; }
};

class Workload {
 public:
  Workload(WorkloadPlan plan, Truth& truth, Journal& journal);
  ~Workload();

  // First undoes the damage of a workload that was killed while it spoiled. False when the store
  // cannot be opened; in the journal as a violation unless errors are fine.
  bool Open();
  void Close();
  void Run();

  // Single steps, for harnesses with a story of their own. False: it failed.
  bool Put();
  bool PutBlob();
  bool Remove();
  bool Read();
  bool Match();
  bool GetBlob();
  bool AbortPut();
  bool Settle();
  bool Merge();
  bool Retain();
  bool Expire();
  bool Maintain();
  bool Verify();
  bool Reopen();
  bool Spoil();

 private:
  void Tell(Event event);
  // An error: a violation unless errors are fine. Always false.
  bool Refused(const char* what, const Error& error);
  void LookAround();
  // A full store may refuse, where the plan has a quota.
  bool OutOfRoom(const Error& error) const;
  // What `act` does may evict; finds out afterwards what it did.
  bool MakingRoom(const std::function<bool()>& act);
  bool Has(const Prompt& p) const;
  bool PutFresh();
  bool PutBlobOf(uint32_t number);
  std::vector<NewBlob> SomeBlobs(Event* as);
  std::optional<uint32_t> SomeSure();
  // One that ends in a segment which continues another.
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
