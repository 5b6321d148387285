// Tests runs of rows: the same bytes as row by row, wherever the caller wants them, in every
// layout.
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

constexpr std::byte kUntouched{0xA5};

class RunsTest : public OpenStoreTest {
 protected:
  static ReclusterOptions Shuffled(size_t row_bytes, uint32_t chunk_tokens, uint64_t seed) {
    ReclusterOptions options;
    options.chunk_tokens = chunk_tokens;
    options.order = [=](uint32_t layer, uint32_t head, uint32_t chunk,
                        std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
      std::vector<uint32_t> order(rows.size() / row_bytes);
      std::iota(order.begin(), order.end(), 0);
      std::ranges::shuffle(order, std::mt19937_64(seed + Mix(layer * 100 + head * 10000 + chunk)));
      return order;
    };
    return options;
  }

  // Reads random runs of the prefix with these tokens to random places, and compares every byte.
  void ExpectRuns(const SegmentId& id, std::span<const uint32_t> tokens, int rounds,
                  std::mt19937_64& rng) {
    const auto opened = store_->OpenPrefix(id, 0);
    ASSERT_OK(opened);
    const auto states = States(tokens);
    const KvGeometry& g = model_.geometry;
    const RowShape row = g.row(0);
    const size_t key = row.key_bytes(), value = row.value_bytes();
    for (int round = 0; round < rounds; ++round) {
      const auto layer = static_cast<uint32_t>(rng() % g.n_layers);
      const auto head = static_cast<uint32_t>(rng() % g.n_kv_heads);
      const auto part = static_cast<RowPart>(rng() % 3);
      TokenRange run{static_cast<uint32_t>(rng() % tokens.size()), 0};
      run.end = run.begin + static_cast<uint32_t>(1 + rng() % (tokens.size() - run.begin));
      if (round == 0) run = {0, static_cast<uint32_t>(tokens.size())};
      const size_t gap = rng() % 3 * 8;
      const bool apart = part == RowPart::kRow && rng() % 2 == 0;
      // Where the first part of an item lies, and the value where it has a place of its own.
      const size_t first = apart ? key : PartBytes(row, part);
      const size_t stride = first + gap, value_stride = value + gap;
      std::vector<std::byte> out(run.size() * stride, kUntouched);
      std::vector<std::byte> values(apart ? run.size() * value_stride : 0, kUntouched);
      const RowSink sink =
          apart ? RowSink{out, stride, values, value_stride} : RowSink{out, stride, {}, 0};
      const auto use = rng() % 2 == 0 ? RangeUse::kShared : RangeUse::kOwn;
      ASSERT_OK((*opened)->ReadRange(layer, head, run, part, sink, use, nullptr));
      std::vector<std::byte> want(row.bytes());
      for (uint32_t i = 0; i < run.size(); ++i) {
        FillRow(states[run.begin + i], layer, head, want);
        const std::byte* item = out.data() + i * stride;
        const size_t from = part == RowPart::kValue ? key : 0;
        ASSERT_EQ(std::memcmp(item, want.data() + from, first), 0) << round << " token " << i;
        ASSERT_TRUE(
            std::all_of(item + first, item + stride, [](std::byte b) { return b == kUntouched; }))
            << round << " behind token " << i;
        if (!apart) continue;
        item = values.data() + i * value_stride;
        ASSERT_EQ(std::memcmp(item, want.data() + key, value), 0) << round << " value " << i;
        ASSERT_TRUE(std::all_of(item + value, item + value_stride,
                                [](std::byte b) { return b == kUntouched; }))
            << round << " behind value " << i;
      }
    }
  }
};

TEST_F(RunsTest, AnyRunGoesAnywhere) {
  std::mt19937_64 rng(Seed("RunsTest.AnyRunGoesAnywhere"));
  const std::array<uint32_t, 9> dims = {1, 20, 32, 64, 96, 128, 512, 1000, 1024};
  for (int round = 0; round < 24; ++round) {
    KvGeometry g = TestGeometry(2, 1 + rng() % 3, dims[rng() % dims.size()],
                                rng() % 2 == 0 ? DType::kBf16 : DType::kF32);
    if (rng() % 3 == 0) g.value_dim = dims[rng() % dims.size()];
    SCOPED_TRACE(std::to_string(g.key_dim) + " and " + std::to_string(g.value_dim));
    model_ = TestModel("m" + std::to_string(round), g);
    Open();
    const auto tokens = RandomTokens(rng, 40 + rng() % 300, 1'000'000);
    const SegmentId id = Stored(tokens);
    ExpectRuns(id, tokens, 12, rng);
    const auto chunk = static_cast<uint32_t>(1 + rng() % 150);
    ASSERT_OK(store_->Recluster(id, Shuffled(g.row(0).bytes(), chunk, rng())));
    ExpectRuns(id, tokens, 24, rng);
    // A prefix of two segments, of which the second begins in no page.
    const auto longer = Join(tokens, RandomTokens(rng, 100 + rng() % 100, 1'000'000));
    ExpectRuns(Stored(longer), longer, 12, rng);
  }
}

// So many bytes go past the caches.
TEST_F(RunsTest, LongRunsGoAnywhere) {
  std::mt19937_64 rng(Seed("RunsTest.LongRunsGoAnywhere"));
  model_ = TestModel("long", TestGeometry(1, 1, 64));
  Open();
  const auto tokens = RandomTokens(rng, 40'000, 1'000'000);
  const SegmentId id = Stored(tokens);
  ExpectRuns(id, tokens, 4, rng);
  ASSERT_OK(store_->Recluster(id, Shuffled(model_.geometry.row(0).bytes(), 4096, rng())));
  ExpectRuns(id, tokens, 4, rng);
}

}  // namespace
}  // namespace prefixd::storage
