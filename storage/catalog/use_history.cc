#include "storage/catalog/use_history.h"

#include <algorithm>

#include "storage/catalog/eviction.h"

namespace prefixd::storage {

void UseHistory::Remember(uint64_t key, PastUses uses) {
  if (uses.heat <= 0) return;
  Set& set = SetOf(key);
  const auto weight = [&](const Entry& entry) {
    const PastUses& past = entry.uses;
    return DecayedHeat(past.heat, uses.last_used_unix_ms - past.last_used_unix_ms);
  };
  auto place = std::ranges::find_if(
      set, [&](const Entry& entry) { return entry.uses.heat > 0 && entry.key == key; });
  if (place == set.end()) place = std::ranges::min_element(set, {}, weight);
  if (place->key != key && weight(*place) > uses.heat) return;
  *place = {key, uses};
}

std::optional<PastUses> UseHistory::Recall(uint64_t key) {
  Set& set = SetOf(key);
  const auto it = std::ranges::find_if(
      set, [&](const Entry& entry) { return entry.uses.heat > 0 && entry.key == key; });
  if (it == set.end()) return std::nullopt;
  const PastUses uses = it->uses;
  *it = {};
  return uses;
}

}  // namespace prefixd::storage
