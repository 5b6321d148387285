#include "bench/attention/floors.h"

#include <atomic>
#include <cstring>

#include "bench/attention/timing.h"

namespace prefixd::bench {
namespace {

// A sum that depends on all of [at, at + n), n a multiple of 64.
uint64_t Touch(const std::byte* at, size_t n) {
  uint64_t sum[8] = {}, word[8];
  for (size_t i = 0; i < n; i += sizeof word) {
    std::memcpy(word, at + i, sizeof word);
    for (int l = 0; l < 8; ++l) sum[l] += word[l];
  }
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

}  // namespace

double ReadBandwidth(Team& team, const RowMemory& memory, size_t begin, size_t bytes) {
  constexpr size_t kPiece = size_t{1} << 20;
  std::atomic<uint64_t> sink{0};
  const double seconds = Seconds([&] {
    team.ForEach(bytes / kPiece,
                 [&](size_t p) { sink += Touch(memory.data() + begin + p * kPiece, kPiece); });
  });
  return static_cast<double>(bytes / kPiece * kPiece) / seconds;
}

double GatherSeconds(Team& team, const Layers& layers, size_t layer,
                     const std::vector<uint32_t>& ids) {
  constexpr size_t kAhead = 16;
  const size_t k = ids.size() / kKvHeads;
  std::atomic<uint64_t> sink{0};
  return Seconds([&] {
    team.ForEach(kKvHeads, [&](size_t h) {
      const RowsView rows = layers.Head(layer, h);
      const uint32_t* id = ids.data() + h * k;
      uint64_t sum = 0;
      for (size_t i = 0; i < k; ++i) {
        for (size_t line = 0; i + kAhead < k && line < kRow.bytes(); line += 64) {
          __builtin_prefetch(rows.key(id[i + kAhead]) + line);
        }
        sum += Touch(rows.key(id[i]), kRow.bytes());
      }
      sink += sum;
    });
  });
}

}  // namespace prefixd::bench
