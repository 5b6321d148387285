#include "storage/catalog/eviction.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"

namespace prefixd::storage {
namespace {

constexpr double kHalfLifeMs = 24 * 3600 * 1000.0;
constexpr double kAttentionTokens = 32768;
constexpr double kRecentSeconds = 30;

}  // namespace

float DecayedHeat(float heat, int64_t elapsed_ms) {
  const auto age = static_cast<double>(std::max<int64_t>(elapsed_ms, 0));
  return static_cast<float>(heat * std::exp2(-age / kHalfLifeMs));
}

double PrefillCost(TokenRange tokens) {
  const double begin = tokens.begin, end = tokens.end;
  return (end - begin) + (end * (end - 1) - begin * (begin - 1)) / (2 * kAttentionTokens);
}

double EvictionScore(float heat, int64_t idle_ms, TokenRange tokens, uint64_t bytes) {
  const double idle = kRecentSeconds + static_cast<double>(std::max<int64_t>(idle_ms, 0)) / 1000;
  return heat * PrefillCost(tokens) /
         (static_cast<double>(std::max<uint64_t>(bytes, 1)) * idle * idle);
}

EvictionPlan::EvictionPlan(std::vector<EvictionNode> nodes)
    : nodes_(std::move(nodes)), children_(nodes_.size()) {
  for (size_t i = 0; i < nodes_.size(); ++i) {
    index_.emplace(nodes_[i].id, i);
    tenants_[nodes_[i].tenant].bytes += nodes_[i].bytes;
    stored_ += nodes_[i].bytes;
  }
  for (const EvictionNode& node : nodes_) {
    if (const auto parent = index_.find(node.parent); parent != index_.end()) {
      ++children_[parent->second];
    }
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (children_[i] == 0) AddLeaf(i);
  }
}

void EvictionPlan::AddLeaf(size_t node) {
  const EvictionNode& n = nodes_[node];
  if (!n.held) tenants_.at(n.tenant).leaves.push({n.useless, n.score(), node});
}

bool EvictionPlan::Free(uint64_t bytes, const std::string* tenant) {
  const uint64_t goal = bytes + (tenant ? freed_of(*tenant) : freed_);
  while ((tenant ? freed_of(*tenant) : freed_) < goal) {
    Tenant* from = nullptr;
    if (tenant == nullptr) {
      from = NextToGive();
    } else if (const auto it = tenants_.find(*tenant);
               it != tenants_.end() && !it->second.leaves.empty()) {
      from = &it->second;
    }
    if (from == nullptr) return false;
    Take(*from);
  }
  return true;
}

uint64_t EvictionPlan::freed_of(const std::string& tenant) const {
  const auto it = tenants_.find(tenant);
  return it == tenants_.end() ? 0 : it->second.freed;
}

// Useless leaves go first, whichever tenant holds them; then the leaf with the lowest score of the
// tenants over their share, then of the other tenants.
EvictionPlan::Tenant* EvictionPlan::NextToGive() {
  if (tenants_.empty()) return nullptr;
  const uint64_t share = stored_ / tenants_.size();
  const auto rank = [&](const Tenant& t) {
    const Leaf& leaf = t.leaves.top();
    const int group = leaf.useless ? 0 : t.bytes > share ? 1 : 2;
    return std::pair(group, leaf.score);
  };
  Tenant* best = nullptr;
  for (auto& [name, tenant] : tenants_) {
    if (tenant.leaves.empty()) continue;
    if (best == nullptr || rank(tenant) < rank(*best)) best = &tenant;
  }
  return best;
}

void EvictionPlan::Take(Tenant& tenant) {
  const size_t node = tenant.leaves.top().node;
  tenant.leaves.pop();
  victims_.push_back(nodes_[node]);
  Drop(node);
}

void EvictionPlan::Drop(size_t node) {
  while (true) {
    const EvictionNode& n = nodes_[node];
    Tenant& tenant = tenants_.at(n.tenant);
    PREFIXD_CHECK(tenant.bytes >= n.bytes && stored_ >= n.bytes, tenant.bytes, stored_, n.bytes);
    tenant.bytes -= n.bytes;
    tenant.freed += n.bytes;
    stored_ -= n.bytes;
    freed_ += n.bytes;
    const auto parent = index_.find(n.parent);
    if (parent == index_.end() || --children_[parent->second] > 0) return;
    node = parent->second;
    if (nodes_[node].held) return;
    if (nodes_[node].named) return AddLeaf(node);
  }
}

}  // namespace prefixd::storage
