#include "storage/read/page_window.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/call_scope.h"
#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

constexpr size_t kMaxOpPages = 128;
constexpr std::chrono::milliseconds kLookForStop{1};  // poll interval while waiting for a read

}  // namespace

// A Flight owns everything that one batch of reads touches. The engine shares it, because the disk
// may write into it long after the reader has given up.
struct PageWindow::Flight {
  Flight(std::shared_ptr<BufferPool> pool, const MemoryAccount& account)
      : buffers(std::move(pool)),
        memory(account.Charge(MemoryKind::kReads, kReadBufferBytes)),
        scratch(buffers->Take()) {}
  ~Flight() {
    memory.Release();
    buffers->Give(std::move(scratch));
  }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  const std::shared_ptr<BufferPool> buffers;
  MemoryCharge memory;
  std::shared_ptr<const SegmentFile> file;  // keeps the descriptor open
  std::vector<uint64_t> pages;              // the requested pages
  std::vector<uint32_t> slots;              // where each page lies in scratch, in pages
  uint64_t bytes = 0;                       // bytes of all operations
  AlignedBuffer scratch;
  std::vector<IoOp> ops;
  IoOp alone;  // of ReadWithoutGaps
  IoBatch batch;
};

PageWindow::~PageWindow() {
  if (started_) services_.engine->Cancel(flight_->batch, ECANCELED);
}

void PageWindow::Start(std::vector<uint64_t> pages) {
  if (!flight_) flight_ = std::make_shared<Flight>(services_.buffers, services_.memory);
  flight_->file = file_.shared_from_this();
  flight_->pages = std::move(pages);
  flight_->ops.clear();
  flight_->slots.clear();
  const std::vector<uint64_t>& p = flight_->pages;
  uint32_t slot = 0;
  for (size_t i = 0; i < p.size();) {
    const uint64_t first = p[i];
    uint64_t n = 0;  // pages of the operation
    for (; i < p.size() && p[i] - first < kMaxOpPages; ++i) {
      if (n > 0 && p[i] - first - n > max_gap_) break;
      n = p[i] - first + 1;
      flight_->slots.push_back(slot + static_cast<uint32_t>(n - 1));
    }
    flight_->ops.push_back(ReadOp(first, slot, n));
    slot += static_cast<uint32_t>(n);
  }
  flight_->bytes = uint64_t{slot} * kPageBytes;
  Submit(flight_->ops);
}

Status PageWindow::Finish() {
  PREFIXD_TRY(Await());
  for (IoOp& op : flight_->ops) {
    if (CheckComplete(op, "").ok()) continue;
    if (op.result == -ETIMEDOUT) return TimedOut();
    op.result = 0;
    const Status again = Again(op);
    if (!again.ok() && again.error().code != Code::kIo) return again;
    if (!again.ok()) PREFIXD_TRY(ReadWithoutGaps(op));
  }
  services_.bytes_read->fetch_add(bytes(), std::memory_order_relaxed);
  for (size_t i = 0; i < pages().size(); ++i) {
    if (!Verify(i)) PREFIXD_TRY(ReadAgain(i));
  }
  return {};
}

// The page that the disk cannot read may be one that nobody asked for.
Status PageWindow::ReadWithoutGaps(const IoOp& failed) {
  const auto* begin = static_cast<const std::byte*>(failed.iov.front().iov_base);
  const auto first = static_cast<size_t>(begin - flight_->scratch.data()) / kPageBytes;
  const size_t end = first + failed.length() / kPageBytes;
  for (size_t i = 0; i < pages().size(); ++i) {
    const uint32_t slot = flight_->slots[i];
    if (slot < first || slot >= end) continue;
    flight_->alone = ReadOp(pages()[i], slot, 1);
    PREFIXD_TRY(Again(flight_->alone));
  }
  return {};
}

const std::vector<uint64_t>& PageWindow::pages() const { return flight_->pages; }
uint64_t PageWindow::bytes() const { return flight_->bytes; }
ConstPageBytes PageWindow::page(size_t i) const {
  return ConstPageBytes(flight_->scratch.data() + flight_->slots[i] * kPageBytes, kPageBytes);
}

bool PageWindow::Verify(size_t i) {
  std::byte* at = flight_->scratch.data() + flight_->slots[i] * kPageBytes;
  return file_.VerifyPage(pages()[i], PageBytes(at, kPageBytes));
}

IoOp PageWindow::ReadOp(uint64_t page, size_t slot, size_t n) const {
  return {IoKind::kRead,
          priority_,
          file_.fd(),
          page * kPageBytes,
          {{flight_->scratch.data() + slot * kPageBytes, n * kPageBytes}},
          0};
}

void PageWindow::Submit(std::span<IoOp> ops) {
  if (deadline_.count() > 0) flight_->batch.SetDeadline(IoBatch::Clock::now() + deadline_);
  started_ = true;
  services_.engine->SubmitOwned(ops, flight_->batch, flight_);
}

Status PageWindow::Await() {
  started_ = false;
  if (stop_ != nullptr && Stopped()) {
    services_.engine->Cancel(flight_->batch, ECANCELED);
    flight_ = nullptr;  // the engine alone holds it from now on
    return Error{Code::kCancelled, "what was read is not wanted any more"};
  }
  if (services_.engine->Finish(flight_->batch)) return CheckCall();
  flight_ = nullptr;  // the engine alone holds it from now on
  PREFIXD_TRY(CheckCall());
  return TimedOut();
}

bool PageWindow::Stopped() {
  IoBatch& batch = flight_->batch;
  while (!batch.WaitUntil(std::min(batch.deadline(), IoBatch::Clock::now() + kLookForStop))) {
    if (*stop_) return true;
    if (IoBatch::Clock::now() >= batch.deadline()) break;
  }
  return false;
}

Status PageWindow::Again(IoOp& op) {
  Submit({&op, 1});
  PREFIXD_TRY(Await());
  if (op.result == -ETIMEDOUT) return TimedOut();
  return CheckComplete(op, "reading segment " + file_.record().id.ToString());
}

// A mismatch may be a fault on the way, so the page is read once more; a second mismatch means
// damage.
Status PageWindow::ReadAgain(size_t i) {
  services_.checksum_failures->fetch_add(1, std::memory_order_relaxed);
  flight_->ops.assign(1, ReadOp(pages()[i], flight_->slots[i], 1));
  PREFIXD_TRY(Again(flight_->ops.front()));
  services_.bytes_read->fetch_add(kPageBytes, std::memory_order_relaxed);
  if (Verify(i)) return {};
  const std::string how = "page " + std::to_string(pages()[i]) + " does not verify";
  services_.on_corrupt(file_.record().id, how);
  return Error{Code::kCorrupt, "segment " + file_.record().id.ToString() + ": " + how};
}

Error PageWindow::TimedOut() const {
  Error error{Code::kUnavailable, "reading segment " + file_.record().id.ToString() +
                                      ": the disk did not answer within " +
                                      std::to_string(deadline_.count()) + " ms"};
  LogWarning(error.message);
  return error;
}

}  // namespace prefixd::storage
