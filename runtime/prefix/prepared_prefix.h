// Prepares a stored prefix for steps, shared by all sessions on the same tokens: anchors, keys for
// selection, indexes and materialised summaries. Each part is loaded when first needed; its reads
// are reported to the caller who caused them.
//
// Thread-safety: all methods may be called concurrently; loads of one head exclude each other.
// Returned views and pointers live as long as the PreparedPrefix.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "index/search/key_index.h"
#include "prefixd/estimator_variant.h"
#include "prefixd/ingest.h"
#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "runtime/derived/derived_context.h"
#include "runtime/indexes/indexes.h"
#include "runtime/prefix/prefix_memory.h"
#include "runtime/prefix/preloader.h"
#include "runtime/prefix/selector_memory.h"
#include "runtime/summaries/materialised_summaries.h"
#include "runtime/summaries/token_features.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

struct AnchorRows {
  RowsView sinks, tail;
};

// Whether MidKeys loads keys at once, or leaves that to preloading.
enum class Bring : uint8_t { kNow, kLater };

class PreparedPrefix {
 public:
  // The services that all prepared prefixes of a store share; they outlive the prefixes.
  struct Services {
    DerivedContext derived;
    SelectorMemory& selector_memory;
    Preloader& index_preloader;  // before steps need the indexes
    Preloader& key_preloader;    // for keys that steps can still do without
    // Called with a segment whose derived data proved damaged, foreign or outdated.
    std::function<void(const storage::SegmentId&)> rebuild;
  };

  // Waits until no preloading for this prefix runs any more.
  ~PreparedPrefix();
  PreparedPrefix(const PreparedPrefix&) = delete;
  PreparedPrefix& operator=(const PreparedPrefix&) = delete;

  // `id` is the segment in which n_tokens ends. memory: what an earlier prepared prefix of the same
  // tokens and model has loaded, unused by any other; null: nothing.
  static Result<std::unique_ptr<PreparedPrefix>> Open(const Services& services,
                                                      std::shared_ptr<const Model> model,
                                                      const storage::SegmentId& id,
                                                      uint32_t n_tokens,
                                                      std::shared_ptr<PrefixMemory> memory);

  const std::shared_ptr<const Model>& model() const { return model_; }
  const storage::StoredPrefix& stored() const { return *stored_; }
  const Partition& partition() const { return partition_; }
  const MemoryAccount& account() const { return account_; }  // its tenant's
  uint32_t n_tokens() const { return partition_.tail.end; }
  size_t heads() const { return memory_->heads.size(); }
  const std::shared_ptr<PrefixMemory>& memory() const { return memory_; }
  std::span<const SegmentPart> parts() const { return parts_; }
  // Returns the maps whose caches complete this prefix; null without maps.
  const FeatureMapSet* maps() const { return model_->MapsFor(n_tokens()); }
  // Whether tokens of the mid region have no rows: they stay in the remainder.
  bool compressed() const { return stored_->compressed(); }
  // Returns the mid tokens that a head may retrieve, ascending. REQUIRES: compressed().
  Result<std::span<const uint32_t>> KeptMid(size_t head);
  // Takes away the tokens that have no rows, of ids of the mid region, ascending. REQUIRES: KeptMid
  // was called for the head where the prefix is compressed.
  void DropMissing(size_t head, std::vector<uint32_t>& ids) const;
  bool has_phi_caches() const;                  // beside every segment of the chain
  bool has_clusters() const;                    // likewise
  bool has_index(index::IndexKind kind) const;  // covering at least half of the mid region
  // Returns the choices of the last segment of the chain that has some; empty: untuned.
  Result<std::vector<HeadChoice>> Choices() const;

  // Returns the summaries of the mid region that `wanted` (by Kept() names) names; none for kNone,
  // kAuto, and clusters where there is no mid region. Whoever holds them shares them. `reads`
  // [heads]: physical reads are added. Moments that are not stored yet are computed from the rows
  // on the spot, up to kMomentsOnTheSpot tokens per head; other missing summaries fail with
  // kFailedPrecondition, and those that do not fit into memory with kResourceExhausted.
  // priority: of what several threads do.
  Result<KeptSummaries> Summaries(const HeadsOfVariants& wanted, WorkPriority priority,
                                  std::vector<storage::ReadStats>* reads);
  // kFailedPrecondition when the variant's summaries are not there yet, or never will be.
  Status CheckStored(const EstimatorVariant& variant) const;

  Result<AnchorRows> Anchors(size_t head, storage::ReadStats* reads);
  // Returns keys alone (value_dim 0), densely: row i is token mid.begin + i of the mid region, or
  // token i of KeptMid.
  // nullopt when the keys of all heads do not fit into the memory left for selection, or are still
  // being loaded (kLater): HeadKeys then reads them from the store.
  Result<std::optional<RowsView>> MidKeys(size_t head, Bring bring, storage::ReadStats* reads);
  // Whether the keys of a head's mid region are in memory now.
  bool holds_keys(size_t head) const {
    return memory_->heads[head].has_keys.load(std::memory_order_acquire);
  }
  // Whether the background is loading them into memory.
  bool loads_keys(size_t head) const {
    return !holds_keys(head) && services_.key_preloader.Loads(*this, head);
  }
  // Returns the codes of all segments that have some; for other kinds the index that covers most of
  // the mid region; an exact index where none can be used.
  Result<const index::KeyIndex*> Index(size_t head, index::IndexKind kind,
                                       storage::ReadStats* reads);
  // Load what a head's step needs first, and its keys. The next step that uses them is charged.
  Status PreloadIndex(size_t head, index::IndexKind kind);
  Status PreloadKeys(size_t head, const std::atomic<bool>& stop);
  // Loads a head's index and, where `shorter` holds its keys, its keys: what `shorter` has of them
  // is not read again. This prefix begins with the tokens of `shorter`. Queues nothing.
  Status Extend(const PreparedPrefix& shorter, size_t head, index::IndexKind kind,
                storage::ReadStats* reads);
  // Returns stored features of the mid region, for phi; null where the store keeps none.
  Result<const TokenFeatures*> Features(size_t head, storage::ReadStats* reads);
  const index::KeyIndex& exact() const { return *exact_; }

  uint32_t layer_of(size_t head) const { return model_->heads.layer_of(head); }
  uint32_t kv_head_of(size_t head) const { return model_->heads.head_of(head); }
  RowShape row(size_t head) const { return model_->spec.geometry.row(layer_of(head)); }

 private:
  PreparedPrefix(const Services& services, std::shared_ptr<const Model> model,
                 std::shared_ptr<const storage::StoredPrefix> stored,
                 std::vector<SegmentPart> parts, std::shared_ptr<PrefixMemory> memory);
  // Returns the segment whose own tokens cover most of the mid region.
  const SegmentPart* LargestPart() const;
  // Describes how a head's index of that kind is loaded.
  Result<IndexSource> Source(size_t head, index::IndexKind kind, storage::ReadStats* reads);
  // Mid tokens that a head may retrieve.
  uint32_t candidates() const;
  // Returns where keys are, or will be: of all heads, or of so many as half of the memory holds.
  // Null: there is no room for any.
  PrefixKeys* Keys();
  // Forgets the keys of some heads where there is room for those of all now. Nobody uses them yet.
  void DropSomeKeys();
  // Sets memory_->keys, unless it is set: to those of `shorter`, behind which it takes its own.
  void TakeKeysOf(const PreparedPrefix& shorter);
  // Null where memory has no room for so many tokens. strides: KeyStrides(), or 0 for heads that
  // are left out.
  std::shared_ptr<PrefixKeys> MakeKeys(const std::vector<size_t>& strides, uint32_t room) const;
  std::shared_ptr<PrefixKeys> MakeSomeKeys(uint32_t room) const;
  std::vector<size_t> KeyStrides() const;    // bytes of a key by head; 0: it slides, and keeps none
  uint64_t KeyBytes(uint32_t tokens) const;  // of all heads
  bool Continues(const PreparedPrefix& shorter) const {
    const TokenRange before = shorter.partition_.mid, mid = partition_.mid;
    return before.begin == mid.begin && before.end <= mid.end;
  }
  // These take over what `shorter` has, if it is not null.
  //
  // Loads the index unless it is loaded. An error leaves it so, and the next step tries again;
  // kResourceExhausted: memory is short now.
  Status LoadIndex(size_t head, index::IndexKind kind, const PreparedPrefix* shorter,
                   storage::ReadStats* reads);
  // Loads the keys unless they are loaded, or have no room. stop: null, or kCancelled once it is
  // set.
  Status LoadKeys(size_t head, const PreparedPrefix* shorter, storage::RangeUse use,
                  const std::atomic<bool>* stop, storage::ReadStats* reads);
  static void ChargePreloaded(PrefixMemory::Head& state, storage::ReadStats* reads);
  static void NotePreloaded(PrefixMemory::Head& state, const storage::ReadStats& reads);

  const Services& services_;
  const std::shared_ptr<const Model> model_;
  const std::shared_ptr<const storage::StoredPrefix> stored_;
  const std::vector<SegmentPart> parts_;
  const Partition partition_;
  const MemoryAccount account_;
  const std::unique_ptr<index::KeyIndex> exact_;
  const std::shared_ptr<PrefixMemory> memory_;
  CallMutex recalls_mutex_;
  std::map<index::IndexKind, std::vector<std::vector<IndexRecall>>> recalls_;  // [parts]
};

// Beyond this many tokens per head, moments wait for the ingest.
inline constexpr uint64_t kMomentsOnTheSpot = 65536;

}  // namespace prefixd
