// Holds which segments exist and how they continue one another: the catalog's segment rows in
// memory. Pins are objects: while one lives, no segment of its chain can be removed or compacted.
//
// A segment stays while it is needed: a prompt that was put ends there (the segment is listed, or
// an alias names a place in it), or other segments continue it. It is alive, and matched, while one
// of these names has not expired; a sweep later removes what expired.
//
// Thread-safety: all methods may be called concurrently; every call is short and does no I/O,
// except for the `commit` that some take: it runs under the tree's lock, so that catalog and tree
// change together, and when it fails nothing has changed.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/memory_budget.h"
#include "storage/catalog/catalog.h"
#include "storage/catalog/tenant_bytes.h"
#include "storage/catalog/use_history.h"
#include "storage/segment/identity.h"
#include "storage/segment/records.h"

namespace prefixd::storage {

class PrefixTree;
struct EvictionNode;

struct SegmentIdHash {
  size_t operator()(const SegmentId& id) const {
    size_t h = 0;
    static_assert(sizeof(h) <= sizeof(id.bytes));
    __builtin_memcpy(&h, id.bytes.data(), sizeof(h));  // ids are random
    return h;
  }
};

// A ChainPin holds a pinned chain, root first. Move-only; must not outlive the tree.
class ChainPin {
 public:
  ChainPin() = default;
  ChainPin(ChainPin&& other) noexcept { *this = std::move(other); }
  ChainPin& operator=(ChainPin&& other) noexcept;
  ~ChainPin() { Release(); }

  const std::vector<SegmentRecord>& chain() const { return chain_; }
  bool empty() const { return chain_.empty(); }
  void Release();

 private:
  friend class PrefixTree;
  PrefixTree* tree_ = nullptr;
  std::vector<SegmentRecord> chain_;
  uint32_t used_ = 0;  // tokens of the chain; 0: no name is held
};

class PrefixTree {
 public:
  using Commit = std::function<Status()>;
  using MemoryOf = std::function<MemoryAccount(std::string_view tenant)>;

  // memory_of: where each segment's part of the tree is counted. What is stored is never refused:
  // whoever adds something takes MemoryBytes first.
  explicit PrefixTree(MemoryOf memory_of = nullptr) : memory_of_(std::move(memory_of)) {}

  // What a segment takes in memory, here and in what is kept by segment elsewhere.
  static uint64_t MemoryBytes(const SegmentRecord& record);

  struct Entry {
    CatalogSegment segment;
    BlockHash scope{};  // identity.h: separates models and tenants
    // False: the record names a wrong parent, and the tree reaches nothing through this segment.
    bool linked = true;
  };
  // REQUIRES: a linked segment's parent is in the tree.
  void Insert(const Entry& entry);
  // Returns how often a segment was inserted into this scope: a search that began and ended at one
  // count has missed none.
  uint64_t Inserted(const BlockHash& scope) const;
  // Erases the segment and the names that stand for it. kNotFound; kFailedPrecondition when the
  // segment is continued or open.
  Result<SegmentRecord> Erase(const SegmentId& id, const Commit& commit);
  Result<SegmentRecord> Record(const SegmentId& id) const;  // kNotFound
  // Replaces the record of a segment; id, parent and tokens stay. kUnavailable when the segment's
  // file is not `file` any more.
  Status Update(const SegmentRecord& record, const Uuid& file, const Commit& commit);
  // Whether nothing but the segment's whole names needs its rows, and nobody has it open: the
  // message of kFailedPrecondition names the obstacle.
  Status CheckCompressible(const SegmentId& id) const;
  bool Pinned(const SegmentId& id) const;  // false: unknown
  // Says that somebody wants the segment to itself: background readers let go of it. `wait` runs
  // meanwhile.
  void Claim(const SegmentId& id, const std::function<void()>& wait);
  bool Claimed(const SegmentId& id) const;
  bool HasChildren(const SegmentId& id) const;
  // Replaces the record as Update does, by that of a compressed segment; errors are
  // CheckCompressible's, too.
  Status Compress(const SegmentRecord& record, const Uuid& file, const Commit& commit);
  // Puts `compacted` in the place of `leaf` and of its parent, which only `leaf` continues: neither
  // may be pinned or quarantined. The message of kFailedPrecondition names the obstacle.
  Status Compact(const SegmentId& leaf, const SegmentRecord& compacted,
                 std::span<const AliasRecord> aliases, const Commit& commit);
  // Returns the leaf's parent, if the two may be compacted now.
  Result<SegmentRecord> CompactParent(const SegmentId& leaf) const;
  // Returns unlisted segments that nothing continues, names or holds.
  std::vector<SegmentId> Unneeded() const;

  // Aliases are names that outlived their segments.
  void InsertAlias(const AliasRecord& alias);
  // kNotFound; kFailedPrecondition while no more than the alias's tokens of its segment are open.
  Result<AliasRecord> EraseAlias(const SegmentId& id, const Commit& commit);
  Status UpdateAlias(const AliasRecord& alias, const Commit& commit);  // kNotFound
  std::vector<AliasRecord> Aliases() const;
  std::vector<AliasRecord> AliasesInto(const SegmentId& segment) const;
  // Returns the segment that a prefix's name stands for, and the prefix's length (0: the whole
  // segment).
  std::pair<SegmentId, uint32_t> Resolve(const SegmentId& id) const;
  // n_tokens: how many of the chain's tokens are used, at most (0: all); names for as many stay.
  // Errors: kNotFound, or kCorrupt when a segment of the chain is quarantined.
  Result<ChainPin> Pin(const SegmentId& id, uint32_t n_tokens = 0);
  // Pins like Pin, but the segment alone, quarantined or not.
  Result<ChainPin> PinSegment(const SegmentId& id);
  // Returns whether an unexpired name needs the segment: its own name, or one of a segment that
  // continues it.
  bool Alive(const SegmentId& id, int64_t now_unix_ms) const;
  // Returns false for segments that are unknown or not alive, and when any segment of the chain is
  // quarantined or not accepted.
  bool Usable(const SegmentId& id, int64_t now_unix_ms, const Acceptance& accept = {}) const;
  // Returns the expired names of segments and aliases.
  std::vector<SegmentId> ExpiredNames(int64_t now_unix_ms) const;

  // Returns the segments that branch off `parent` at token position `begin` with this token.
  std::vector<SegmentId> ChildrenOf(const SegmentId& parent, uint32_t begin, uint32_t token) const;
  // A Root is a segment that begins at 0 with the prompt's first token.
  struct Root {
    SegmentId id;
    uint32_t at_most = 0;  // an upper bound of the prompt's tokens that can match in it or below it
  };
  // Returns up to `limit` roots behind the first `skip` (of leads as LeadOf makes them), in
  // descending order of at_most but for a few that come first: what begins like the prompt is found
  // without a look at all others.
  std::vector<Root> Roots(const BlockHash& scope, std::span<const uint32_t> tokens, size_t skip,
                          size_t limit) const;

  // An empty reason lifts the quarantine. False when the segment is unknown or nothing changed.
  bool SetQuarantine(const SegmentId& id, const std::string& reason);
  struct Use {
    SegmentId id;
    float heat = 0;
  };
  // Counts a use of the segment, and so of the chain that it ends. Returns the segments whose last
  // recorded use is at least `step_ms` ago, so that the caller stores only those.
  std::vector<Use> Touch(const SegmentId& id, int64_t unix_ms, int64_t step_ms);

  // Returns the segment whose last verification is the longest ago, and when that was.
  std::optional<std::pair<SegmentRecord, int64_t>> LeastRecentlyVerified() const;
  // Returns false when the segment is unknown.
  bool SetVerified(const SegmentId& id, int64_t unix_ms);

  // Describes a segment or an alias. own_bytes is the size of the segment file; the caller adds
  // blobs.
  Result<PrefixInfo> Info(const SegmentId& id) const;
  std::optional<std::string> TenantOf(const SegmentId& id) const;  // nullopt: the id is unknown
  std::vector<SegmentRecord> Records() const;
  // Returns up to `limit` ids of segments and aliases, listed or not, in the order of tenant and
  // id, behind the given place; `one_tenant`: of this tenant alone.
  struct Place {
    std::string tenant;
    SegmentId id;
  };
  std::vector<Place> IdsAfter(const Place& place, size_t limit, bool one_tenant) const;
  uint64_t SegmentsOf(std::string_view model) const;
  // Returns the segments that a prefix's name needs, root first; none when the name is unknown.
  std::vector<SegmentRecord> Chain(const SegmentId& id) const;
  // Returns a snapshot for the eviction; `bytes` is the size of the segment files.
  std::vector<EvictionNode> EvictionNodes(int64_t now_unix_ms) const;
  TenantBytes Usage() const;  // bytes of the segment files
  uint64_t file_bytes() const;
  size_t size() const;

 private:
  friend class ChainPin;
  struct Node {
    SegmentRecord record;
    BlockHash scope{};
    std::string quarantine;
    int64_t last_used_unix_ms = 0, last_recorded_unix_ms = 0;
    float heat = 0;  // at the time of the last use
    uint32_t pins = 0, children = 0;
    bool linked = true;
    std::set<SegmentId> aliases;
    int64_t verified_unix_ms = 0;
    std::map<uint32_t, uint32_t> open_ends;  // how many pins end here, by the tokens they use
    MemoryCharge memory;
  };

  static Error NoPrefix(const SegmentId& id);
  static Error IsOpen(const SegmentId& id);
  using ChildKey = std::tuple<std::array<uint8_t, 16>, uint32_t, uint32_t>;

  // By the first tokens, as far as they are known, then by id.
  struct ByLead {
    using is_transparent = void;
    bool operator()(const SegmentRecord* a, const SegmentRecord* b) const;
    bool operator()(const SegmentRecord* a, std::span<const uint32_t> tokens) const;
    bool operator()(std::span<const uint32_t> tokens, const SegmentRecord* a) const;
  };
  // Records lie in nodes_.
  struct ScopeRoots {
    std::set<const SegmentRecord*, ByLead> by_lead;
    // Those that others continue from within their lead, or that have none.
    std::set<SegmentId> early;
  };

  static ChildKey KeyOf(const Node& node);
  // The methods below require mutex_.
  void InsertSibling(const Node& node);
  void EraseSibling(const Node& node);
  Result<Node*> CompactParentNode(const SegmentId& leaf) const;
  Status CheckUnshared(const SegmentId& id, uint32_t pins) const;
  Status UpdateNode(const SegmentRecord& record, const Uuid& file, const Commit& commit);
  void InsertNode(Node node);
  void EraseNode(const SegmentId& id);
  // The sets below that find segments and names without a look at all of them.
  void Remember(const SegmentRecord& record);
  void Forget(const SegmentRecord& record);
  void RememberExpiry(const SegmentId& name, int64_t expires_unix_ms);
  void PutAlias(const AliasRecord& alias);
  void EraseId(const std::string& tenant, const SegmentId& id);
  bool Named(const Node& node, int64_t now_unix_ms) const;
  bool AliveNode(const Node& node, int64_t now_unix_ms) const;
  // Returns the chain, root first; it stops at the first unknown or unlinked segment.
  std::vector<const Node*> ChainOf(const SegmentId& id) const;
  // Returns whether a chain reaches back to token 0.
  static bool Complete(const std::vector<const Node*>& chain);
  uint32_t MatchBound(const SegmentRecord& root, std::span<const uint32_t> tokens) const;
  void Unpin(const std::vector<SegmentRecord>& chain, uint32_t used);
  static void CountMemory(Node& node);
  // Names what the segment holds, in the history of uses; nothing where its chain is not known to
  // the end, or where nobody asks for it by its tokens.
  std::optional<uint64_t> HistoryKey(const Node& node) const;

  const MemoryOf memory_of_;
  mutable std::mutex mutex_;
  std::unordered_map<SegmentId, Node, SegmentIdHash> nodes_;
  std::map<ChildKey, std::set<SegmentId>> children_;  // of those that have a parent
  std::map<BlockHash, ScopeRoots> roots_;
  std::map<SegmentId, AliasRecord> aliases_;
  std::map<BlockHash, uint64_t> inserted_;
  std::set<std::pair<int64_t, SegmentId>> by_verified_;  // every segment, by its last verification
  // Segments that are not listed, and names that expire, by when. They may hold some that are not
  // so any more: who reads them looks again.
  std::set<SegmentId> unlisted_;
  std::set<std::pair<int64_t, SegmentId>> expiring_;
  TenantBytes usage_;
  // Ids of nodes_ and aliases_ by tenant, and the number of segments of each model.
  std::map<std::string, std::set<SegmentId>, std::less<>> ids_;
  std::map<std::string, uint64_t, std::less<>> of_model_;
  UseHistory past_uses_;  // of segments that were erased
  std::multiset<SegmentId> claimed_;
};

}  // namespace prefixd::storage
