// Which segments exist and how they continue one another: the catalog's segment rows in memory.
// Pins are objects: while one lives, no segment of its chain can be removed or merged.
//
// A segment stays while somebody needs it: a prompt that was put ends there (it is listed, or an
// alias names a place in it), or others continue it. It is alive, and matched, while one of these
// names has not expired; what expired is swept away later.
//
// Thread-safety: all methods may be called concurrently; every call is short and does no I/O, save
// the `commit` that some take: it runs under the tree's lock, so that what the catalog and the tree
// say changes at once, and when it fails nothing has changed.
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
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "storage/catalog/catalog.h"
#include "storage/segment/identity.h"
#include "storage/segment/records.h"
#include "storage/catalog/tenant_bytes.h"

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

// A pinned chain, root first. Move-only; must not outlive the tree.
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
};

class PrefixTree {
 public:
  using Commit = std::function<Status()>;

  struct Entry {
    CatalogSegment segment;
    BlockHash scope{};  // identity.h: separates models and tenants
    // False: what it says of its parent is wrong; nothing is reached through it.
    bool linked = true;
  };
  // A linked segment's parent must be there already.
  void Insert(const Entry& entry);
  // kNotFound; kFailedPrecondition when continued or open. On success it is out of the tree, and
  // with it the names that stand for it.
  Result<SegmentRecord> Erase(const SegmentId& id, const Commit& commit);
  Result<SegmentRecord> Record(const SegmentId& id) const;  // kNotFound
  // Replaces the record of a segment; id, parent and tokens stay. kUnavailable when it is not the
  // one in `file` any more.
  Status Update(const SegmentRecord& record, const Uuid& file, const Commit& commit);
  // `merged` takes the place of `leaf` and of its parent, which nothing else continues: neither may
  // be pinned or quarantined. kFailedPrecondition says what stands in the way.
  Status Merge(const SegmentId& leaf, const SegmentRecord& merged,
               std::span<const AliasRecord> aliases, const Commit& commit);
  // The leaf's parent, if the two may be merged now.
  Result<SegmentRecord> MergeParent(const SegmentId& leaf) const;
  // Unlisted segments that nothing continues, names or holds.
  std::vector<SegmentId> Unneeded() const;

  // Names that outlived their segments.
  void InsertAlias(const AliasRecord& alias);
  Result<AliasRecord> EraseAlias(const SegmentId& id, const Commit& commit);  // kNotFound
  Status UpdateAlias(const AliasRecord& alias, const Commit& commit);         // kNotFound
  std::vector<AliasRecord> Aliases() const;
  std::vector<AliasRecord> AliasesInto(const SegmentId& segment) const;
  // The segment that a prefix's name stands for, and its length (0: all of it).
  std::pair<SegmentId, uint32_t> Resolve(const SegmentId& id) const;
  // kNotFound, or kCorrupt when a segment of the chain is quarantined.
  Result<ChainPin> Pin(const SegmentId& id);
  // As Pin, for the segment alone, quarantined or not.
  Result<ChainPin> PinSegment(const SegmentId& id);
  // Whether a name that has not expired needs the segment: its own, or of what continues it.
  bool Alive(const SegmentId& id, int64_t now_unix_ms) const;
  // False for segments that are unknown or not alive, and when any of the chain is quarantined.
  bool Usable(const SegmentId& id, int64_t now_unix_ms) const;
  // Names whose time is over, of segments and aliases.
  std::vector<SegmentId> ExpiredNames(int64_t now_unix_ms) const;

  // Segments that branch off `parent` at token position `begin` with this token.
  std::vector<SegmentId> ChildrenOf(const SegmentId& parent, uint32_t begin, uint32_t token) const;
  // Segments that begin at 0 with the prompt's first token, the most promising first.
  struct Root {
    SegmentId id;
    uint32_t at_most = 0;  // no more of the prompt's tokens can match in it or below it
  };
  std::vector<Root> Roots(const BlockHash& scope, std::span<const uint32_t> tokens) const;

  // An empty reason lifts it. False when the segment is unknown or nothing changed.
  bool SetQuarantine(const SegmentId& id, const std::string& reason);
  struct Use {
    SegmentId id;
    float heat = 0;
  };
  // A use of the segment, and so of the chain that it ends. Returns those whose last recorded use
  // is at least `step_ms` ago: worth writing down.
  std::vector<Use> Touch(const SegmentId& id, int64_t unix_ms, int64_t step_ms);

  // The segment whose last verification is the longest ago, and when that was.
  std::optional<std::pair<SegmentRecord, int64_t>> LeastRecentlyVerified() const;
  // False when the segment is unknown.
  bool SetVerified(const SegmentId& id, int64_t unix_ms);

  // Of a segment or an alias. own_bytes is that of the segment file; the caller adds blobs.
  Result<PrefixInfo> Info(const SegmentId& id) const;
  std::vector<SegmentRecord> Records() const;
  // Everything as the eviction sees it now; `bytes` is that of the segment files.
  std::vector<EvictionNode> EvictionNodes(int64_t now_unix_ms) const;
  TenantBytes Usage() const;  // of the segment files
  uint64_t file_bytes() const;
  size_t size() const;

 private:
  friend class ChainPin;
  struct Node {
    SegmentRecord record;
    BlockHash scope{};
    std::string quarantine;
    int64_t last_used_unix_ms = 0, last_recorded_unix_ms = 0;
    float heat = 0;  // as of the last use
    uint32_t pins = 0, children = 0;
    bool linked = true;
    std::set<SegmentId> aliases;
    int64_t verified_unix_ms = 0;
  };

  static Error NoPrefix(const SegmentId& id);
  using ChildKey = std::tuple<std::array<uint8_t, 16>, uint32_t, uint32_t>;

  static ChildKey KeyOf(const Node& node);
  // All need mutex_.
  Result<Node*> MergeParentNode(const SegmentId& leaf) const;
  void InsertNode(Node node);
  void EraseNode(const SegmentId& id);
  void PutAlias(const AliasRecord& alias);
  bool Named(const Node& node, int64_t now_unix_ms) const;
  bool AliveNode(const Node& node, int64_t now_unix_ms) const;
  // Root first; stops at the first unknown or unlinked segment.
  std::vector<const Node*> ChainOf(const SegmentId& id) const;
  // Whether a chain reaches back to token 0.
  static bool Complete(const std::vector<const Node*>& chain);
  uint32_t MatchBound(const SegmentRecord& root, std::span<const uint32_t> tokens) const;
  void Unpin(const std::vector<SegmentRecord>& chain);

  mutable std::mutex mutex_;
  std::unordered_map<SegmentId, Node, SegmentIdHash> nodes_;
  std::map<ChildKey, std::set<SegmentId>> children_;
  std::map<SegmentId, AliasRecord> aliases_;
  TenantBytes usage_;
};

}  // namespace prefixd::storage
