#include "storage/catalog/prefix_tree.h"

#include <algorithm>
#include <new>

#include "base/check.h"
#include "storage/catalog/eviction.h"

namespace prefixd::storage {

Error PrefixTree::NoPrefix(const SegmentId& id) {
  return {Code::kNotFound, "no stored prefix " + id.ToString()};
}

Error PrefixTree::IsOpen(const SegmentId& id) {
  return {Code::kFailedPrecondition,
          "prefix " + id.ToString() + " is open; detach its readers and writers first"};
}

uint64_t PrefixTree::MemoryBytes(const SegmentRecord& record) {
  // The places in the maps and sets of the tree, of the blobs and of the runtime's queues.
  constexpr uint64_t kPlaces = 1024;
  return sizeof(Node) + kPlaces + record.model.size() + record.tenant.size() + record.label.size();
}

void PrefixTree::CountMemory(Node& node) {
  constexpr uint64_t kAliasBytes = sizeof(AliasRecord) + 256;
  node.memory.Set(MemoryBytes(node.record) + node.aliases.size() * kAliasBytes);
}

PrefixTree::ChildKey PrefixTree::KeyOf(const Node& node) {
  const SegmentRecord& r = node.record;
  return {r.parent.bytes, r.tokens.begin, r.first_token};
}

void PrefixTree::Insert(const Entry& entry) {
  std::lock_guard lock(mutex_);
  const CatalogSegment& segment = entry.segment;
  Node node{segment.record,
            entry.scope,
            segment.quarantine,
            segment.last_used_unix_ms,
            segment.last_used_unix_ms,
            segment.heat,
            0,
            0,
            entry.linked,
            {},
            segment.verified_unix_ms};
  if (const auto key = HistoryKey(node)) {
    if (const auto past = past_uses_.Recall(*key)) {
      node.heat += DecayedHeat(past->heat, node.last_used_unix_ms - past->last_used_unix_ms);
    }
  }
  InsertNode(std::move(node));
}

// Steps that may lack memory come first, and those that cannot fail last: the tree is whole however
// this ends.
void PrefixTree::InsertNode(Node node) {
  const SegmentId id = node.record.id;
  uint64_t& inserted = inserted_[node.scope];
  const auto [at, fresh] = nodes_.emplace(id, std::move(node));
  PREFIXD_CHECK(fresh);
  const SegmentRecord& record = at->second.record;
  const bool linked = at->second.linked;
  uint64_t* of_model = nullptr;
  try {
    if (linked) InsertSibling(at->second);
    by_verified_.emplace(at->second.verified_unix_ms, id);
    Remember(record);
    of_model = &of_model_[record.model];
    ids_[record.tenant].insert(id);
    if (memory_of_) at->second.memory = memory_of_(record.tenant).Charge(MemoryKind::kCatalog);
    usage_.Add(record.tenant, record.file_bytes);
  } catch (const std::bad_alloc&) {
    EraseId(record.tenant, id);
    Forget(record);
    by_verified_.erase({at->second.verified_unix_ms, id});
    if (linked) EraseSibling(at->second);
    nodes_.erase(at);
    throw;
  }
  CountMemory(at->second);
  ++inserted;
  ++*of_model;
  if (const auto parent = nodes_.find(record.parent); linked && parent != nodes_.end()) {
    ++parent->second.children;
  }
}

void PrefixTree::EraseNode(const SegmentId& id) {
  const auto it = nodes_.find(id);
  const Node& node = it->second;
  usage_.Subtract(node.record.tenant, node.record.file_bytes);
  by_verified_.erase({node.verified_unix_ms, id});
  Forget(node.record);
  for (const SegmentId& alias : node.aliases) {
    expiring_.erase({aliases_.at(alias).expires_unix_ms, alias});
    aliases_.erase(alias);
    EraseId(node.record.tenant, alias);
  }
  EraseId(node.record.tenant, id);
  const auto of_model = of_model_.find(node.record.model);
  PREFIXD_CHECK(of_model != of_model_.end() && of_model->second > 0);
  if (--of_model->second == 0) of_model_.erase(of_model);
  if (node.linked) {
    EraseSibling(node);
    const auto parent = nodes_.find(node.record.parent);
    if (parent != nodes_.end()) --parent->second.children;
  }
  nodes_.erase(it);
}

void PrefixTree::Remember(const SegmentRecord& record) {
  if (!record.listed) unlisted_.insert(record.id);
  if (record.listed) RememberExpiry(record.id, record.expires_unix_ms);
}

void PrefixTree::Forget(const SegmentRecord& record) {
  unlisted_.erase(record.id);
  expiring_.erase({record.expires_unix_ms, record.id});
}

void PrefixTree::RememberExpiry(const SegmentId& name, int64_t expires_unix_ms) {
  if (expires_unix_ms != 0) expiring_.emplace(expires_unix_ms, name);
}

Result<SegmentRecord> PrefixTree::Erase(const SegmentId& id, const Commit& commit) {
  std::lock_guard lock(mutex_);
  const auto it = nodes_.find(id);
  if (it == nodes_.end()) return NoPrefix(id);
  if (it->second.children > 0) {
    return Error{Code::kFailedPrecondition, "prefix " + id.ToString() + " is continued by " +
                                                std::to_string(it->second.children) +
                                                " others; remove those first"};
  }
  if (it->second.pins > 0) return IsOpen(id);
  // Nothing fails behind the commit.
  SegmentRecord record = it->second.record;
  const auto key = HistoryKey(it->second);
  PREFIXD_TRY(commit());
  if (key) past_uses_.Remember(*key, {it->second.heat, it->second.last_used_unix_ms});
  EraseNode(id);
  return record;
}

Result<SegmentRecord> PrefixTree::Record(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  const auto it = nodes_.find(id);
  if (it == nodes_.end()) return NoPrefix(id);
  return it->second.record;
}

Status PrefixTree::Update(const SegmentRecord& record, const Uuid& file, const Commit& commit) {
  std::lock_guard lock(mutex_);
  return UpdateNode(record, file, commit);
}

Status PrefixTree::CheckUnshared(const SegmentId& id, uint32_t pins) const {
  const auto it = nodes_.find(id);
  if (it == nodes_.end()) return NoPrefix(id);
  const Node& node = it->second;
  const auto refuse = [&](const std::string& why) {
    return Error{Code::kFailedPrecondition,
                 "prefix " + id.ToString() + " cannot be compressed: " + why};
  };
  if (node.record.compressed()) return refuse("it is compressed already");
  if (node.record.live) return refuse("it is a session's own tokens");
  if (!node.quarantine.empty()) return refuse("it is quarantined: " + node.quarantine);
  if (node.children > 0) return refuse("others continue it, and need its rows");
  for (const SegmentId& name : node.aliases) {
    const auto alias = aliases_.find(name);
    if (alias == aliases_.end() || alias->second.n_tokens == node.record.tokens.end) continue;
    return refuse("the shorter prefix " + name.ToString() + " ends in it; remove that first");
  }
  if (node.pins > pins) return refuse("it is open; detach its sessions first");
  return {};
}

Status PrefixTree::CheckCompressible(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  return CheckUnshared(id, 0);
}

bool PrefixTree::Pinned(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  const auto it = nodes_.find(id);
  return it != nodes_.end() && it->second.pins > 0;
}

bool PrefixTree::HasChildren(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  const auto it = nodes_.find(id);
  return it != nodes_.end() && it->second.children > 0;
}

Status PrefixTree::Compress(const SegmentRecord& record, const Uuid& file, const Commit& commit) {
  std::lock_guard lock(mutex_);
  PREFIXD_TRY(CheckUnshared(record.id, 0));
  return UpdateNode(record, file, commit);
}

Status PrefixTree::UpdateNode(const SegmentRecord& record, const Uuid& file, const Commit& commit) {
  const auto it = nodes_.find(record.id);
  if (it == nodes_.end()) return NoPrefix(record.id);
  SegmentRecord& known = it->second.record;
  if (known.file != file) {
    return Error{Code::kUnavailable,
                 "segment " + record.id.ToString() + " was rewritten meanwhile"};
  }
  PREFIXD_CHECK(known.parent == record.parent && known.tokens == record.tokens, known.tokens.begin,
                known.tokens.end, record.tokens.begin, record.tokens.end);
  Remember(record);
  if (Status committed = commit(); !committed.ok()) {
    if (known.expires_unix_ms != record.expires_unix_ms) {
      expiring_.erase({record.expires_unix_ms, record.id});
    }
    return committed;
  }
  usage_.Subtract(known.tenant, known.file_bytes);
  usage_.Add(record.tenant, record.file_bytes);
  if (known.expires_unix_ms != record.expires_unix_ms) {
    expiring_.erase({known.expires_unix_ms, known.id});
  }
  if (record.listed) unlisted_.erase(known.id);
  if (it->second.linked && known.is_root() && known.lead != record.lead) {
    auto& by_lead = roots_.at(it->second.scope).by_lead;
    auto place = by_lead.extract(&known);
    known = record;
    by_lead.insert(std::move(place));
  } else {
    known = record;
  }
  return {};
}

Result<PrefixTree::Node*> PrefixTree::CompactParentNode(const SegmentId& leaf) const {
  const auto it = nodes_.find(leaf);
  if (it == nodes_.end()) return NoPrefix(leaf);
  const auto refuse = [&](const char* why) {
    return Error{Code::kFailedPrecondition,
                 "segment " + leaf.ToString() + " cannot be compacted with its parent: " + why};
  };
  const Node& node = it->second;
  const auto parent_it = nodes_.find(node.record.parent);
  if (parent_it == nodes_.end()) return refuse("it has none");
  const Node& parent = parent_it->second;
  if (node.children > 0) return refuse("others continue it");
  if (parent.children > 1) return refuse("others continue the parent");
  if (node.record.tokens.begin != parent.record.tokens.end) {
    return refuse("it begins inside the parent");
  }
  if (node.pins > 0 || parent.pins > 0) return refuse("one of them is open");
  if (!node.quarantine.empty() || !parent.quarantine.empty()) {
    return refuse("one of them is quarantined");
  }
  return const_cast<Node*>(&parent);
}

Result<SegmentRecord> PrefixTree::CompactParent(const SegmentId& leaf) const {
  std::lock_guard lock(mutex_);
  PREFIXD_ASSIGN(const Node* parent, CompactParentNode(leaf));
  return parent->record;
}

Status PrefixTree::Compact(const SegmentId& leaf, const SegmentRecord& compacted,
                           std::span<const AliasRecord> aliases, const Commit& commit) {
  std::lock_guard lock(mutex_);
  PREFIXD_ASSIGN(const Node* parent, CompactParentNode(leaf));
  const Node& node = nodes_.at(leaf);
  Node joined{compacted,
              node.scope,
              "",
              std::max(node.last_used_unix_ms, parent->last_used_unix_ms),
              node.last_recorded_unix_ms,
              std::max(node.heat, parent->heat),
              0,
              0,
              true,
              {},
              std::min(node.verified_unix_ms, parent->verified_unix_ms)};
  const SegmentId parent_id = parent->record.id;
  PREFIXD_TRY(commit());
  EraseNode(leaf);
  EraseNode(parent_id);
  InsertNode(std::move(joined));
  for (const AliasRecord& alias : aliases) PutAlias(alias);
  return {};
}

std::vector<SegmentId> PrefixTree::Unneeded() const {
  std::lock_guard lock(mutex_);
  std::vector<SegmentId> out;
  for (const SegmentId& id : unlisted_) {
    const Node& node = nodes_.at(id);
    if (!node.record.listed && node.children == 0 && node.pins == 0 && node.aliases.empty()) {
      out.push_back(id);
    }
  }
  return out;
}

std::vector<const PrefixTree::Node*> PrefixTree::ChainOf(const SegmentId& id) const {
  std::vector<const Node*> chain;
  for (auto it = nodes_.find(id); it != nodes_.end(); it = nodes_.find(it->second.record.parent)) {
    chain.push_back(&it->second);
    if (it->second.record.is_root() || !it->second.linked) break;
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

bool PrefixTree::Complete(const std::vector<const Node*>& chain) {
  return !chain.empty() && chain.front()->linked && chain.front()->record.is_root();
}

bool PrefixTree::Usable(const SegmentId& id, int64_t now, const Acceptance& accept) const {
  std::lock_guard lock(mutex_);
  const std::vector<const Node*> chain = ChainOf(id);
  return Complete(chain) && AliveNode(*chain.back(), now) &&
         std::all_of(chain.begin(), chain.end(), [&](const Node* node) {
           return node->quarantine.empty() && accept.TakesSegment(node->record);
         });
}

std::vector<SegmentId> PrefixTree::ChildrenOf(const SegmentId& parent, uint32_t begin,
                                              uint32_t token) const {
  std::lock_guard lock(mutex_);
  const auto it = children_.find({parent.bytes, begin, token});
  if (it == children_.end()) return {};
  return {it->second.begin(), it->second.end()};
}

bool PrefixTree::SetQuarantine(const SegmentId& id, const std::string& reason) {
  std::lock_guard lock(mutex_);
  const auto it = nodes_.find(id);
  if (it == nodes_.end() || it->second.quarantine == reason) return false;
  it->second.quarantine = reason;
  return true;
}

TenantBytes PrefixTree::Usage() const {
  std::lock_guard lock(mutex_);
  return usage_;
}

std::optional<std::pair<SegmentRecord, int64_t>> PrefixTree::LeastRecentlyVerified() const {
  std::lock_guard lock(mutex_);
  if (by_verified_.empty()) return std::nullopt;
  const auto& [verified, id] = *by_verified_.begin();
  return std::pair(nodes_.at(id).record, verified);
}

bool PrefixTree::SetVerified(const SegmentId& id, int64_t unix_ms) {
  std::lock_guard lock(mutex_);
  const auto it = nodes_.find(id);
  if (it == nodes_.end()) return false;
  auto place = by_verified_.extract({it->second.verified_unix_ms, id});
  it->second.verified_unix_ms = unix_ms;
  place.value().first = unix_ms;
  by_verified_.insert(std::move(place));
  return true;
}

std::optional<std::string> PrefixTree::TenantOf(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  const auto alias = aliases_.find(id);
  const auto it = nodes_.find(alias == aliases_.end() ? id : alias->second.segment);
  if (it == nodes_.end()) return std::nullopt;
  return it->second.record.tenant;
}

Result<PrefixInfo> PrefixTree::Info(const SegmentId& id) const {
  std::lock_guard lock(mutex_);
  const auto alias = aliases_.find(id);
  const auto it = nodes_.find(alias == aliases_.end() ? id : alias->second.segment);
  if (it == nodes_.end()) return NoPrefix(id);
  const Node& node = it->second;
  PrefixInfo info;
  info.id = id;
  info.model = node.record.model;
  info.tenant = node.record.tenant;
  info.label = node.record.label;
  info.n_tokens = node.record.tokens.end;
  info.file = node.record.file;
  info.own_tokens = node.record.tokens.size();
  info.own_bytes = node.record.file_bytes;
  info.children = node.children;
  info.created_unix_ms = node.record.created_unix_ms;
  info.last_used_unix_ms = node.last_used_unix_ms;
  info.listed = node.record.listed;
  info.reclustered = node.record.reclustered;
  info.encoding = node.record.encoding;
  info.encoding_error = node.record.encoding_error;
  info.pinned = node.record.pinned;
  info.expires_unix_ms = node.record.expires_unix_ms;
  info.live = node.record.live;
  info.kept_rows = node.record.kept_rows;
  info.full_bytes = node.record.full_bytes;
  info.file_bytes = node.record.file_bytes;
  if (alias != aliases_.end()) {
    info.listed = true;
    info.label = alias->second.label;
    info.n_tokens = alias->second.n_tokens;
    info.created_unix_ms = alias->second.created_unix_ms;
    info.pinned = alias->second.pinned;
    info.expires_unix_ms = alias->second.expires_unix_ms;
  }
  const std::vector<const Node*> chain = ChainOf(node.record.id);
  if (!Complete(chain)) {
    info.quarantine =
        "segment " + chain.front()->record.id.ToString() + " lacks the segment it continues";
  }
  info.exact_tokens = info.n_tokens;
  for (const Node* link : chain) {
    info.chain.push_back(link->record.id);
    if (link->record.lineage != Lineage{}) {
      info.exact_tokens = std::min(info.exact_tokens, link->record.tokens.begin);
      info.lineage = link->record.lineage;
    }
    if (!link->quarantine.empty() && info.quarantine.empty()) info.quarantine = link->quarantine;
  }
  info.quarantined = !info.quarantine.empty();
  return info;
}

std::vector<SegmentRecord> PrefixTree::Records() const {
  std::lock_guard lock(mutex_);
  std::vector<SegmentRecord> records;
  for (const auto& [id, node] : nodes_) records.push_back(node.record);
  std::sort(records.begin(), records.end(),
            [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
  return records;
}

uint64_t PrefixTree::file_bytes() const {
  std::lock_guard lock(mutex_);
  return usage_.total();
}

size_t PrefixTree::size() const {
  std::lock_guard lock(mutex_);
  return nodes_.size();
}

}  // namespace prefixd::storage
