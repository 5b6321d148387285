#include "measure/capacity/cache_model.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <vector>

namespace prefixd::bench {
namespace {

constexpr double kHalfLifeSeconds = 24 * 3600;  // of a use's weight in the score

class BlockCache {
 public:
  BlockCache(const RequestLog& log, uint64_t capacity, Eviction eviction)
      : log_(log), capacity_(capacity), eviction_(eviction) {}

  CacheHits Run() {
    for (const Request& request : log_.requests) Serve(request);
    return hits_;
  }

 private:
  struct Block {
    uint64_t parent = 0, place = 0;  // place: of the block in its prompt
    bool root = true;
    uint32_t children = 0;
    // Sum of 2^(time / half-life) of its uses, as its logarithm: which of two is larger does not
    // change as time passes.
    double heat = -1e300;
    double key = 0;
  };

  void Serve(const Request& request) {
    ++hits_.requests;
    hits_.input_tokens += request.input_tokens;
    const size_t n = request.blocks.size();
    size_t found = 0;
    while (found < n && blocks_.contains(request.blocks[found])) ++found;
    const uint64_t hit =
        std::min<uint64_t>(uint64_t{found} * log_.block_tokens,
                           request.input_tokens > 0 ? request.input_tokens - 1 : 0);
    hits_.hit_tokens += hit;
    hits_.requests_hit += found > 0;
    ++clock_;
    for (size_t i = 0; i < n; ++i) {
      if (i >= found && !Add(request, i)) break;
      Touch(request.blocks[i], request.seconds, n - i);
    }
    hits_.peak_blocks = std::max<uint64_t>(hits_.peak_blocks, blocks_.size());
  }

  bool Add(const Request& request, size_t i) {
    const uint64_t id = request.blocks[i];
    if (blocks_.contains(id)) return false;  // an id at two places of a prompt: no chain
    if (capacity_ > 0) {
      // Blocks of this prompt are held by it.
      if (i > 0) Hold(request.blocks[i - 1]);
      while (blocks_.size() >= capacity_ && !leaves_.empty()) Drop(leaves_.begin()->second);
      if (blocks_.size() >= capacity_) {
        if (i > 0) Free(request.blocks[i - 1]);
        return false;
      }
    }
    Block block;
    block.place = i;
    if (i > 0) {
      block.root = false;
      block.parent = request.blocks[i - 1];
      ++blocks_.at(block.parent).children;
    }
    blocks_.emplace(id, block);
    const uint64_t begin = uint64_t{i} * log_.block_tokens;
    const uint64_t tokens = std::min<uint64_t>(
        log_.block_tokens, std::max<uint64_t>(request.input_tokens, begin) - begin);
    hits_.stored_tokens += tokens;
    if (seen_.insert(id).second) hits_.distinct_tokens += tokens;
    return true;
  }

  void Hold(uint64_t id) { leaves_.erase({blocks_.at(id).key, id}); }

  void Free(uint64_t id) {
    const Block& block = blocks_.at(id);
    if (block.children == 0) leaves_.insert({block.key, id});
  }

  // A later block of a prompt counts as a little older, so that it goes first.
  void Touch(uint64_t id, double seconds, size_t from_end) {
    Block& block = blocks_.at(id);
    leaves_.erase({block.key, id});
    if (eviction_ == Eviction::kOldest) {
      block.key = clock_ + double(from_end) * 1e-7;
    } else {
      const double use = seconds / kHalfLifeSeconds;
      const double high = std::max(use, block.heat), low = std::min(use, block.heat);
      block.heat = high + std::log2(1 + std::exp2(low - high));
      const double cost = 1 + (double(block.place) + 0.5) * log_.block_tokens / 32768;
      block.key = block.heat + std::log2(cost);
    }
    if (block.children == 0) leaves_.insert({block.key, id});
    if (!block.root) leaves_.erase({blocks_.at(block.parent).key, block.parent});
  }

  void Drop(uint64_t id) {
    const Block block = blocks_.at(id);
    leaves_.erase({block.key, id});
    blocks_.erase(id);
    if (block.root) return;
    Block& parent = blocks_.at(block.parent);
    if (--parent.children == 0) leaves_.insert({parent.key, block.parent});
  }

  const RequestLog& log_;
  const uint64_t capacity_;
  const Eviction eviction_;
  CacheHits hits_;
  double clock_ = 0;
  std::unordered_map<uint64_t, Block> blocks_;
  std::set<std::pair<double, uint64_t>> leaves_;  // least key first
  std::unordered_set<uint64_t> seen_;
};

}  // namespace

CacheHits ReplayRequests(const RequestLog& log, uint64_t capacity_blocks, Eviction eviction) {
  return BlockCache(log, capacity_blocks, eviction).Run();
}

}  // namespace prefixd::bench
