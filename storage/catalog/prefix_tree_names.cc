// Implements aliases: names whose own segment is gone and that stand for a part of another one.
#include <cassert>
#include <utility>

#include "storage/catalog/prefix_tree.h"

namespace prefixd::storage {

void PrefixTree::PutAlias(const AliasRecord& alias) {
  RememberExpiry(alias.id, alias.expires_unix_ms);
  aliases_[alias.id] = alias;
  if (const auto it = nodes_.find(alias.segment); it != nodes_.end()) {
    it->second.aliases.insert(alias.id);
    CountMemory(it->second);
    ids_[it->second.record.tenant].insert(alias.id);
  }
}

void PrefixTree::EraseId(const std::string& tenant, const SegmentId& id) {
  const auto it = ids_.find(tenant);
  if (it == ids_.end()) return;
  it->second.erase(id);
  if (it->second.empty()) ids_.erase(it);
}

void PrefixTree::InsertAlias(const AliasRecord& alias) {
  std::lock_guard lock(mutex_);
  PutAlias(alias);
}

Status PrefixTree::UpdateAlias(const AliasRecord& alias, const Commit& commit) {
  std::lock_guard lock(mutex_);
  const auto it = aliases_.find(alias.id);
  if (it == aliases_.end()) return NoPrefix(alias.id);
  assert(it->second.segment == alias.segment);
  RememberExpiry(alias.id, alias.expires_unix_ms);
  PREFIXD_TRY(commit());
  if (it->second.expires_unix_ms != alias.expires_unix_ms) {
    expiring_.erase({it->second.expires_unix_ms, alias.id});
  }
  it->second = alias;
  return {};
}

Result<AliasRecord> PrefixTree::EraseAlias(const SegmentId& id, const Commit& commit) {
  std::lock_guard lock(mutex_);
  const auto it = aliases_.find(id);
  if (it == aliases_.end()) return NoPrefix(id);
  if (const auto node = nodes_.find(it->second.segment); node != nodes_.end()) {
    const auto& open = node->second.open_ends;
    if (!open.empty() && open.begin()->first <= it->second.n_tokens) return IsOpen(id);
  }
  PREFIXD_TRY(commit());
  AliasRecord alias = std::move(it->second);
  aliases_.erase(it);
  expiring_.erase({alias.expires_unix_ms, id});
  if (const auto node = nodes_.find(alias.segment); node != nodes_.end()) {
    node->second.aliases.erase(id);
    CountMemory(node->second);
    EraseId(node->second.record.tenant, id);
  }
  return alias;
}

std::vector<AliasRecord> PrefixTree::Aliases() const {
  std::lock_guard lock(mutex_);
  std::vector<AliasRecord> out;
  for (const auto& [id, alias] : aliases_) out.push_back(alias);
  return out;
}

std::vector<PrefixTree::Place> PrefixTree::IdsAfter(const Place& place, size_t limit,
                                                    bool one_tenant) const {
  std::lock_guard lock(mutex_);
  std::vector<Place> out;
  for (auto it = ids_.lower_bound(place.tenant); it != ids_.end(); ++it) {
    const auto& [tenant, ids] = *it;
    if (one_tenant && tenant != place.tenant) break;
    for (auto id = tenant == place.tenant ? ids.upper_bound(place.id) : ids.begin();
         id != ids.end() && out.size() < limit; ++id) {
      out.push_back({tenant, *id});
    }
    if (out.size() == limit) break;
  }
  return out;
}

uint64_t PrefixTree::SegmentsOf(std::string_view model) const {
  std::lock_guard lock(mutex_);
  const auto it = of_model_.find(model);
  return it == of_model_.end() ? 0 : it->second;
}

std::vector<AliasRecord> PrefixTree::AliasesInto(const SegmentId& segment) const {
  std::lock_guard lock(mutex_);
  std::vector<AliasRecord> out;
  if (const auto it = nodes_.find(segment); it != nodes_.end()) {
    for (const SegmentId& id : it->second.aliases) out.push_back(aliases_.at(id));
  }
  return out;
}

std::pair<SegmentId, uint32_t> PrefixTree::Resolve(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  const auto it = aliases_.find(id);
  if (it == aliases_.end()) return {id, 0};
  return {it->second.segment, it->second.n_tokens};
}

std::vector<SegmentRecord> PrefixTree::Chain(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  const auto alias = aliases_.find(id);
  std::vector<SegmentRecord> records;
  for (const Node* node : ChainOf(alias == aliases_.end() ? id : alias->second.segment)) {
    records.push_back(node->record);
  }
  return records;
}

}  // namespace prefixd::storage
