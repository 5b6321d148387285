#include <algorithm>

#include "storage/errors.h"
#include "storage/store_core.h"

namespace prefixd::storage {
namespace {

// The rows of one segment that belong to the prefix: token positions `tokens`.
struct Link {
  std::shared_ptr<const SegmentFile> file;
  TokenRange tokens;
};

// What borrowed rows need: their region's memory, and their pages in it.
struct Hold {
  std::shared_ptr<TierRegion> region;
  std::vector<PagePins> pins;
};

class OpenPrefix final : public StoredPrefix {
 public:
  OpenPrefix(std::shared_ptr<StoreCore> core, ChainPin pin, ModelRecord model, PrefixInfo info)
      : core_(std::move(core)),
        pin_(std::move(pin)),
        model_(std::move(model)),
        info_(std::move(info)),
        tier_(core_->tier->ForTenant(info_.tenant)),
        services_(core_->services) {
    services_.tier = tier_.get();
  }

  Status Load(uint32_t n_tokens) {
    const auto& chain = pin_.chain();
    for (size_t i = 0; i < chain.size() && chain[i].tokens.begin < n_tokens; ++i) {
      const uint32_t next = i + 1 < chain.size() ? chain[i + 1].tokens.begin : chain[i].tokens.end;
      Link link{nullptr, {chain[i].tokens.begin, std::min(next, n_tokens)}};
      PREFIXD_ASSIGN(link.file, core_->OpenSegment(chain[i]));
      const auto ids = link.file->tokens().first(link.tokens.size());
      tokens_.insert(tokens_.end(), ids.begin(), ids.end());
      links_.push_back(std::move(link));
    }
    return {};
  }

  const PrefixInfo& info() const override { return info_; }
  const ModelRecord& model() const override { return model_; }
  uint32_t n_tokens() const override { return static_cast<uint32_t>(tokens_.size()); }
  std::span<const uint32_t> tokens() const override { return tokens_; }

  Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                  std::span<std::byte> out, ReadStats* stats) const override {
    PREFIXD_TRY(CheckRequest(layer, kv_head, ids.size(), out.size()));
    PREFIXD_TRY(CheckIds(ids));
    ReadStats ignored;
    size_t at = 0;
    for (const Link& link : links_) {
      const std::span<const uint32_t> own = OfLink(link, ids.subspan(at));
      std::vector<PagePiece> pieces;
      pieces.reserve(own.size());
      for (const uint32_t id : own) {
        AddRow(link, layer, kv_head, id, out.data() + at++ * row_bytes(), pieces);
      }
      if (pieces.empty()) continue;
      PREFIXD_TRY(
          ReadPieces(services_, *link.file, pieces, Access::kPoint, stats ? stats : &ignored));
    }
    return {};
  }

  Result<BorrowedRows> BorrowRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                                  ReadStats* stats) const override {
    PREFIXD_TRY(CheckRequest(layer, kv_head, ids.size(), ids.size() * row_bytes()));
    PREFIXD_TRY(CheckIds(ids));
    if (row_bytes() > kPageBytes) {
      return Error{Code::kFailedPrecondition,
                   "rows of " + std::to_string(row_bytes()) + " bytes are larger than a page of " +
                       std::to_string(kPageBytes) + " and cannot be read in place; use ReadRows"};
    }
    ReadStats ignored;
    BorrowedRows out;
    out.rows.reserve(ids.size());
    auto hold = std::make_shared<Hold>();
    hold->region = tier_;
    for (const Link& link : links_) {
      const std::span<const uint32_t> own = OfLink(link, ids.subspan(out.rows.size()));
      std::vector<PagePiece> pieces;
      pieces.reserve(own.size());
      for (const uint32_t id : own) AddRow(link, layer, kv_head, id, nullptr, pieces);
      if (pieces.empty()) continue;
      std::vector<const std::byte*> where(pieces.size());
      PREFIXD_ASSIGN(PagePins held,
                     PinPieces(services_, *link.file, pieces, where, stats ? stats : &ignored));
      hold->pins.push_back(std::move(held));
      const size_t key_bytes = model_.geometry.row().key_bytes();
      for (const std::byte* row : where) out.rows.push_back({row, row + key_bytes});
    }
    out.region_id = tier_->id();
    out.region = tier_->bytes();
    out.region_fd = tier_->memory() != nullptr ? tier_->memory()->read_only_fd() : -1;
    out.hold = std::move(hold);
    return out;
  }

  Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range, std::span<std::byte> out,
                   ReadStats* stats) const override {
    if (range.begin > range.end || range.end > n_tokens()) {
      return InvalidArgument("rows [" + std::to_string(range.begin) + ", " +
                             std::to_string(range.end) + ") of a prefix of " +
                             std::to_string(n_tokens()) + " tokens");
    }
    PREFIXD_TRY(CheckRequest(layer, kv_head, range.size(), out.size()));
    ReadStats ignored;
    for (const Link& link : links_) {
      const TokenRange part{std::max(range.begin, link.tokens.begin),
                            std::min(range.end, link.tokens.end)};
      if (part.begin >= part.end) continue;
      std::vector<PagePiece> pieces;
      AddRun(link, layer, kv_head, part, out.data() + (part.begin - range.begin) * row_bytes(),
             pieces);
      PREFIXD_TRY(
          ReadPieces(services_, *link.file, pieces, Access::kScan, stats ? stats : &ignored));
    }
    return {};
  }

 private:
  size_t row_bytes() const { return model_.geometry.row().bytes(); }

  Status CheckRequest(uint32_t layer, uint32_t kv_head, size_t rows, size_t out_bytes) const {
    const KvGeometry& g = model_.geometry;
    if (layer >= g.n_layers || kv_head >= g.n_kv_heads) {
      return InvalidArgument("layer " + std::to_string(layer) + ", KV head " +
                             std::to_string(kv_head) + " of a model with " +
                             std::to_string(g.n_layers) + " layers and " +
                             std::to_string(g.n_kv_heads) + " KV heads");
    }
    if (out_bytes != rows * row_bytes()) {
      return InvalidArgument("a buffer of " + std::to_string(out_bytes) + " bytes for " +
                             std::to_string(rows) + " rows of " + std::to_string(row_bytes()));
    }
    return {};
  }

  Status CheckIds(std::span<const uint32_t> ids) const {
    if (!std::is_sorted(ids.begin(), ids.end()) || (!ids.empty() && ids.back() >= n_tokens())) {
      return InvalidArgument("row ids must ascend and stay below " + std::to_string(n_tokens()));
    }
    return {};
  }

  // The first of `ids`, as many as lie in the link.
  static std::span<const uint32_t> OfLink(const Link& link, std::span<const uint32_t> ids) {
    const auto end = std::lower_bound(ids.begin(), ids.end(), link.tokens.end);
    return ids.first(static_cast<size_t>(end - ids.begin()));
  }

  // One row: a piece of one page, or one piece for each of a large row's pages.
  void AddRow(const Link& link, uint32_t layer, uint32_t kv_head, uint32_t token, std::byte* out,
              std::vector<PagePiece>& pieces) const {
    const SegmentLayout& l = link.file->layout();
    const uint32_t i = token - link.file->header().tokens.begin;
    uint64_t page = l.run_page(layer, kv_head) + l.row_page(i);
    uint32_t offset = l.row_offset(i);
    for (size_t left = row_bytes(); left > 0; ++page, offset = 0) {
      const auto n = static_cast<uint32_t>(std::min<size_t>(left, kPageBytes - offset));
      pieces.push_back({page, offset, n, out});
      out += n;
      left -= n;
    }
  }

  // A run of rows: one piece per page.
  void AddRun(const Link& link, uint32_t layer, uint32_t kv_head, TokenRange run, std::byte* out,
              std::vector<PagePiece>& pieces) const {
    const SegmentLayout& l = link.file->layout();
    if (l.pages_per_row > 1) {
      for (uint32_t t = run.begin; t < run.end; ++t, out += row_bytes()) {
        AddRow(link, layer, kv_head, t, out, pieces);
      }
      return;
    }
    const uint32_t first = link.file->header().tokens.begin;
    const uint64_t base = l.run_page(layer, kv_head);
    for (uint32_t i = run.begin - first, end = run.end - first; i < end;) {
      const uint32_t n = std::min(end - i, l.rows_per_page - i % l.rows_per_page);
      const uint32_t bytes = n * l.row_bytes;
      pieces.push_back({base + l.row_page(i), l.row_offset(i), bytes, out});
      out += bytes;
      i += n;
    }
  }

  // Destroyed in reverse: the pin needs the core.
  const std::shared_ptr<StoreCore> core_;
  const ChainPin pin_;
  const ModelRecord model_;
  const PrefixInfo info_;
  const std::shared_ptr<TierRegion> tier_;
  ReadServices services_;
  std::vector<Link> links_;
  std::vector<uint32_t> tokens_;
};

}  // namespace

Result<std::shared_ptr<const StoredPrefix>> OpenStoredPrefix(std::shared_ptr<StoreCore> core,
                                                             const SegmentId& id,
                                                             uint32_t n_tokens) {
  PREFIXD_ASSIGN(ChainPin pin, core->tree.Pin(id));
  const SegmentRecord last = pin.chain().back();
  if (n_tokens > last.tokens.end) {
    return InvalidArgument("prefix " + id.ToString() + " has " + std::to_string(last.tokens.end) +
                           " tokens, not " + std::to_string(n_tokens));
  }
  core->Touch(id);
  PREFIXD_ASSIGN(StoreCore::Scope scope, core->ResolveScope(last.model, last.tenant));
  PREFIXD_ASSIGN(PrefixInfo info, core->Info(id));
  auto prefix = std::make_shared<OpenPrefix>(std::move(core), std::move(pin),
                                             std::move(scope.model), std::move(info));
  PREFIXD_TRY(prefix->Load(n_tokens == 0 ? last.tokens.end : n_tokens));
  return std::shared_ptr<const StoredPrefix>(std::move(prefix));
}

}  // namespace prefixd::storage
