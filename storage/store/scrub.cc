#include "storage/store/scrub.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "storage/io/errors.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {
namespace {

using Clock = std::chrono::steady_clock;

// The window is small, so that a step's read never waits behind much of it.
constexpr size_t kScrubWindowPages = 256;
constexpr uint64_t kPagesPerNote = 65536;  // the position is stored this often

// A Pacer sleeps after each run of bytes until its time at the given rate is over.
class Pacer {
 public:
  explicit Pacer(const ScrubOptions& options) : options_(options) {}

  // Returns false to stop.
  bool Took(uint64_t bytes) {
    const std::chrono::duration<double> worth(static_cast<double>(bytes) /
                                              static_cast<double>(options_.bytes_per_second));
    const auto now = Clock::now();
    free_at_ = std::max(free_at_, now) + std::chrono::duration_cast<Clock::duration>(worth);
    return options_.wait(free_at_ - now);
  }

 private:
  const ScrubOptions& options_;
  Clock::time_point free_at_ = Clock::now();
};

class Scrub {
 public:
  Scrub(StoreCore& core, const ScrubOptions& options) : core_(core), pacer_(options) {}

  Status Segment(const SegmentRecord& record) {
    PREFIXD_ASSIGN(const ScrubPosition from, core_.catalog->LoadScrubPosition());
    const auto info = core_.tree.Info(record.id);
    if (!info.ok()) return {};
    VerifyRun run;
    // Only a reading of the whole segment lifts a quarantine.
    if (!info->quarantined) run.from = from;
    run.window_pages = kScrubWindowPages;
    run.blobs = IoPriority::kScrub;
    ScrubPosition at = run.from;
    uint64_t unnoted = 0;
    run.page_done = [&](const SegmentRecord& now, uint64_t n) {
      if (at.file != now.file) at = {now.file, 0};
      at.next_page += n;
      core_.counters.scrub_bytes += n * kPageBytes;
      const bool go_on = pacer_.Took(n * kPageBytes);
      if (!go_on || (unnoted += n) >= kPagesPerNote) {
        Note(at);
        unnoted = 0;
      }
      return go_on;
    };
    VerifyReport report;
    PREFIXD_TRY(core_.verifier->VerifySegment(record, run, report));
    core_.counters.scrub_damaged += report.damaged.size();
    for (const std::string& what : report.damaged) LogWarning("scrub: " + what);
    // What could not be read has its next turn behind all others, as if it had been.
    for (const std::string& what : report.unread) LogWarning("scrub: not read: " + what);
    Done(record.id);
    const uint64_t blob_bytes = core_.blobs->BytesOf(record.id);
    core_.counters.scrub_bytes += blob_bytes;
    if (pacer_.Took(blob_bytes)) return {};
    return Error{Code::kCancelled, "the scrub was stopped"};
  }

 private:
  void Note(const ScrubPosition& at) {
    if (Status noted = core_.catalog->SetScrubPosition(at); !noted.ok()) {
      LogWarning(noted.error().message);
    }
  }

  void Done(const SegmentId& id) {
    Note({});
    std::lock_guard commit(core_.commit_mutex);  // a segment just removed must get no row
    // Times are unique, so that the segment verified last is always the last to be due.
    const int64_t now = core_.last_verified_ms = std::max(NowUnixMs(), core_.last_verified_ms + 1);
    if (!core_.tree.SetVerified(id, now)) return;
    if (Status noted = core_.catalog->SetVerified(id, now); !noted.ok()) {
      LogWarning(noted.error().message);
    }
  }

  StoreCore& core_;
  Pacer pacer_;
};

// Returns the time, but never one before the last stored one, which may run a little ahead.
int64_t Now(StoreCore& core) {
  std::lock_guard commit(core.commit_mutex);
  return std::max(NowUnixMs(), core.last_verified_ms);
}

// When the clock was set back, nothing of what it said before is known to be true: all is due.
void HeedClock(StoreCore& core) {
  std::lock_guard commit(core.commit_mutex);
  const int64_t now = NowUnixMs();
  const int64_t before = std::exchange(core.scrub_clock_ms, now);
  if (before <= now + kClockSlackMs) return;
  core.last_verified_ms = 0;
  for (const SegmentRecord& record : core.tree.Records()) {
    core.tree.SetVerified(record.id, kUnknownTimeMs);
  }
}

}  // namespace

Result<int64_t> ScrubStore(StoreCore& core, const ScrubOptions& options) {
  if (options.bytes_per_second == 0 || options.interval_ms < 0 || !options.wait) {
    return InvalidArgument("a scrub needs a rate, an interval and a way to wait");
  }
  HeedClock(core);
  Scrub scrub(core, options);
  // Verified by this call: not due again within it, however short the interval.
  std::set<SegmentId> done;
  while (true) {
    const auto next = core.tree.LeastRecentlyVerified();
    if (!next) return NowUnixMs() + options.interval_ms;
    const int64_t due = next->second + options.interval_ms;
    if (due > Now(core) || !done.insert(next->first.id).second) return due;
    PREFIXD_TRY(scrub.Segment(next->first));
  }
}

}  // namespace prefixd::storage
