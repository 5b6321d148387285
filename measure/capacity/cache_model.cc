#include "measure/capacity/cache_model.h"

#include <algorithm>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <queue>
#include <set>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/check.h"
#include "storage/catalog/eviction.h"
#include "storage/catalog/use_history.h"

namespace prefixd::bench {
namespace {

struct Block {
  uint64_t parent = 0;
  TokenRange tokens;  // in its prompt
  bool root = true;
  uint32_t children = 0;
  uint64_t request = 0;  // the last one that used it
};
using BlockMap = std::unordered_map<uint64_t, Block>;

// Decides which block goes. A block may go when it has no children and the running request does not
// use it.
class Policy {
 public:
  explicit Policy(const BlockMap& blocks) : blocks_(blocks) {}
  virtual ~Policy() = default;
  virtual void Use(uint64_t id, int64_t now_ms, bool fresh) = 0;
  // One that may go, or nothing; it goes with this call.
  virtual std::optional<uint64_t> Choose(int64_t now_ms, uint64_t request) = 0;

 protected:
  bool MayGo(uint64_t id, uint64_t request) const {
    const Block& block = blocks_.at(id);
    return block.children == 0 && block.request != request;
  }
  const BlockMap& blocks_;
};

// LRU, LFU and GDSF: each block has a key that changes only with its uses.
class ByKey : public Policy {
 public:
  ByKey(const BlockMap& blocks, Eviction eviction) : Policy(blocks), eviction_(eviction) {}

  void Use(uint64_t id, int64_t, bool fresh) override {
    Entry& entry = entries_[id];
    if (!fresh) order_.erase({entry.key, entry.stamp, id});
    ++entry.uses;
    // Of one request the last block was used first: it goes before those that it continues.
    const uint64_t request = blocks_.at(id).request;
    entry.stamp = request * kPerRequest - blocks_.at(id).tokens.begin / 16;
    entry.key = eviction_ == Eviction::kLru   ? 0
                : eviction_ == Eviction::kLfu ? double(entry.uses)
                                              : went_ + double(entry.uses);
    order_.insert({entry.key, entry.stamp, id});
  }

  std::optional<uint64_t> Choose(int64_t, uint64_t request) override {
    for (auto it = order_.begin(); it != order_.end(); ++it) {
      const auto [key, stamp, id] = *it;
      if (!MayGo(id, request)) continue;
      went_ = std::max(went_, key);
      order_.erase(it);
      entries_.erase(id);
      return id;
    }
    return std::nullopt;
  }

 private:
  static constexpr uint64_t kPerRequest = uint64_t{1} << 24;
  struct Entry {
    double key = 0;
    uint64_t stamp = 0, uses = 0;
  };
  const Eviction eviction_;
  double went_ = 0;  // GDSF's age of the cache
  std::unordered_map<uint64_t, Entry> entries_;
  std::set<std::tuple<double, uint64_t, uint64_t>> order_;  // the first goes first
};

// S3-FIFO: new blocks enter a small queue; those used again while in it, or remembered from it,
// come into the main queue, where each use but three at most gives another round.
class S3Fifo : public Policy {
 public:
  S3Fifo(const BlockMap& blocks, uint64_t capacity)
      : Policy(blocks), capacity_(capacity), small_size_(std::max<uint64_t>(1, capacity / 10)) {}

  void Use(uint64_t id, int64_t, bool fresh) override {
    if (!fresh) {
      uint8_t& uses = uses_.at(id);
      uses = std::min<uint8_t>(3, uses + 1);
      return;
    }
    uses_[id] = 0;
    if (Forget(id)) return main_.push_front(id);
    small_.push_front(id);
    small_tokens_ += Tokens(id);
  }

  std::optional<uint64_t> Choose(int64_t, uint64_t request) override {
    // Blocks that may not go move to the main queue, or round in it, so this ends.
    const size_t rounds = 5 * (small_.size() + main_.size()) + 1;
    for (size_t i = 0; i < rounds && !(small_.empty() && main_.empty()); ++i) {
      const bool from_small = small_tokens_ >= small_size_ || main_.empty();
      std::list<uint64_t>& queue = from_small ? small_ : main_;
      const uint64_t id = queue.back();
      queue.pop_back();
      if (from_small) small_tokens_ -= Tokens(id);
      uint8_t& uses = uses_.at(id);
      if (uses > (from_small ? 1 : 0) || !MayGo(id, request)) {
        uses = from_small || uses == 0 ? 0 : uses - 1;
        main_.push_front(id);
        continue;
      }
      if (from_small) Remember(id);
      uses_.erase(id);
      return id;
    }
    return std::nullopt;
  }

 private:
  struct Ghost {
    uint64_t id = 0, tokens = 0;
  };

  uint64_t Tokens(uint64_t id) const { return blocks_.at(id).tokens.size(); }

  // As many tokens are remembered as the cache holds; the oldest are forgotten.
  void Remember(uint64_t id) {
    ghosts_.push_front({id, Tokens(id)});
    remembered_[id] = ghosts_.begin();
    ghost_tokens_ += ghosts_.front().tokens;
    while (ghost_tokens_ > capacity_) Forget(uint64_t{ghosts_.back().id});
  }

  // What comes back is remembered no longer, so that it must earn its place again.
  bool Forget(uint64_t id) {
    const auto at = remembered_.find(id);
    if (at == remembered_.end()) return false;
    ghost_tokens_ -= at->second->tokens;
    ghosts_.erase(at->second);
    remembered_.erase(at);
    return true;
  }

  const uint64_t capacity_, small_size_;
  uint64_t small_tokens_ = 0, ghost_tokens_ = 0;
  std::list<uint64_t> small_, main_;
  std::list<Ghost> ghosts_;
  std::unordered_map<uint64_t, std::list<Ghost>::iterator> remembered_;
  std::unordered_map<uint64_t, uint8_t> uses_;
};

// The store's score changes as time passes. A 32nd of the cache is chosen at a time, as a store
// makes headroom; blocks that were used meanwhile stay.
class ByScore : public Policy {
 public:
  ByScore(const BlockMap& blocks, uint64_t capacity)
      : Policy(blocks), batch_(std::max<uint64_t>(1, capacity / 32)) {}

  void Use(uint64_t id, int64_t now_ms, bool fresh) override {
    Entry& entry = entries_[id];
    if (fresh) {
      const auto past = past_uses_.Recall(id).value_or(storage::PastUses{0, now_ms});
      entry.heat = past.heat;
      entry.used_ms = past.last_used_unix_ms;
    }
    entry.heat = storage::DecayedHeat(entry.heat, now_ms - entry.used_ms) + 1;
    entry.used_ms = now_ms;
    entry.planned = false;
  }

  std::optional<uint64_t> Choose(int64_t now_ms, uint64_t request) override {
    for (bool planned = false;; planned = true) {
      while (!plan_.empty()) {
        const uint64_t id = plan_.back();
        plan_.pop_back();
        const auto it = entries_.find(id);
        if (it == entries_.end() || !it->second.planned || !MayGo(id, request)) continue;
        past_uses_.Remember(id, {it->second.heat, it->second.used_ms});
        entries_.erase(it);
        return id;
      }
      if (planned) return std::nullopt;
      Plan(now_ms, request);
    }
  }

 private:
  struct Entry {
    float heat = 0;
    int64_t used_ms = 0;
    bool planned = false;
    uint32_t children = 0;  // while planning
  };

  // What would go one after the other, the last of it first.
  void Plan(int64_t now_ms, uint64_t request) {
    using Leaf = std::pair<double, uint64_t>;
    std::priority_queue<Leaf, std::vector<Leaf>, std::greater<>> leaves;
    const auto score = [&](uint64_t id, const Entry& entry) {
      const int64_t idle = now_ms - entry.used_ms;
      const TokenRange tokens = blocks_.at(id).tokens;
      return storage::EvictionScore(storage::DecayedHeat(entry.heat, idle), idle, tokens,
                                    tokens.size());
    };
    for (auto& [id, entry] : entries_) {
      entry.planned = false;
      entry.children = blocks_.at(id).children;
      if (MayGo(id, request)) leaves.push({score(id, entry), id});
    }
    for (uint64_t tokens = 0; tokens < batch_ && !leaves.empty();) {
      const uint64_t id = leaves.top().second;
      leaves.pop();
      plan_.push_back(id);
      tokens += blocks_.at(id).tokens.size();
      entries_.at(id).planned = true;
      const Block& block = blocks_.at(id);
      if (block.root) continue;
      Entry& parent = entries_.at(block.parent);
      if (--parent.children == 0 && blocks_.at(block.parent).request != request) {
        leaves.push({score(block.parent, parent), block.parent});
      }
    }
    std::ranges::reverse(plan_);
  }

  const uint64_t batch_;
  std::unordered_map<uint64_t, Entry> entries_;
  std::vector<uint64_t> plan_;  // the last goes first
  storage::UseHistory past_uses_;
};

std::unique_ptr<Policy> MakePolicy(Eviction eviction, const BlockMap& blocks, uint64_t capacity) {
  if (eviction == Eviction::kS3Fifo) return std::make_unique<S3Fifo>(blocks, capacity);
  if (eviction == Eviction::kScore) return std::make_unique<ByScore>(blocks, capacity);
  return std::make_unique<ByKey>(blocks, eviction);
}

class BlockCache {
 public:
  BlockCache(const RequestLog& log, uint64_t capacity, Eviction eviction)
      : log_(log), capacity_(capacity) {
    if (capacity > 0) policy_ = MakePolicy(eviction, blocks_, capacity);
  }

  CacheHits Run() {
    for (const Request& request : log_.requests) Serve(request);
    return hits_;
  }

 private:
  void Serve(const Request& request) {
    ++hits_.requests;
    hits_.input_tokens += request.input_tokens;
    const size_t n = request.blocks.size();
    size_t found = 0;
    while (found < n && blocks_.contains(request.blocks[found])) ++found;
    hits_.Hit(HitTokens(request, uint64_t{found} * log_.block_tokens));
    hits_.requests_hit += found > 0;
    const auto now_ms = static_cast<int64_t>(request.seconds * 1000);
    for (size_t i = 0; i < n; ++i) {
      if (i >= found && !Add(request, i, now_ms)) break;
      blocks_.at(request.blocks[i]).request = hits_.requests;
      if (policy_) policy_->Use(request.blocks[i], now_ms, i >= found);
    }
    hits_.peak_tokens = std::max(hits_.peak_tokens, tokens_);
  }

  bool Add(const Request& request, size_t i, int64_t now_ms) {
    const uint64_t id = request.blocks[i];
    if (blocks_.contains(id)) return false;  // an id at two places of a prompt: no chain
    const auto begin = static_cast<uint32_t>(i * log_.block_tokens);
    const uint32_t end =
        std::max(begin, std::min<uint32_t>(begin + log_.block_tokens, request.input_tokens));
    Block block;
    block.tokens = {begin, end};
    if (capacity_ > 0 && block.tokens.size() > capacity_) return false;
    while (capacity_ > 0 && tokens_ + block.tokens.size() > capacity_) {
      const auto victim = policy_->Choose(now_ms, hits_.requests);
      if (!victim) return false;
      Drop(*victim);
    }
    if (i > 0) {
      block.root = false;
      block.parent = request.blocks[i - 1];
      ++blocks_.at(block.parent).children;
    }
    blocks_.emplace(id, block);
    tokens_ += block.tokens.size();
    hits_.stored_tokens += block.tokens.size();
    if (seen_.insert(id).second) hits_.distinct_tokens += block.tokens.size();
    return true;
  }

  void Drop(uint64_t id) {
    const Block block = blocks_.at(id);
    PREFIXD_CHECK(block.children == 0, id, block.children);
    blocks_.erase(id);
    tokens_ -= block.tokens.size();
    if (!block.root) --blocks_.at(block.parent).children;
  }

  const RequestLog& log_;
  const uint64_t capacity_;  // tokens
  uint64_t tokens_ = 0;      // held
  BlockMap blocks_;
  std::unique_ptr<Policy> policy_;
  CacheHits hits_;
  std::unordered_set<uint64_t> seen_;
};

}  // namespace

const char* PolicyName(Eviction eviction) {
  switch (eviction) {
    case Eviction::kLru:
      return "LRU";
    case Eviction::kLfu:
      return "LFU";
    case Eviction::kGdsf:
      return "GDSF";
    case Eviction::kS3Fifo:
      return "S3-FIFO";
    case Eviction::kScore:
      return "eviction score";
  }
  return "";
}

uint64_t HitTokens(const Request& request, uint64_t matched) {
  const uint64_t most = request.input_tokens > 0 ? request.input_tokens - 1 : 0;
  return std::min(matched, most);
}

CacheHits ReplayRequests(const RequestLog& log, uint64_t capacity_tokens, Eviction eviction) {
  return BlockCache(log, capacity_tokens, eviction).Run();
}

}  // namespace prefixd::bench
