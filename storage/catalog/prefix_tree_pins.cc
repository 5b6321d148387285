// Pins chains of segments, so that readers and writers keep what they use.
#include <utility>

#include "base/check.h"
#include "storage/catalog/prefix_tree.h"

namespace prefixd::storage {

ChainPin& ChainPin::operator=(ChainPin&& other) noexcept {
  if (this != &other) {
    Release();
    tree_ = std::exchange(other.tree_, nullptr);
    chain_ = std::move(other.chain_);
    other.chain_.clear();
    used_ = std::exchange(other.used_, 0);
  }
  return *this;
}

void ChainPin::Release() {
  if (tree_ != nullptr) tree_->Unpin(chain_, used_);
  tree_ = nullptr;
  chain_.clear();
}

Result<ChainPin> PrefixTree::Pin(const SegmentId& id, uint32_t n_tokens) {
  std::lock_guard lock(mutex_);
  if (!nodes_.contains(id)) return NoPrefix(id);
  const std::vector<const Node*> chain = ChainOf(id);
  for (const Node* node : chain) {
    if (!node->quarantine.empty()) {
      return Error{Code::kCorrupt, "prefix " + id.ToString() + " needs segment " +
                                       node->record.id.ToString() +
                                       ", which is quarantined: " + node->quarantine};
    }
  }
  if (!Complete(chain)) {
    return Error{Code::kCorrupt, "prefix " + id.ToString() + " lacks the segment it continues"};
  }
  // A pin that there is no memory for must not be released: that would take the lock again.
  ChainPin pin;
  for (const Node* node : chain) pin.chain_.push_back(node->record);
  Node& last = nodes_.at(id);
  pin.used_ = n_tokens > 0 ? n_tokens : last.record.tokens.end;
  ++last.open_ends[pin.used_];
  for (const Node* node : chain) ++nodes_.at(node->record.id).pins;
  pin.tree_ = this;
  return pin;
}

Result<ChainPin> PrefixTree::PinSegment(const SegmentId& id) {
  std::lock_guard lock(mutex_);
  const auto it = nodes_.find(id);
  if (it == nodes_.end()) return NoPrefix(id);
  ChainPin pin;
  pin.chain_.push_back(it->second.record);
  ++it->second.pins;
  pin.tree_ = this;
  return pin;
}

void PrefixTree::Claim(const SegmentId& id, const std::function<void()>& wait) {
  struct Release {
    ~Release() {
      std::lock_guard lock(tree.mutex_);
      tree.claimed_.erase(place);
    }
    PrefixTree& tree;
    std::multiset<SegmentId>::iterator place;
  };
  std::unique_lock lock(mutex_);
  const Release release{*this, claimed_.insert(id)};
  lock.unlock();
  wait();
}

bool PrefixTree::Claimed(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  return claimed_.contains(id);
}

void PrefixTree::Unpin(const std::vector<SegmentRecord>& chain, uint32_t used) {
  std::lock_guard lock(mutex_);
  for (const SegmentRecord& record : chain) {
    Node& node = nodes_.at(record.id);
    PREFIXD_CHECK(node.pins > 0);
    --node.pins;
  }
  if (used == 0) return;
  std::map<uint32_t, uint32_t>& ends = nodes_.at(chain.back().id).open_ends;
  const auto end = ends.find(used);
  PREFIXD_CHECK(end != ends.end(), used);
  if (--end->second == 0) ends.erase(end);
}

}  // namespace prefixd::storage
