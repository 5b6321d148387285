// Implements how long the tree's segments live: names that expire, uses, eviction candidates.
#include <xxhash.h>

#include <algorithm>
#include <cstdlib>

#include "storage/catalog/eviction.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {

bool PrefixTree::Named(const Node& node, int64_t now) const {
  if (node.record.listed && !Expired(node.record.expires_unix_ms, now)) return true;
  return std::any_of(node.aliases.begin(), node.aliases.end(), [&](const SegmentId& id) {
    return !Expired(aliases_.at(id).expires_unix_ms, now);
  });
}

uint64_t PrefixTree::Inserted(const BlockHash& scope) const {
  std::lock_guard lock(mutex_);
  const auto it = inserted_.find(scope);
  return it == inserted_.end() ? 0 : it->second;
}

bool PrefixTree::AliveNode(const Node& node, int64_t now) const {
  std::vector<const Node*> open{&node};
  while (!open.empty()) {
    const Node& next = *open.back();
    open.pop_back();
    if (Named(next, now)) return true;
    if (next.children == 0) continue;
    const std::array<uint8_t, 16>& parent = next.record.id.bytes;
    for (auto it = children_.lower_bound({parent, 0, 0});
         it != children_.end() && std::get<0>(it->first) == parent; ++it) {
      for (const SegmentId& child : it->second) open.push_back(&nodes_.at(child));
    }
  }
  return false;
}

bool PrefixTree::Alive(const SegmentId& id, int64_t now) const {
  std::lock_guard lock(mutex_);
  const auto it = nodes_.find(id);
  return it != nodes_.end() && AliveNode(it->second, now);
}

std::vector<SegmentId> PrefixTree::ExpiredNames(int64_t now) const {
  std::lock_guard lock(mutex_);
  std::vector<SegmentId> out;
  for (const auto& [when, id] : expiring_) {
    if (!Expired(when, now)) break;
    const auto node = nodes_.find(id);
    const auto alias = aliases_.find(id);
    const bool of_segment = node != nodes_.end() && node->second.record.listed &&
                            node->second.record.expires_unix_ms == when;
    const bool of_alias = alias != aliases_.end() && alias->second.expires_unix_ms == when;
    if (of_segment || of_alias) out.push_back(id);
  }
  return out;
}

std::vector<PrefixTree::Use> PrefixTree::Touch(const SegmentId& id, int64_t unix_ms,
                                               int64_t step_ms) {
  std::lock_guard lock(mutex_);
  std::vector<Use> worth_recording;
  for (auto it = nodes_.find(id); it != nodes_.end(); it = nodes_.find(it->second.record.parent)) {
    Node& node = it->second;
    node.heat = DecayedHeat(node.heat, unix_ms - node.last_used_unix_ms) + 1;
    // A use that lies far ahead was noted by a clock that has been set right since.
    const auto ahead = [&](int64_t noted) { return noted > unix_ms + kClockSlackMs; };
    node.last_used_unix_ms =
        ahead(node.last_used_unix_ms) ? unix_ms : std::max(node.last_used_unix_ms, unix_ms);
    if (unix_ms - node.last_recorded_unix_ms >= step_ms || ahead(node.last_recorded_unix_ms)) {
      node.last_recorded_unix_ms = unix_ms;
      worth_recording.push_back({it->first, node.heat});
    }
    if (node.record.is_root()) break;
  }
  return worth_recording;
}

std::vector<EvictionNode> PrefixTree::EvictionNodes(int64_t now) const {
  std::lock_guard lock(mutex_);
  std::vector<EvictionNode> out;
  out.reserve(nodes_.size());
  for (const auto& [id, node] : nodes_) {
    const SegmentRecord& r = node.record;
    EvictionNode& e = out.emplace_back();
    e.id = id;
    e.parent = r.parent;
    e.tenant = r.tenant;
    e.bytes = r.file_bytes;
    e.tokens = r.tokens;
    e.idle_ms = now - node.last_used_unix_ms;
    // By how much a clock was ahead, so long at least nothing is known of a use.
    if (e.idle_ms < -kClockSlackMs) e.idle_ms = -e.idle_ms;
    e.heat = DecayedHeat(node.heat, e.idle_ms);
    e.named = r.listed || !node.aliases.empty();
    e.useless = !node.quarantine.empty() || !Named(node, now);
    e.held = node.pins > 0 || (r.listed && r.pinned) ||
             std::any_of(node.aliases.begin(), node.aliases.end(),
                         [&](const SegmentId& alias) { return aliases_.at(alias).pinned; });
  }
  return out;
}

std::optional<uint64_t> PrefixTree::HistoryKey(const Node& node) const {
  if (node.record.live || !node.linked) return std::nullopt;
  // A link's place in its chain: where it begins, and with which token.
  std::vector<std::pair<uint32_t, uint32_t>> links;
  const Node* at = &node;
  for (; !at->record.is_root(); links.emplace_back(at->record.tokens.begin, at->record.first_token),
                                at = &nodes_.at(at->record.parent)) {
    if (!at->linked || !nodes_.contains(at->record.parent)) return std::nullopt;
  }
  const std::vector<uint32_t>& lead = at->record.lead;
  if (lead.empty()) return std::nullopt;
  uint64_t key = XXH3_64bits(at->scope.data(), at->scope.size());
  key = XXH3_64bits_withSeed(lead.data(), lead.size() * sizeof(lead[0]), key);
  for (auto link = links.rbegin(); link != links.rend(); ++link) {
    key = XXH3_64bits_withSeed(&*link, sizeof(*link), key);
  }
  return key;
}

}  // namespace prefixd::storage
