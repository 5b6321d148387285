// Chooses which prefixes go when the store has to make room. The functions are pure: a snapshot
// goes in, a plan comes out; nothing is removed here.
//
// The eviction score of a segment is the prefill that keeping it is expected to save in the next
// second, per byte kept:
//
//   score = heat * cost / (bytes * (30 + idle)^2)           [prefilled tokens per byte]
//   heat  = sum over its uses of 2^-(age / 24 h)            [recent uses]
//   cost  = sum over its tokens at positions t of 1 + t / 32768
//   idle  = seconds since its last use; of two uses within half a minute neither is the older
//
// A use is an attach, a restore or a put of a prefix whose chain the segment belongs to. What was
// used often is used again, and the longer it has not been used, the less: by powers, which hold
// for seconds as for days, so no time scale has to fit the store's turnover
// (docs/decisions/048-idle-time-in-the-score.md has what was compared). The cost is in tokens
// prefilled at position 0; a token at 32768 costs two of them, because there attention takes about
// as much work as the rest of a layer (8B models: 30k tokens, 1B: 18k, 70B: 53k). Of two prefixes
// used alike the longer one therefore has the higher score.
//
// Only leaves go: segments that others continue, open and pinned segments stay. Segments that
// cannot serve anyone, quarantined or expired ones, go first. To relieve the whole store, tenants
// that hold more than their fair share (an equal part of all stored bytes) give first, so that one
// tenant's flood never empties another's cache; among their leaves the one with the lowest score
// goes first.
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

// Returns the weight, `elapsed_ms` later, of uses that weighed `heat`.
float DecayedHeat(float heat, int64_t elapsed_ms);
// Returns the cost of prefilling these positions, in tokens at position 0.
double PrefillCost(TokenRange tokens);
// `idle_ms`: since the last use; below 0 (a clock that went back) counts as 0.
double EvictionScore(float heat, int64_t idle_ms, TokenRange tokens, uint64_t bytes);

// An EvictionNode describes one segment at the moment of the snapshot.
struct EvictionNode {
  SegmentId id, parent;
  std::string tenant;
  uint64_t bytes = 0;  // bytes freed when it goes: rows and blobs
  TokenRange tokens;
  float heat = 0;
  int64_t idle_ms = 0;   // since its last use
  bool named = false;    // a prefix ends in it; false: it goes with its last continuation
  bool useless = false;  // quarantined or expired
  bool held = false;     // open, or pinned by its user

  double score() const { return EvictionScore(heat, idle_ms, tokens, bytes); }
};

class EvictionPlan {
 public:
  explicit EvictionPlan(std::vector<EvictionNode> nodes);

  // Adds victims to the plan until `bytes` more are free, in one tenant (null: in the whole store).
  // False: everything that may go frees fewer bytes.
  bool Free(uint64_t bytes, const std::string* tenant);
  // Victims in the order of eviction. Unnamed segments that go with them are not listed.
  const std::vector<EvictionNode>& victims() const { return victims_; }
  uint64_t freed() const { return freed_; }
  uint64_t freed_of(const std::string& tenant) const;

 private:
  struct Leaf {
    bool useless;
    double score;
    size_t node;
    bool operator<(const Leaf& o) const {  // the top of a priority queue goes first
      if (useless != o.useless) return !useless;
      return score > o.score;
    }
  };
  struct Tenant {
    uint64_t bytes = 0, freed = 0;
    std::priority_queue<Leaf> leaves;
  };

  void AddLeaf(size_t node);
  void Take(Tenant& tenant);
  void Drop(size_t node);  // also drops unnamed ancestors that nothing else continues
  Tenant* NextToGive();

  std::vector<EvictionNode> nodes_;
  std::vector<uint32_t> children_;
  std::unordered_map<SegmentId, size_t, SegmentIdHash> index_;
  std::map<std::string, Tenant, std::less<>> tenants_;
  std::vector<EvictionNode> victims_;
  uint64_t stored_ = 0, freed_ = 0;
};

}  // namespace prefixd::storage
