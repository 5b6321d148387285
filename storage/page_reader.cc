#include "storage/page_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace prefixd::storage {
namespace {

constexpr size_t kMaxOpPages = 128;

// Reads one set of ascending pages into scratch memory, verified.
class Window {
 public:
  Window(const ReadServices& services, const SegmentFile& file, IoPriority priority)
      : services_(services), file_(file), priority_(priority) {}
  ~Window() { batch_.Wait(); }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  void Start(std::vector<uint64_t> pages) {
    pages_ = std::move(pages);
    if (scratch_.size() < pages_.size() * kPageBytes) {
      scratch_ = AlignedBuffer(pages_.size() * kPageBytes);
    }
    ops_.clear();
    for (size_t i = 0; i < pages_.size();) {
      size_t n = 1;
      while (i + n < pages_.size() && n < kMaxOpPages && pages_[i + n] == pages_[i] + n) ++n;
      ops_.push_back(ReadOp(i, n));
      i += n;
    }
    services_.engine->Submit(ops_, batch_);
  }

  // Waits and verifies. On success page(i) are the bytes of pages()[i].
  Status Finish() {
    batch_.Wait();
    for (IoOp& op : ops_) {
      if (CheckComplete(op, "").ok()) continue;
      op.result = 0;
      services_.engine->Run({&op, 1});
      PREFIXD_TRY(CheckComplete(op, "reading segment " + file_.record().id.ToString()));
    }
    services_.bytes_read->fetch_add(pages_.size() * kPageBytes, std::memory_order_relaxed);
    for (size_t i = 0; i < pages_.size(); ++i) {
      if (!file_.VerifyPage(pages_[i], page(i))) PREFIXD_TRY(ReadAgain(i));
    }
    return {};
  }

  const std::vector<uint64_t>& pages() const { return pages_; }
  ConstPageBytes page(size_t i) const {
    return ConstPageBytes(scratch_.data() + i * kPageBytes, kPageBytes);
  }

 private:
  IoOp ReadOp(size_t first, size_t n) const {
    return {IoKind::kRead,
            priority_,
            file_.fd(),
            pages_[first] * kPageBytes,
            {{scratch_.data() + first * kPageBytes, n * kPageBytes}},
            0};
  }

  // A mismatch may be a fault on the way: once more, then the page is damaged.
  Status ReadAgain(size_t i) {
    services_.checksum_failures->fetch_add(1, std::memory_order_relaxed);
    IoOp op = ReadOp(i, 1);
    services_.engine->Run({&op, 1});
    PREFIXD_TRY(CheckComplete(op, "reading segment " + file_.record().id.ToString()));
    services_.bytes_read->fetch_add(kPageBytes, std::memory_order_relaxed);
    if (file_.VerifyPage(pages_[i], page(i))) return {};
    const std::string how = "page " + std::to_string(pages_[i]) + " does not verify";
    services_.on_corrupt(file_.record().id, how);
    return Error{Code::kCorrupt, "segment " + file_.record().id.ToString() + ": " + how};
  }

  const ReadServices& services_;
  const SegmentFile& file_;
  const IoPriority priority_;
  std::vector<uint64_t> pages_;
  AlignedBuffer scratch_;
  std::vector<IoOp> ops_;
  IoBatch batch_;
};

// The pieces of one window and which of its pages they belong to.
struct WindowPieces {
  struct Group {
    size_t begin, end;  // pieces of one page that was not in the tier
  };
  std::vector<Group> missing;
};

class PieceReader {
 public:
  PieceReader(const ReadServices& services, const SegmentFile& file,
              std::span<const PagePiece> pieces, Access access, ReadStats* stats)
      : services_(services), file_(file), pieces_(pieces), access_(access), stats_(stats) {}

  Status Run() {
    const IoPriority priority =
        access_ == Access::kBackground ? IoPriority::kScrub : IoPriority::kStepRead;
    std::array<Window, 2> windows{Window{services_, file_, priority},
                                  Window{services_, file_, priority}};
    std::array<WindowPieces, 2> wanted;
    size_t current = 0;
    bool more = Start(windows[current], wanted[current]);
    while (more) {
      const size_t next = 1 - current;
      more = Start(windows[next], wanted[next]);
      PREFIXD_TRY(Deliver(windows[current], wanted[current]));
      current = next;
    }
    return {};
  }

 private:
  // Serves what the tier has and starts reading the rest of the next window. False: none left.
  bool Start(Window& window, WindowPieces& wanted) {
    wanted.missing.clear();
    std::vector<uint64_t> pages;
    while (at_ < pieces_.size() && pages.size() < kWindowPages) {
      size_t end = at_ + 1;
      while (end < pieces_.size() && pieces_[end].page == pieces_[at_].page) ++end;
      const PageKey key{file_.record().sequence, pieces_[at_].page};
      const bool hit = services_.tier->Lookup(
          key, access_, [&](ConstPageBytes page) { Copy(page, at_, end, Tier::kHost); });
      if (hit) {
        stats_->pages_host += 1;
      } else {
        pages.push_back(key.page);
        wanted.missing.push_back({at_, end});
      }
      at_ = end;
    }
    if (pages.empty()) return false;
    window.Start(std::move(pages));
    return true;
  }

  Status Deliver(Window& window, const WindowPieces& wanted) {
    PREFIXD_TRY(window.Finish());
    stats_->pages_ssd += window.pages().size();
    stats_->bytes[static_cast<size_t>(Tier::kSsd)] += window.pages().size() * kPageBytes;
    for (size_t i = 0; i < wanted.missing.size(); ++i) {
      const ConstPageBytes page = window.page(i);
      Copy(page, wanted.missing[i].begin, wanted.missing[i].end, Tier::kSsd);
      if (access_ == Access::kBackground) continue;
      services_.tier->Insert({file_.record().sequence, window.pages()[i]}, page, access_);
    }
    return {};
  }

  void Copy(ConstPageBytes page, size_t begin, size_t end, Tier from) {
    for (size_t i = begin; i < end; ++i) {
      const PagePiece& piece = pieces_[i];
      std::memcpy(piece.out, page.data() + piece.offset, piece.bytes);
      if (from == Tier::kHost) stats_->bytes[static_cast<size_t>(Tier::kHost)] += piece.bytes;
    }
  }

  const ReadServices& services_;
  const SegmentFile& file_;
  const std::span<const PagePiece> pieces_;
  const Access access_;
  ReadStats* const stats_;
  size_t at_ = 0;
};

}  // namespace

Status ReadPieces(const ReadServices& services, const SegmentFile& file,
                  std::span<const PagePiece> pieces, Access access, ReadStats* stats) {
  return PieceReader(services, file, pieces, access, stats).Run();
}

Status VerifyAllPages(const ReadServices& services, const SegmentFile& file,
                      const std::function<bool(uint64_t)>& page_done, uint64_t first_page,
                      size_t window_pages) {
  Window window(services, file, IoPriority::kScrub);
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
