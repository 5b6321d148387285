// Which prefixes go when the store has to make room. Pure: a snapshot goes in, a plan comes out;
// nothing is removed here.
//
// The worth of a segment is the prefill that keeping it is expected to save, per byte kept:
//
//   worth = heat * cost / bytes                             [prefilled tokens per byte]
//   heat  = sum over its uses of 2^-(age / 24 h)            [recent uses]
//   cost  = sum over its tokens at positions t of 1 + t / 32768
//
// A use is an attach (or the put) of a prefix whose chain it belongs to: how often something was
// used lately is how often it is expected to be used again, and a use a day ago counts half. The
// cost is in tokens prefilled at position 0; a token at 32768 costs two of them, because there
// attention takes about as much work as the rest of a layer (8B models: 30k tokens, 1B: 18k, 70B:
// 53k). Of two prefixes used alike the longer one is therefore worth more per byte.
//
// Only leaves go: what others continue, what is open and what is pinned stays. First goes what
// nobody can be served from: quarantined or expired segments. To relieve the whole store, tenants
// that hold more than their fair share (an equal part of what is stored) give first, so that one
// tenant's flood never empties another's cache; among them the least worth.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <map>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "prefixd/partition.h"
#include "storage/catalog/prefix_tree.h"

namespace prefixd::storage {

// Uses that weighed `heat` weigh this much `elapsed_ms` later.
float DecayedHeat(float heat, int64_t elapsed_ms);
// What prefilling these positions costs, in tokens at position 0.
double PrefillCost(TokenRange tokens);

// One segment, now.
struct EvictionNode {
  SegmentId id, parent;
  std::string tenant;
  uint64_t bytes = 0;  // freed when it goes: rows and blobs
  TokenRange tokens;
  float heat = 0;
  bool named = false;    // a prefix ends in it; false: it goes with the last that continues it
  bool useless = false;  // quarantined or expired
  bool held = false;     // open, or pinned by its user

  double worth() const;
};

class EvictionPlan {
 public:
  explicit EvictionPlan(std::vector<EvictionNode> nodes);

  // Plans on until `bytes` more are free, of one tenant (or of all: null). False: there is not so
  // much to free, even with everything that may go.
  bool Free(uint64_t bytes, const std::string* tenant);
  // In this order. Unnamed segments that go with them are not listed.
  const std::vector<EvictionNode>& victims() const { return victims_; }
  uint64_t freed() const { return freed_; }
  uint64_t freed_of(const std::string& tenant) const;

 private:
  struct Leaf {
    bool useless;
    double worth;
    size_t node;
    bool operator<(const Leaf& o) const {  // the top of a priority queue goes first
      if (useless != o.useless) return !useless;
      return worth > o.worth;
    }
  };
  struct Tenant {
    uint64_t bytes = 0, freed = 0;
    std::priority_queue<Leaf> leaves;
  };

  void AddLeaf(size_t node);
  void Take(Tenant& tenant);
  void Drop(size_t node);  // and unnamed ancestors that nothing else continues
  Tenant* NextToGive();

  std::vector<EvictionNode> nodes_;
  std::vector<uint32_t> children_;
  std::unordered_map<SegmentId, size_t, SegmentIdHash> index_;
  std::map<std::string, Tenant, std::less<>> tenants_;
  std::vector<EvictionNode> victims_;
  uint64_t stored_ = 0, freed_ = 0;
};

}  // namespace prefixd::storage
