#include "bench/attention/floors.h"

#include <atomic>

#include "bench/attention/timing.h"
#include "bench/support/read_bandwidth.h"

namespace prefixd::bench {
namespace {

// What was the fastest of some twenty ways here: the page walk and the first line of a row far
// ahead of its use, of the rest every other line nearer by, since the second-level cache brings
// lines in pairs.
constexpr size_t kFar = 64, kNear = 32;

template <typename Vec>
inline __attribute__((always_inline)) uint64_t SumOfRows(const RowsView& rows, const uint32_t* ids,
                                                         size_t k) {
  uint64_t sum = 0;
  for (size_t i = 0; i < k; ++i) {
    if (i + kFar < k) __builtin_prefetch(rows.key(ids[i + kFar]), 0, 2);
    for (size_t line = 0; i + kNear < k && line < kRow.bytes(); line += 128) {
      __builtin_prefetch(rows.key(ids[i + kNear]) + line);
    }
    sum += SumOfLines<Vec>(rows.key(ids[i]), kRow.bytes());
  }
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) uint64_t SumOfWideRows(const RowsView& rows, const uint32_t* ids,
                                                          size_t k) {
  return SumOfRows<Words8>(rows, ids, k);
}
#endif

uint64_t TouchRows(const RowsView& rows, const uint32_t* ids, size_t k) {
#if defined(__x86_64__)
  if (HasWideLoads()) return SumOfWideRows(rows, ids, k);
#endif
  return SumOfRows<Words2>(rows, ids, k);
}

}  // namespace

double ReadBandwidth(Team& team, const RowMemory& memory, size_t begin, size_t bytes) {
  constexpr size_t kPiece = size_t{1} << 20;
  std::atomic<uint64_t> sink{0};
  const double seconds = Seconds([&] {
    team.ForEach(bytes / kPiece,
                 [&](size_t p) { sink += TouchLines(memory.data() + begin + p * kPiece, kPiece); });
  });
  return static_cast<double>(bytes / kPiece * kPiece) / seconds;
}

double GatherSeconds(Team& team, const Layers& layers, size_t layer,
                     const std::vector<uint32_t>& ids) {
  const size_t k = ids.size() / kKvHeads;
  std::atomic<uint64_t> sink{0};
  return Seconds([&] {
    team.ForEach(kKvHeads, [&](size_t h) {
      sink += TouchRows(layers.Head(layer, h), ids.data() + h * k, k);
    });
  });
}

}  // namespace prefixd::bench
