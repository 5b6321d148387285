#include "storage/read/page_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "base/check.h"
#include "base/rows/copy_rows.h"
#include "base/rows/stream_copy.h"
#include "prefixd/stored_part.h"
#include "storage/read/page_window.h"
#include "storage/segment/row_encoding.h"

namespace prefixd::storage {
namespace {

constexpr size_t kWindows = 3;  // in flight: the disk works while one window is verified and copied
constexpr size_t kLookupPages = 256;  // looked up, pinned and copied together

void CountPrefetched(uint64_t pages, ReadStats& stats) {
  stats.prefetch_used_bytes += pages * kPageBytes;
}

// WindowPieces lists the pieces of one window and which of its pages they belong to.
struct WindowPieces {
  struct Group {
    size_t begin, end;  // pieces of one page that was not in the tier
  };
  std::vector<Group> missing;
};

// InPlace says where the pieces lie that are not copied.
struct InPlace {
  std::span<const std::byte*> where;  // [pieces]
  PagePins& pins;
};

class PieceReader {
 public:
  // in_place: null where every piece is copied to its `out`.
  PieceReader(const ReadServices& services, const SegmentFile& file,
              std::span<const PagePiece> pieces, Access access, ReadStats* stats, Deliver deliver,
              InPlace* in_place = nullptr)
      : in_place_(in_place),
        services_(services),
        file_(file),
        pieces_(pieces),
        access_(access),
        stats_(stats),
        decode_(deliver == Deliver::kDecoded && file.header().encoding == RowEncoding::kInt8) {
    // Pieces ascend by page, so the check of the last one covers all; only pages before the table
    // have a checksum.
    PREFIXD_CHECK(pieces.empty() || (pieces.front().page <= pieces.back().page &&
                                     pieces.back().page < file.layout().table_page),
                  pieces.front().page, pieces.back().page, file.layout().table_page);
    // A viewing reader reads its copied pieces at once, so they should be in the caches.
    if (access == Access::kPoint || access == Access::kBackground || decode_ || in_place) return;
    uint64_t bytes = 0;
    for (const PagePiece& piece : pieces) bytes += piece.all_bytes();
    stream_ = bytes >= kStreamBytes;
  }
  // One fence at the end suffices: one after every piece would wait for the memory each time.
  ~PieceReader() {
    if (stream_) StreamFence();
  }
  PieceReader(const PieceReader&) = delete;
  PieceReader& operator=(const PieceReader&) = delete;

  Status Run() {
    const bool background = access_ == Access::kBackground;
    const bool last = background || access_ == Access::kOwnLater;
    const IoPriority priority = last ? IoPriority::kScrub : IoPriority::kStepRead;
    const auto deadline = background ? std::chrono::milliseconds(0) : services_.read_deadline;
    const uint32_t gap = access_ == Access::kPoint ? services_.max_gap_pages : 0;
    std::array<PageWindow, kWindows> windows{PageWindow{services_, file_, priority, deadline, gap},
                                             PageWindow{services_, file_, priority, deadline, gap},
                                             PageWindow{services_, file_, priority, deadline, gap}};
    std::array<WindowPieces, kWindows> wanted;
    bool more = true;
    for (size_t begun = 0, delivered = 0; more || delivered < begun;) {
      if (more && begun - delivered < kWindows) {
        PREFIXD_ASSIGN(more, Start(windows[begun % kWindows], wanted[begun % kWindows]));
        begun += more ? 1 : 0;
        continue;
      }
      PREFIXD_TRY(Deliver(windows[delivered % kWindows], wanted[delivered % kWindows]));
      ++delivered;
    }
    return {};
  }

 private:
  // Serves pieces from the tier and starts reading the rest of the next window. False: none left.
  Result<bool> Start(PageWindow& window, WindowPieces& wanted) {
    wanted.missing.clear();
    std::vector<uint64_t> pages;
    size_t slots = 0;
    while (at_ < pieces_.size() && window.Room(slots) > 0) {
      PREFIXD_TRY(CheckCall());
      std::array<uint64_t, kLookupPages> batch;
      std::array<WindowPieces::Group, kLookupPages> groups;
      std::array<uint32_t, kLookupPages> frames;
      const size_t room = std::min(kLookupPages, window.Room(slots));
      size_t n = 0;
      for (; n < room && at_ < pieces_.size(); ++n) {
        const size_t begin = at_++;
        while (at_ < pieces_.size() && pieces_[at_].page == pieces_[begin].page) ++at_;
        batch[n] = pieces_[begin].page;
        groups[n] = {begin, at_};
      }
      const auto pages_of = std::span(batch).first(n);
      if (access_ == Access::kBackground) {
        std::fill_n(frames.begin(), n, kNoFrame);
      } else if (in_place_ != nullptr) {
        CountPrefetched(services_.tier->Pin(file_.record().sequence, pages_of, access_,
                                            std::span(frames).first(n), in_place_->pins),
                        *stats_);
      } else {
        CountPrefetched(services_.tier->Pin(file_.record().sequence, pages_of, access_,
                                            std::span(frames).first(n)),
                        *stats_);
      }
      for (size_t i = 0; i < n; ++i) {
        if (frames[i] != kNoFrame) {
          Take(services_.tier->page(frames[i]), groups[i].begin, groups[i].end, Tier::kHost);
          stats_->pages_host += 1;
        } else {
          slots += window.SlotsOf(batch[i], pages.empty() ? nullptr : &pages.back());
          pages.push_back(batch[i]);
          wanted.missing.push_back(groups[i]);
        }
      }
      FlushCopy();
      if (access_ != Access::kBackground && in_place_ == nullptr) {
        services_.tier->Unpin(std::span(frames).first(n));
      }
    }
    if (pages.empty()) return false;
    window.Start(std::move(pages));
    return true;
  }

  Status Deliver(PageWindow& window, const WindowPieces& wanted) {
    PREFIXD_TRY(window.Finish());
    stats_->pages_ssd += window.pages().size();
    stats_->bytes[static_cast<size_t>(Tier::kSsd)] += window.bytes();
    for (size_t i = 0; i < wanted.missing.size(); ++i) {
      const ConstPageBytes page = window.page(i);
      const PageKey key{file_.record().sequence, window.pages()[i]};
      const auto [begin, end] = wanted.missing[i];
      if (in_place_ != nullptr) {
        // The window's buffer is reused, so the piece stays in the tier, which takes a copy anyway.
        const uint32_t frame = access_ == Access::kPoint
                                   ? services_.tier->TryInsertPinned(key, page, in_place_->pins)
                                   : kNoFrame;
        if (frame != kNoFrame) {
          Take(services_.tier->page(frame), begin, end, Tier::kSsd);
          continue;
        }
        for (size_t j = begin; j < end; ++j) in_place_->where[j] = pieces_[j].out;
      }
      Copy(page, begin, end, Tier::kSsd);
      const bool shared =
          access_ == Access::kScan || (access_ == Access::kPoint && in_place_ == nullptr);
      if (shared) services_.tier->Insert(key, page, access_);
    }
    FlushCopy();
    return {};
  }

  // Delivers pieces of a page of the tier.
  void Take(ConstPageBytes page, size_t begin, size_t end, Tier from) {
    if (in_place_ == nullptr) return Copy(page, begin, end, from);
    for (size_t i = begin; i < end; ++i) {
      in_place_->where[i] = page.data() + pieces_[i].offset;
      if (from == Tier::kHost) stats_->bytes[static_cast<size_t>(Tier::kHost)] += pieces_[i].bytes;
    }
  }

  // Pieces that are adjacent on both sides are copied as one.
  void Copy(ConstPageBytes page, size_t begin, size_t end, Tier from) {
    for (size_t i = begin; i < end; ++i) {
      const PagePiece& piece = pieces_[i];
      const std::byte* source = page.data() + piece.offset;
      if (from == Tier::kHost) stats_->bytes[static_cast<size_t>(Tier::kHost)] += piece.all_bytes();
      if (decode_) {
        for (uint32_t j = 0; j < piece.n; ++j) {
          DecodeInt8(file_.header().dtype, {source + size_t{j} * piece.step, piece.bytes},
                     piece.out + piece.PlaceOf(j) * piece.out_step);
        }
        continue;
      }
      if (piece.n > 1 || piece.places != nullptr) {
        CopyRowsUnfenced(piece.From(source), stream_ ? CopyMode::kStream : CopyMode::kCached);
        continue;
      }
      if (source != copy_.from + copy_.bytes || piece.out != copy_.to + copy_.bytes) {
        FlushCopy();
        copy_ = {source, piece.out, 0};
      }
      copy_.bytes += piece.bytes;
    }
  }

  void FlushCopy() {
    if (stream_) {
      StreamCopyUnfenced(copy_.to, copy_.from, copy_.bytes);
    } else if (copy_.bytes > 0) {
      std::memcpy(copy_.to, copy_.from, copy_.bytes);
    }
    copy_ = {};
  }

  InPlace* const in_place_;
  const ReadServices& services_;
  const SegmentFile& file_;
  const std::span<const PagePiece> pieces_;
  const Access access_;
  ReadStats* const stats_;
  const bool decode_;
  bool stream_ = false;
  size_t at_ = 0;
  struct {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    size_t bytes = 0;
  } copy_;  // the copy not done yet
};

}  // namespace

Status ReadPieces(const ReadServices& services, const SegmentFile& file,
                  std::span<const PagePiece> pieces, Access access, ReadStats* stats,
                  Deliver deliver) {
  return PieceReader(services, file, pieces, access, stats, deliver).Run();
}

Status ViewPieces(const ReadServices& services, const SegmentFile& file,
                  std::span<const PagePiece> pieces, std::span<const std::byte*> where,
                  Access access, PagePins& pins, ReadStats* stats) {
  InPlace in_place{where, pins};
  return PieceReader(services, file, pieces, access, stats, Deliver::kAsStored, &in_place).Run();
}

Result<PagePins> PinPieces(const ReadServices& services, const SegmentFile& file,
                           std::span<const PagePiece> pieces, std::span<const std::byte*> where,
                           ReadStats* stats) {
  TierRegion& tier = *services.tier;
  const uint64_t segment = file.record().sequence;
  std::vector<uint64_t> pages;
  for (const PagePiece& piece : pieces) {
    if (pages.empty() || pages.back() != piece.page) pages.push_back(piece.page);
  }
  PREFIXD_ASSIGN(PagePins pins, tier.Promise(pages.size()));
  std::vector<uint32_t> frames(pages.size());
  CountPrefetched(tier.Pin(segment, pages, Access::kPoint, frames, pins), *stats);
  for (size_t i = 0, p = 0; i < pieces.size(); ++i) {
    if (pieces[i].page != pages[p]) ++p;
    if (frames[p] != kNoFrame) stats->bytes[static_cast<size_t>(Tier::kHost)] += pieces[i].bytes;
  }
  PageWindow window(services, file, IoPriority::kStepRead, services.read_deadline);
  for (size_t at = 0; at < pages.size();) {
    std::vector<uint64_t> missing;
    std::vector<size_t> index;
    for (; at < pages.size() && missing.size() < kWindowPages; ++at) {
      if (frames[at] != kNoFrame) {
        stats->pages_host += 1;
        continue;
      }
      missing.push_back(pages[at]);
      index.push_back(at);
    }
    if (missing.empty()) break;
    window.Start(std::move(missing));
    PREFIXD_TRY(window.Finish());
    stats->pages_ssd += index.size();
    stats->bytes[static_cast<size_t>(Tier::kSsd)] += index.size() * kPageBytes;
    for (size_t i = 0; i < index.size(); ++i) {
      PREFIXD_ASSIGN(frames[index[i]],
                     tier.InsertPinned({segment, window.pages()[i]}, window.page(i), pins));
    }
  }
  for (size_t i = 0, p = 0; i < pieces.size(); ++i) {
    if (pieces[i].page != pages[p]) ++p;
    where[i] = tier.page(frames[p]).data() + pieces[i].offset;
  }
  return pins;
}

Result<PagePins> PinHeldPieces(const ReadServices& services, const SegmentFile& file,
                               std::span<const PagePiece> pieces, std::vector<RowCopy>& copies,
                               ReadStats* stats) {
  if (pieces.empty()) return PagePins();
  TierRegion& tier = *services.tier;
  const uint64_t segment = file.record().sequence;
  const auto missing = [] {
    return Error{Code::kNotFound, "some of the rows are not in the host tier; read them"};
  };
  // Most of what is not there ends here, and counts as no use.
  if (tier.ShareOf(segment, pieces.front().page, pieces.back().page + 1) < 1) return missing();
  std::vector<uint64_t> pages;
  for (const PagePiece& piece : pieces) {
    if (pages.empty() || pages.back() != piece.page) pages.push_back(piece.page);
  }
  PREFIXD_ASSIGN(PagePins pins, tier.Promise(pages.size()));
  std::vector<uint32_t> frames(pages.size());
  CountPrefetched(tier.Pin(segment, pages, Access::kScan, frames, pins), *stats);
  if (std::ranges::find(frames, kNoFrame) != frames.end()) return missing();
  copies.reserve(copies.size() + pieces.size());
  for (size_t i = 0, p = 0; i < pieces.size(); ++i) {
    if (pieces[i].page != pages[p]) ++p;
    copies.push_back(pieces[i].From(tier.page(frames[p]).data() + pieces[i].offset));
    stats->bytes[static_cast<size_t>(Tier::kHost)] += pieces[i].all_bytes();
  }
  stats->pages_host += pages.size();
  return pins;
}

Status ReadPagesAhead(const ReadServices& services, const SegmentFile& file,
                      std::span<const uint64_t> pages, const ReadAhead& how,
                      const std::atomic<bool>& stop, ReadStats* stats) {
  TierRegion& tier = *services.tier;
  const uint64_t segment = file.record().sequence;
  uint64_t left = how.max_bytes / kPageBytes;
  // There is no deadline: only a thread that may set `stop` waits for these reads.
  PageWindow window(services, file, IoPriority::kScrub, std::chrono::milliseconds(0),
                    /*max_gap=*/0, &stop);
  std::vector<uint32_t> frames(how.pages_at_once);
  for (size_t at = 0; at < pages.size() && left > 0;) {
    std::vector<uint64_t> missing;
    const size_t most = std::min<uint64_t>(left, how.pages_at_once);
    while (at < pages.size() && missing.size() < most) {
      const size_t n = std::min(most - missing.size(), pages.size() - at);
      const auto looked_up = std::span(frames).first(n);
      tier.Pin(segment, pages.subspan(at, n), Access::kPrefetch, looked_up);
      for (size_t i = 0; i < n; ++i) {
        if (frames[i] == kNoFrame) missing.push_back(pages[at + i]);
      }
      tier.Unpin(looked_up);
      at += n;
    }
    if (missing.empty()) break;
    if (stop) return Error{Code::kCancelled, "pages read ahead are not wanted any more"};
    const uint64_t n = missing.size();
    const PageKey first{segment, missing.front()};
    left -= n;
    window.Start(std::move(missing));
    const Status finished = window.Finish();
    const bool damaged = !finished.ok() && finished.error().code == Code::kCorrupt;
    if (damaged && how.access == Access::kPrefetch) tier.NoteReadInVain(first, n);
    if (finished.ok() || damaged) {
      stats->pages_ssd += n;
      stats->bytes[static_cast<size_t>(Tier::kSsd)] += n * kPageBytes;
    }
    PREFIXD_TRY(finished);
    bool room = true;
    for (size_t i = 0; i < n; ++i) {
      room &= tier.Insert({segment, window.pages()[i]}, window.page(i), how.access);
    }
    if (!room) {
      return Error{Code::kResourceExhausted, "the host tier has no room for pages read ahead"};
    }
  }
  return {};
}

Status VerifyAllPages(const ReadServices& services, const SegmentFile& file,
                      const std::function<bool(uint64_t)>& page_done, uint64_t first_page,
                      size_t window_pages) {
  PageWindow window(services, file, IoPriority::kScrub, std::chrono::milliseconds(0));
  const uint64_t end = file.layout().table_page;
  for (uint64_t page = first_page; page < end;) {
    std::vector<uint64_t> pages;
    for (; page < end && pages.size() < window_pages; ++page) pages.push_back(page);
    const uint64_t n = pages.size();
    window.Start(std::move(pages));
    PREFIXD_TRY(window.Finish());
    if (!page_done(n)) return Error{Code::kCancelled, "verification was stopped"};
  }
  return {};
}

}  // namespace prefixd::storage
