#include "runtime/step/retained_tokens.h"

#include <algorithm>
#include <cstring>

namespace prefixd {

TokenRange RetainedTokens::In(size_t head, TokenRange mid) const {
  const std::vector<uint32_t>& tokens = heads[head].tokens;
  const auto at = [&](uint32_t token) {
    return static_cast<uint32_t>(std::ranges::lower_bound(tokens, token) - tokens.begin());
  };
  return {at(mid.begin), at(mid.end)};
}

uint32_t RetainedTokens::Most(TokenRange mid) const {
  uint32_t most = 0;
  for (size_t head = 0; head < heads.size(); ++head) most = std::max(most, In(head, mid).size());
  return most;
}

void LeaveOut(std::span<const uint32_t> retained, size_t key_bytes, std::vector<uint32_t>& ids,
              std::vector<std::byte>& keys) {
  if (retained.empty() || ids.empty()) return;
  const bool with_keys = keys.size() == ids.size() * key_bytes;
  size_t left = 0, r = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    while (r < retained.size() && retained[r] < ids[i]) ++r;
    if (r < retained.size() && retained[r] == ids[i]) continue;
    if (left != i) {
      ids[left] = ids[i];
      if (with_keys) std::memcpy(&keys[left * key_bytes], &keys[i * key_bytes], key_bytes);
    }
    ++left;
  }
  ids.resize(left);
  if (with_keys) keys.resize(left * key_bytes);
}

void LeaveOut(std::span<const uint32_t> retained, std::vector<uint32_t>& ids) {
  std::vector<std::byte> no_keys;
  LeaveOut(retained, 1, ids, no_keys);
}

void JoinRetained(const RetainedHead& head, TokenRange retained, const RowShape& row,
                  const RowsView& read, std::vector<uint32_t>& ids, std::vector<RowRef>& rows) {
  const size_t n = ids.size(), all = n + retained.size();
  ids.resize(all);
  rows.resize(all);
  // From the last one on, so that ids can stay where they are.
  size_t i = n, r = retained.end;
  for (size_t to = all; to-- > 0;) {
    if (i > 0 && (r == retained.begin || ids[i - 1] > head.tokens[r - 1])) {
      --i;
      ids[to] = ids[i];
      rows[to] = {read.key(i), read.value(i)};
    } else {
      --r;
      ids[to] = head.tokens[r];
      rows[to] = head.ref(r, row);
    }
  }
}

}  // namespace prefixd
