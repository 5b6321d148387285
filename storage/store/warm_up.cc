#include "storage/store/warm_up.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "storage/read/page_reader.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {
namespace {

// Of more prefixes, small ones, it would open more files than its reads save.
constexpr size_t kMostPrefixes = 4096;
constexpr size_t kIdsAtOnce = 1024;
// Read at a time: a step that comes meanwhile soon finds the disk free.
constexpr size_t kPages = 64;

struct Used {
  int64_t unix_ms;
  SegmentId id;
  auto operator<=>(const Used&) const = default;
};

// Lists the prefixes used last, the last one first.
std::vector<Used> UsedLast(StoreCore& core) {
  std::vector<Used> used;
  PrefixTree::Place place;
  while (true) {
    const auto ids = core.tree.IdsAfter(place, kIdsAtOnce, /*one_tenant=*/false);
    for (const PrefixTree::Place& next : ids) {
      const auto info = core.segments->Info(next.id);
      if (!info.ok() || !info->listed || info->live || info->quarantined) continue;
      used.push_back({info->last_used_unix_ms, info->id});
    }
    const size_t most = std::min(used.size(), kMostPrefixes);
    std::ranges::partial_sort(used, used.begin() + static_cast<ptrdiff_t>(most), std::greater<>());
    used.resize(most);
    if (ids.size() < kIdsAtOnce) return used;
    place = ids.back();
  }
}

class Warming {
 public:
  Warming(StoreCore& core, const WarmUpOptions& options) : core_(core), options_(options) {}

  // kResourceExhausted: there is no room for more.
  Status Prefix(const SegmentId& id) {
    if (!core_.tree.Alive(id, NowUnixMs())) return {};
    PREFIXD_ASSIGN(const SegmentRecord record, core_.tree.Record(id));
    PREFIXD_ASSIGN(const auto file, core_.segments->Open(id));
    const uint64_t before = done_.bytes;
    PREFIXD_TRY(Segment(id, *file, *core_.tier->ForTenant(record.tenant)));
    if (done_.bytes > before) ++done_.prefixes;
    return {};
  }

  const WarmedUp& done() const { return done_; }

 private:
  // Holds the segment while it reads a few pages, and not while it rests: others may want it gone.
  Status Segment(const SegmentId& id, const SegmentFile& file, TierRegion& tier) {
    const uint64_t end = file.layout().token_page;  // of the pages with rows, which begin at 1
    for (uint64_t at = 1; at < end; at += kPages) {
      if (*options_.stop) return Error{Code::kCancelled, "the store is closing"};
      std::vector<uint64_t> pages(std::min<uint64_t>(kPages, end - at));
      std::iota(pages.begin(), pages.end(), at);
      PREFIXD_ASSIGN(const uint64_t bytes, Pages(id, file, pages, tier));
      if (bytes > 0 && options_.rest) options_.rest();
    }
    return {};
  }

  // Returns how many bytes came from the disk.
  Result<uint64_t> Pages(const SegmentId& id, const SegmentFile& file,
                         std::span<const uint64_t> pages, TierRegion& tier) {
    PREFIXD_ASSIGN(const ChainPin pin, core_.tree.PinSegment(id));
    if (core_.tree.Claimed(id) || pin.chain().back().file != file.header().file) {
      return Error{Code::kUnavailable, "somebody rewrites or removes the segment"};
    }
    ReadServices services = core_.services;
    services.tier = &tier;
    ReadStats stats;
    // A scan takes nobody's place.
    const Status read =
        ReadPagesAhead(services, file, pages, {.access = Access::kScan, .pages_at_once = kPages},
                       *options_.stop, &stats);
    const uint64_t bytes = stats.bytes[static_cast<size_t>(Tier::kSsd)];
    done_.bytes += bytes;
    core_.counters.warmed_bytes += bytes;
    PREFIXD_TRY(read);
    return bytes;
  }

  StoreCore& core_;
  const WarmUpOptions& options_;
  WarmedUp done_;
};

}  // namespace

Result<WarmedUp> WarmUp(StoreCore& core, const WarmUpOptions& options) {
  if (options.stop == nullptr) return InvalidArgument("a warm-up needs a flag that ends it");
  if (core.options.host_tier_bytes < kPageBytes) return WarmedUp();
  Warming warming(core, options);
  for (const Used& used : UsedLast(core)) {
    const Status warmed = warming.Prefix(used.id);
    if (warmed.ok()) continue;
    if (warmed.error().code == Code::kCancelled) return warmed.error();
    if (warmed.error().code == Code::kResourceExhausted) break;
    // Whoever asks for this one learns why it cannot be read.
  }
  return warming.done();
}

}  // namespace prefixd::storage
