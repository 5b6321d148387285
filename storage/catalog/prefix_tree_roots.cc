// Finds the segments that a prompt may begin with: of thousands that share a first token or a
// chat's header, those that begin like the prompt for longest.
#include <algorithm>

#include "storage/catalog/prefix_tree.h"

namespace prefixd::storage {

namespace {

using Tokens = std::span<const uint32_t>;

bool Before(Tokens a, Tokens b) {
  return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
}

uint32_t Common(Tokens a, Tokens b) {
  const auto n = static_cast<ptrdiff_t>(std::min(a.size(), b.size()));
  return static_cast<uint32_t>(std::mismatch(a.begin(), a.begin() + n, b.begin()).first -
                               a.begin());
}

}  // namespace

bool PrefixTree::ByLead::operator()(const SegmentRecord* a, const SegmentRecord* b) const {
  if (a->lead != b->lead) return Before(a->lead, b->lead);
  return a->id < b->id;
}
bool PrefixTree::ByLead::operator()(const SegmentRecord* a, Tokens tokens) const {
  return Before(a->lead, tokens);
}
bool PrefixTree::ByLead::operator()(Tokens tokens, const SegmentRecord* a) const {
  return Before(tokens, a->lead);
}

void PrefixTree::InsertSibling(const Node& node) {
  const SegmentRecord& record = node.record;
  if (record.is_root()) {
    ScopeRoots& roots = roots_[node.scope];
    roots.by_lead.insert(&record);
    if (record.lead.empty()) roots.early.insert(record.id);
    return;
  }
  children_[KeyOf(node)].insert(record.id);
  const auto parent = nodes_.find(record.parent);
  if (parent == nodes_.end() || !parent->second.linked) return;
  const SegmentRecord& continued = parent->second.record;
  const size_t known = continued.lead.size();
  const bool whole = known == continued.tokens.end;
  if (continued.is_root() && record.tokens.begin < known + (whole ? 1 : 0)) {
    roots_[parent->second.scope].early.insert(continued.id);
  }
}

void PrefixTree::EraseSibling(const Node& node) {
  const SegmentRecord& record = node.record;
  if (!record.is_root()) {
    const auto siblings = children_.find(KeyOf(node));
    if (siblings == children_.end()) return;
    siblings->second.erase(record.id);
    if (siblings->second.empty()) children_.erase(siblings);
    return;
  }
  const auto roots = roots_.find(node.scope);
  if (roots == roots_.end()) return;
  roots->second.by_lead.erase(&record);
  roots->second.early.erase(record.id);
  if (roots->second.by_lead.empty() && roots->second.early.empty()) roots_.erase(roots);
}

uint32_t PrefixTree::MatchBound(const SegmentRecord& root, Tokens tokens) const {
  const auto all = static_cast<uint32_t>(tokens.size());
  const uint32_t common = Common(root.lead, tokens);
  const bool ends_here = common < root.lead.size() || root.lead.size() == root.tokens.size();
  if (!ends_here) return all;
  // Segments that branch off inside the common part may continue the prompt.
  const auto child = children_.lower_bound({root.id.bytes, 0, 0});
  const bool branches = child != children_.end() && std::get<0>(child->first) == root.id.bytes &&
                        std::get<1>(child->first) <= common;
  return branches ? all : common;
}

// In the order of leads, common beginnings grow shorter in both directions from where the prompt
// itself would lie.
std::vector<PrefixTree::Root> PrefixTree::Roots(const BlockHash& scope, Tokens tokens, size_t skip,
                                                size_t limit) const {
  std::lock_guard lock(mutex_);
  std::vector<Root> out;
  const auto it = roots_.find(scope);
  if (it == roots_.end()) return out;
  const auto& [by_lead, early] = it->second;
  if (skip == 0) {
    for (const SegmentId& id : early) {
      const SegmentRecord& root = nodes_.at(id).record;
      if (root.first_token == tokens.front()) out.push_back({id, MatchBound(root, tokens)});
    }
  }
  const auto middle = by_lead.lower_bound(tokens);
  const auto common = [&](const SegmentRecord* root) { return Common(root->lead, tokens); };
  auto below = middle, above = middle;
  for (size_t n = 0; n < skip + limit; ++n) {
    const uint32_t low = below == by_lead.begin() ? 0 : common(*std::prev(below));
    const uint32_t high = above == by_lead.end() ? 0 : common(*above);
    if (low == 0 && high == 0) break;
    const SegmentRecord& root = low >= high ? **--below : **above++;
    if (n >= skip) out.push_back({root.id, MatchBound(root, tokens)});
  }
  return out;
}

}  // namespace prefixd::storage
