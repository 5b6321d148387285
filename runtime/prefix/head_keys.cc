#include "runtime/prefix/head_keys.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"

namespace prefixd {

Result<HeadKeys> HeadKeys::Of(PreparedPrefix& prefix, size_t head, Bring bring,
                              storage::ReadStats* reads) {
  HeadKeys keys(prefix, head, reads);
  if (prefix.compressed()) {
    PREFIXD_ASSIGN(keys.kept_, prefix.KeptMid(head));
  }
  PREFIXD_ASSIGN(keys.resident_, prefix.MidKeys(head, bring, reads));
  return keys;
}

void HeadKeys::Into(index::SearchRequest& request) {
  const RowShape row = prefix_->row(head_);
  request.first_token = prefix_->partition().mid.begin;
  if (resident_) {
    request.keys = *resident_;
    return;
  }
  request.keys.shape = {row.key_dim, 0, row.dtype};
  request.reader = this;
}

size_t HeadKeys::IndexOf(uint32_t token) const {
  if (!prefix_->compressed()) return token - prefix_->partition().mid.begin;
  return static_cast<size_t>(std::ranges::lower_bound(kept_, token) - kept_.begin());
}

TokenRange HeadKeys::Searched(TokenRange candidates) const {
  if (!prefix_->compressed()) return candidates;
  const uint32_t first = prefix_->partition().mid.begin;
  return {first + static_cast<uint32_t>(IndexOf(candidates.begin)),
          first + static_cast<uint32_t>(IndexOf(candidates.end))};
}

void HeadKeys::ToTokens(Selection& found) const {
  if (!prefix_->compressed()) return;
  for (uint32_t& id : found.ids) id = kept_[id - prefix_->partition().mid.begin];
  for (Cut& cut : found.cuts) {
    const bool all = found.ids.size() == kept_.size();
    cut = all ? Cut{} : Cut{cut.score, std::min(cut.kind, CutKind::kApproximate)};
  }
}

Status HeadKeys::Gather(std::span<const uint32_t> ids, std::span<std::byte> out) {
  const size_t stride = prefix_->row(head_).key_bytes();
  if (!resident_ && prefix_->compressed()) {
    std::vector<uint32_t> tokens;
    for (const uint32_t id : ids) tokens.push_back(kept_[id - prefix_->partition().mid.begin]);
    return prefix_->stored().ReadRows(prefix_->layer_of(head_), prefix_->kv_head_of(head_), tokens,
                                      storage::RowPart::kKey, {out, stride}, reads_);
  }
  if (!resident_) {
    return prefix_->stored().ReadRows(prefix_->layer_of(head_), prefix_->kv_head_of(head_), ids,
                                      storage::RowPart::kKey, {out, stride}, reads_);
  }
  PREFIXD_CHECK(out.size() >= ids.size() * stride, out.size(), ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    std::memcpy(out.data() + i * stride, resident_->key(ids[i] - prefix_->partition().mid.begin),
                stride);
  }
  return {};
}

Status HeadKeys::Range(TokenRange tokens, std::span<std::byte> out) {
  const size_t stride = prefix_->row(head_).key_bytes();
  ranged_ += tokens.size();
  // A search that reads a good part of the keys may as well load all of them, and keep them.
  const size_t all = prefix_->compressed() ? kept_.size() : prefix_->partition().mid.size();
  if (!resident_ && ranged_ > all / 4) {
    PREFIXD_ASSIGN(resident_, prefix_->MidKeys(head_, Bring::kNow, reads_));
  }
  if (!resident_ && prefix_->compressed()) {
    const auto of_run = kept_.subspan(tokens.begin - prefix_->partition().mid.begin, tokens.size());
    return prefix_->stored().ReadRows(prefix_->layer_of(head_), prefix_->kv_head_of(head_), of_run,
                                      storage::RowPart::kKey, {out, stride}, reads_);
  }
  if (!resident_) {
    return prefix_->stored().ReadRange(prefix_->layer_of(head_), prefix_->kv_head_of(head_), tokens,
                                       storage::RowPart::kKey, {out, stride}, reads_);
  }
  PREFIXD_CHECK(out.size() >= tokens.size() * stride, out.size(), tokens.begin, tokens.end);
  std::memcpy(out.data(), resident_->key(tokens.begin - prefix_->partition().mid.begin),
              tokens.size() * stride);
  return {};
}

uint32_t HeadKeys::RunEnd(uint32_t begin, uint32_t max_tokens) const {
  if (prefix_->compressed()) return begin + max_tokens;
  return prefixd::RunEnd(prefix_->stored().parts(), begin, max_tokens);
}

}  // namespace prefixd
