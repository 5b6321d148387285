#include "bench/attention/floors.h"

#include <atomic>

#include "bench/attention/timing.h"
#include "measure/timing/read_bandwidth.h"

namespace prefixd::bench {
namespace {

// Says how many pieces ahead of their use the cache prefetch runs: `first` for the first line,
// which also brings the address of its page (0: no prefetch of its own), and `all` for every line,
// `step` bytes apart.
struct Ahead {
  size_t first = 0, all = 0, step = 64;
};
// These distances were the fastest of some twenty on the development machine. Rows fetch every
// other line, because the second-level cache brings lines in pairs.
constexpr Ahead kPrefetcher{64, 32, 128};
constexpr Ahead PrefetchPieces(size_t bytes) { return {0, (size_t{8} << 10) / bytes, 64}; }

template <typename Vec, typename AddressOf>
inline __attribute__((always_inline)) uint64_t SumOfPieces(const AddressOf& piece, size_t k,
                                                           size_t bytes, Ahead ahead) {
  uint64_t sum = 0;
  for (size_t i = 0; i < k; ++i) {
    if (ahead.first > 0 && i + ahead.first < k) __builtin_prefetch(piece(i + ahead.first), 0, 2);
    for (size_t line = 0; i + ahead.all < k && line < bytes; line += ahead.step) {
      __builtin_prefetch(piece(i + ahead.all) + line);
    }
    sum += SumOfLines<Vec>(piece(i), bytes);
  }
  return sum;
}

#if defined(__x86_64__)
template <typename AddressOf>
__attribute__((target("avx512f"))) uint64_t SumOfWidePieces(const AddressOf& piece, size_t k,
                                                            size_t bytes, Ahead ahead) {
  return SumOfPieces<Words8>(piece, k, bytes, ahead);
}
#endif

template <typename AddressOf>
uint64_t TouchPieces(const AddressOf& piece, size_t k, size_t bytes, Ahead ahead) {
#if defined(__x86_64__)
  if (HasWideLoads()) return SumOfWidePieces(piece, k, bytes, ahead);
#endif
  return SumOfPieces<Words2>(piece, k, bytes, ahead);
}

}  // namespace

double ReadBandwidth(Team& team, const RowMemory& memory, size_t begin, size_t bytes) {
  constexpr size_t kPiece = size_t{1} << 20;
  std::atomic<uint64_t> sink{0};
  const double seconds = Seconds([&] {
    team.ForEach(bytes / kPiece,
                 [&](size_t p) { sink += TouchLines(memory.data() + begin + p * kPiece, kPiece); });
  });
  const auto copied = bytes / kPiece * kPiece;  // whole pieces
  return static_cast<double>(copied) / seconds;
}

double GatherSeconds(Team& team, const Layers& layers, size_t layer,
                     const std::vector<uint32_t>& ids) {
  const size_t k = ids.size() / kKvHeads;
  std::atomic<uint64_t> sink{0};
  return Seconds([&] {
    team.ForEach(kKvHeads, [&](size_t h) {
      const RowsView rows = layers.Head(layer, h);
      const uint32_t* of_head = ids.data() + h * k;
      sink +=
          TouchPieces([=](size_t i) { return rows.key(of_head[i]); }, k, kRow.bytes(), kPrefetcher);
    });
  });
}

double PiecesSeconds(Team& team, const std::vector<std::vector<Pieces>>& heads) {
  std::atomic<uint64_t> sink{0};
  return Seconds([&] {
    team.ForEach(heads.size(), [&](size_t h) {
      for (const Pieces& list : heads[h]) {
        const auto piece = [&list](size_t i) { return list.array + list.at[i] * list.stride; };
        sink += TouchPieces(piece, list.at.size(), list.bytes, PrefetchPieces(list.bytes));
      }
    });
  });
}

}  // namespace prefixd::bench
