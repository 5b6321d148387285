#include "storage/store/open_prefix.h"

#include <algorithm>

#include "base/check.h"
#include "prefixd/row_ref.h"
#include "storage/read/gather_plan.h"
#include "storage/read/row_scan.h"
#include "storage/segment/unix_time.h"
#include "storage/store/prefix_link.h"
#include "storage/store/row_request.h"

namespace prefixd::storage {
namespace {

// A Hold keeps what rows read in place need: their region's memory, and their pages in it.
struct Hold {
  std::shared_ptr<TierRegion> region;
  std::vector<PagePins> pins;
  std::vector<std::shared_ptr<const SegmentFile>> files = {};  // whose orders copies name
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
      const TokenRange tokens{chain[i].tokens.begin, std::min(next, n_tokens)};
      PREFIXD_ASSIGN(auto file, core_->segments->Open(chain[i].id));
      const auto ids = file->tokens().first(tokens.size());
      tokens_.insert(tokens_.end(), ids.begin(), ids.end());
      const SegmentHeader& header = file->header();
      parts_.push_back({tokens, header.encoding, header.chunk_tokens});
      links_.emplace_back(*core_, std::move(file), tokens);
    }
    return {};
  }

  const PrefixInfo& info() const override { return info_; }
  const ModelRecord& model() const override { return model_; }
  uint32_t n_tokens() const override { return static_cast<uint32_t>(tokens_.size()); }
  std::span<const uint32_t> tokens() const override { return tokens_; }

  Result<std::vector<uint32_t>> KeptTokens(uint32_t layer, uint32_t kv_head) const override {
    PREFIXD_TRY(CheckRun(model_.geometry, layer, kv_head));
    const PrefixLink& last = links_.back();
    PREFIXD_ASSIGN(const RunOrder* order, last.Order(layer, kv_head));
    if (!last.layout().compressed()) {
      return Error{Code::kInternal, "the prefix is not compressed"};
    }
    std::vector<uint32_t> kept = order->kept;
    for (uint32_t& t : kept) t += last.first();
    return kept;
  }

  Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids, RowPart part,
                  RowSink out, ReadStats* stats) const override {
    PREFIXD_TRY(CheckRun(model_.geometry, layer, kv_head));
    PREFIXD_TRY(CheckIds(ids, n_tokens()));
    PREFIXD_TRY(CheckSink(model_.geometry.row(layer), ids.size(), part, out));
    const RowTarget target = TargetOf(model_.geometry.row(layer), out, part);
    size_t at = 0;
    for (const PrefixLink& link : links_) {
      const size_t end = link.EndOf(ids, at);
      if (at == end) continue;
      PREFIXD_TRY(link.CheckKept(info_.id, layer, kv_head, ids.subspan(at, end - at)));
      PREFIXD_ASSIGN(GatherPlan pieces, link.Plan(layer, kv_head, part));
      pieces.AddRows(ids.subspan(at, end - at), link.first(), target.From(at));
      at = end;
      PREFIXD_TRY(Read(link, pieces, Access::kPoint, stats));
    }
    PREFIXD_CHECK(at == ids.size(), at, ids.size());  // no row is left as it was
    return {};
  }

  Status ViewRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids, RowPart part,
                  RowViews& out, ReadStats* stats) const override {
    PREFIXD_TRY(CheckRun(model_.geometry, layer, kv_head));
    PREFIXD_TRY(CheckIds(ids, n_tokens()));
    const size_t stride = PartBytes(model_.geometry.row(layer), part);
    if (out.own.size() < ids.size() * stride) out.own.resize(ids.size() * stride);
    out.rows.resize(ids.size());
    auto hold = std::make_shared<Hold>();
    hold->region = tier_;
    size_t at = 0;
    for (const PrefixLink& link : links_) {
      const size_t begin = at, end = link.EndOf(ids, at);
      if (at == end) continue;
      PREFIXD_TRY(link.CheckKept(info_.id, layer, kv_head, ids.subspan(at, end - at)));
      PREFIXD_ASSIGN(GatherPlan pieces, link.Plan(layer, kv_head, part));
      const RowTarget own = TargetOf(model_.geometry.row(layer), {out.own, stride}, part);
      pieces.AddRows(ids.subspan(at, end - at), link.first(), own.From(at));
      at = end;
      if (link.InPlaceable(layer)) {
        PREFIXD_TRY(View(link, layer, pieces, part, out, *hold, stats));
        continue;
      }
      PREFIXD_TRY(Read(link, pieces, Access::kPoint, stats));
      for (size_t i = begin; i < end; ++i) {
        if (part != RowPart::kValue) out.rows[i].key = own.From(i).key;
        if (part != RowPart::kKey) out.rows[i].value = own.From(i).value;
      }
    }
    PREFIXD_CHECK(at == ids.size(), at, ids.size());
    out.hold = std::move(hold);
    return {};
  }

  Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range, RowPart part, RowSink out,
                   RangeUse use, ReadStats* stats) const override {
    return ForEachRun(layer, kv_head, range, part, out,
                      [&](const PrefixLink& link, GatherPlan& pieces) -> Status {
                        return Read(link, pieces, AccessFor(use), stats);
                      });
  }

  Result<RunsInPlace> FindInPlace(uint32_t layer, TokenRange range, std::span<const WantedRun> runs,
                                  ReadStats* stats) const override {
    ReadStats ignored;
    RunsInPlace found;
    auto hold = std::make_shared<Hold>();
    hold->region = tier_;
    const auto pin = [&](const PrefixLink& link, GatherPlan& pieces) -> Status {
      PREFIXD_TRY(link.CheckReadableInPlace(layer));
      PREFIXD_ASSIGN(PagePins pins, PinHeldPieces(services_, *link.file(), pieces.Take(),
                                                  found.copies, stats ? stats : &ignored));
      hold->pins.push_back(std::move(pins));
      hold->files.push_back(link.file());
      return {};
    };
    for (const auto& [kv_head, out] : runs) {
      PREFIXD_TRY(ForEachRun(layer, kv_head, range, RowPart::kRow, out, pin));
    }
    Borrowed(std::move(hold), found);
    return found;
  }

  Status VisitRows(uint32_t layer, uint32_t kv_head, RowViews& room, const RowVisitor& visit,
                   VisitPlace& place, ReadStats* stats) const override {
    PREFIXD_TRY(CheckRun(model_.geometry, layer, kv_head));
    if (compressed()) return Compressed(info_.id);
    uint64_t before = 0;
    for (const PrefixLink& link : links_) {
      PREFIXD_ASSIGN(const RunOrder* order, link.Order(layer, kv_head));
      const ScannedRows rows{
          *link.file(), order, layer, kv_head, link.tokens().size(), model_.geometry.row(layer)};
      PREFIXD_TRY(ScanRows(services_, rows, room, visit, place, before, stats));
    }
    return {};
  }

  Result<RowsInPlace> ReadInPlace(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                                  ReadStats* stats) const override {
    PREFIXD_TRY(CheckRun(model_.geometry, layer, kv_head));
    PREFIXD_TRY(CheckIds(ids, n_tokens()));
    ReadStats ignored;
    RowsInPlace out;
    out.rows.resize(ids.size());
    auto hold = std::make_shared<Hold>();
    hold->region = tier_;
    size_t at = 0;
    for (const PrefixLink& link : links_) {
      const size_t end = link.EndOf(ids, at);
      if (at == end) continue;
      PREFIXD_TRY(link.CheckReadableInPlace(layer));
      PREFIXD_TRY(link.CheckKept(info_.id, layer, kv_head, ids.subspan(at, end - at)));
      const auto rows = std::span(out.rows).subspan(at, end - at);
      // A key and its value share a page in the arrival layout and lie in two in the reclustered
      // one.
      const auto own = ids.subspan(at, end - at);
      if (link.layout().reclustered()) {
        PREFIXD_TRY(Borrow(link, layer, kv_head, own, RowPart::kKey, rows, *hold,
                           stats ? stats : &ignored));
        PREFIXD_TRY(Borrow(link, layer, kv_head, own, RowPart::kValue, rows, *hold,
                           stats ? stats : &ignored));
      } else {
        PREFIXD_TRY(Borrow(link, layer, kv_head, own, RowPart::kRow, rows, *hold,
                           stats ? stats : &ignored));
      }
      at = end;
    }
    Borrowed(std::move(hold), out);
    return out;
  }

  Status Prefetch(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids, RowPart part,
                  uint64_t max_bytes, const std::atomic<bool>& stop,
                  ReadStats* stats) const override {
    PREFIXD_TRY(CheckRun(model_.geometry, layer, kv_head));
    PREFIXD_TRY(CheckIds(ids, n_tokens()));
    if (tier_->memory() == nullptr) return {};
    ReadStats reads;
    // Only the pages matter, so every row may go to the same place.
    const size_t stride = PartBytes(model_.geometry.row(layer), part);
    std::vector<std::byte> nowhere(stride);
    const RowTarget target = TargetOf(model_.geometry.row(layer), {nowhere, stride}, part);
    Status status;
    size_t at = 0;
    for (const PrefixLink& link : links_) {
      const size_t end = link.EndOf(ids, at);
      if (at == end) continue;
      // Prefetch does not load orders: the first step that needs one loads it.
      if (!link.file()->HasOrder(layer, kv_head)) {
        at = end;
        continue;
      }
      auto pieces = link.Plan(layer, kv_head, part);
      if (!pieces.ok()) {
        status = std::move(pieces).error();
        break;
      }
      PREFIXD_ASSIGN(const RunOrder* order, link.Order(layer, kv_head));
      for (; at < end; ++at) {
        const uint32_t own = ids[at] - link.first();
        if (!link.IsKept(order, own)) continue;  // a step cannot need it
        pieces->AddRow(own, target);
      }
      std::vector<uint64_t> pages;
      for (const PagePiece& piece : pieces->Take()) {
        if (pages.empty() || pages.back() != piece.page) pages.push_back(piece.page);
      }
      const uint64_t read = reads.bytes[static_cast<size_t>(Tier::kSsd)];
      status = ReadPagesAhead(services_, *link.file(), pages,
                              {.max_bytes = max_bytes - std::min(read, max_bytes)}, stop, &reads);
      if (!status.ok()) break;
    }
    if (stats) *stats += reads;
    return status;
  }

  std::span<const StoredPart> parts() const override { return parts_; }

 private:
  static Access AccessFor(RangeUse use) {
    if (use == RangeUse::kShared) return Access::kScan;
    return use == RangeUse::kOwn ? Access::kOwn : Access::kOwnLater;
  }

  // Calls visit(link, pieces) for what each segment has of a run.
  template <typename Visit>
  Status ForEachRun(uint32_t layer, uint32_t kv_head, TokenRange range, RowPart part,
                    const RowSink& out, const Visit& visit) const {
    PREFIXD_TRY(CheckRun(model_.geometry, layer, kv_head));
    if (range.begin > range.end || range.end > n_tokens()) {
      return InvalidArgument("rows [" + std::to_string(range.begin) + ", " +
                             std::to_string(range.end) + ") of a prefix of " +
                             std::to_string(n_tokens()) + " tokens");
    }
    PREFIXD_TRY(CheckSink(model_.geometry.row(layer), range.size(), part, out));
    const RowTarget target = TargetOf(model_.geometry.row(layer), out, part);
    for (const PrefixLink& link : links_) {
      const TokenRange run = link.Within(range);
      if (run.size() == 0) continue;
      PREFIXD_TRY(link.CheckKept(info_.id, layer, kv_head, run));
      PREFIXD_ASSIGN(GatherPlan pieces, link.Plan(layer, kv_head, part));
      pieces.AddRun(run.begin - link.first(), run.end - link.first(),
                    target.From(run.begin - range.begin));
      PREFIXD_TRY(visit(link, pieces));
    }
    return {};
  }

  // Says in `out` what memory `hold` keeps.
  void Borrowed(std::shared_ptr<const Hold> hold, auto& out) const {
    out.region_id = tier_->id();
    out.region = tier_->bytes();
    out.region_fd = tier_->memory() != nullptr ? tier_->memory()->read_only_fd() : -1;
    out.hold = std::move(hold);
  }

  // Points out.rows to the parts; pieces that must be copied go to out.own.
  Status View(const PrefixLink& link, uint32_t layer, GatherPlan& pieces, RowPart part,
              RowViews& out, Hold& hold, ReadStats* stats) const {
    const std::vector<PagePiece> sorted = pieces.Take();
    std::vector<const std::byte*> where(sorted.size());
    PagePins& pins = hold.pins.emplace_back(tier_->PinsForAStep());
    ReadStats ignored;
    PREFIXD_TRY(ViewPieces(services_, *link.file(), sorted, where, Access::kPoint, pins,
                           stats ? stats : &ignored));
    const size_t stride = PartBytes(model_.geometry.row(layer), part);
    const size_t key_bytes = model_.geometry.row(layer).key_bytes();
    for (size_t i = 0; i < sorted.size(); ++i) {
      const auto at = static_cast<size_t>(sorted[i].out - out.own.data());
      const size_t item = at / stride;
      RowRef& row = out.rows[item];
      if (part == RowPart::kValue || at > item * stride) {
        row.value = where[i];
        continue;
      }
      row.key = where[i];
      if (sorted[i].bytes > key_bytes) row.value = where[i] + key_bytes;  // both in one piece
    }
    return {};
  }

  // Pins one part of rows and notes where it lies; kRow, in one piece, gives both.
  Status Borrow(const PrefixLink& link, uint32_t layer, uint32_t kv_head,
                std::span<const uint32_t> ids, RowPart part, std::span<RowRef> rows, Hold& hold,
                ReadStats* stats) const {
    PREFIXD_ASSIGN(GatherPlan pieces, link.Plan(layer, kv_head, part));
    // Pieces come sorted by page: marks map them back to rows.
    std::vector<std::byte> marks(ids.size());
    const size_t key = link.layout().of(layer).key_bytes();
    for (size_t i = 0; i < ids.size(); ++i) {
      std::byte* const mark = &marks[i];
      pieces.AddRow(ids[i] - link.first(), {mark, 0, part == RowPart::kRow ? mark + key : mark, 0});
    }
    const std::vector<PagePiece> sorted = pieces.Take();
    std::vector<const std::byte*> where(sorted.size());
    PREFIXD_ASSIGN(PagePins pins, PinPieces(services_, *link.file(), sorted, where, stats));
    hold.pins.push_back(std::move(pins));
    for (size_t i = 0; i < sorted.size(); ++i) {
      RowRef& row = rows[static_cast<size_t>(sorted[i].out - marks.data())];
      if (part != RowPart::kValue) row.key = where[i];
      if (part == RowPart::kValue) row.value = where[i];
      if (part == RowPart::kRow) row.value = where[i] + link.layout().of(layer).key_bytes();
    }
    return {};
  }

  Status Read(const PrefixLink& link, GatherPlan& pieces, Access access, ReadStats* stats) const {
    ReadStats ignored;
    return ReadPieces(services_, *link.file(), pieces.Take(), access, stats ? stats : &ignored,
                      Deliver::kDecoded);
  }

  // Members are destroyed in reverse order, and the pin needs the core.
  const std::shared_ptr<StoreCore> core_;
  const ChainPin pin_;
  const ModelRecord model_;
  const PrefixInfo info_;
  const std::shared_ptr<TierRegion> tier_;
  ReadServices services_;
  std::vector<PrefixLink> links_;
  std::vector<StoredPart> parts_;  // [links]
  std::vector<uint32_t> tokens_;
};

}  // namespace

Result<std::shared_ptr<const StoredPrefix>> OpenStoredPrefix(std::shared_ptr<StoreCore> core,
                                                             const SegmentId& id,
                                                             uint32_t n_tokens) {
  const auto [segment, named_tokens] = core->tree.Resolve(id);
  PREFIXD_ASSIGN(ChainPin pin, core->tree.Pin(segment, n_tokens > 0 ? n_tokens : named_tokens));
  if (!core->tree.Alive(segment, NowUnixMs())) {
    return Error{Code::kNotFound, "prefix " + id.ToString() + " has expired"};
  }
  const SegmentRecord last = pin.chain().back();
  const uint32_t all = named_tokens == 0 ? last.tokens.end : named_tokens;
  if (n_tokens > all) {
    return InvalidArgument("prefix " + id.ToString() + " has " + std::to_string(all) +
                           " tokens, not " + std::to_string(n_tokens));
  }
  core->segments->Touch(segment);
  PREFIXD_ASSIGN(RequestScope scope, core->models->Resolve(last.model, last.tenant));
  PREFIXD_ASSIGN(PrefixInfo info, core->segments->Info(segment));
  // Its last tokens, which every step reads, would be tokens without rows.
  if (last.compressed() && n_tokens > 0 && n_tokens < last.tokens.end &&
      n_tokens > last.tokens.begin) {
    return Compressed(segment);
  }
  if (n_tokens > 0 && n_tokens <= last.tokens.begin) info.kept_rows = 0;  // it ends before those
  auto prefix = std::make_shared<OpenPrefix>(std::move(core), std::move(pin),
                                             std::move(scope.model), std::move(info));
  PREFIXD_TRY(prefix->Load(n_tokens == 0 ? all : n_tokens));
  return std::shared_ptr<const StoredPrefix>(std::move(prefix));
}

}  // namespace prefixd::storage
