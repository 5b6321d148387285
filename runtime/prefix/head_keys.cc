#include "runtime/prefix/head_keys.h"

#include <cstring>

#include "base/check.h"

namespace prefixd {

Result<HeadKeys> HeadKeys::Of(PreparedPrefix& prefix, size_t head, Bring bring,
                              storage::ReadStats* reads) {
  HeadKeys keys(prefix, head, reads);
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

Status HeadKeys::Gather(std::span<const uint32_t> ids, std::span<std::byte> out) {
  const size_t stride = prefix_->row(head_).key_bytes();
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
  if (!resident_ && ranged_ > prefix_->partition().mid.size() / 4) {
    PREFIXD_ASSIGN(resident_, prefix_->MidKeys(head_, Bring::kNow, reads_));
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
  return prefixd::RunEnd(prefix_->stored().parts(), begin, max_tokens);
}

}  // namespace prefixd
