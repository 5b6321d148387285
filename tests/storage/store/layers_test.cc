// Tests models whose layers differ, from the put to the recovery of a lost catalog.
#include <map>

#include "storage/recover/recover.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

namespace fs = std::filesystem;

// As the model's; more heads; no rows; rows larger than a page; odd dimensions.
KvGeometry Differing() {
  KvGeometry g = TestGeometry(5);
  g.layers[1].n_q_heads = g.layers[1].n_kv_heads = 6;
  g.layers[2].stored = false;
  g.layers[3].key_dim = 1024, g.layers[3].value_dim = 1023;
  g.layers[4].n_kv_heads = 4, g.layers[4].key_dim = 7, g.layers[4].value_dim = 90;
  return g;
}

class LayersTest : public OpenStoreTest {
 protected:
  LayersTest() {
    model_ = TestModel("m", Differing());
    Open();
  }

  // Back to front, whatever a layer's rows are.
  ReclusterOptions BackToFront() const {
    ReclusterOptions options;
    options.chunk_tokens = 32;
    options.order = [g = model_.geometry](
                        uint32_t layer, uint32_t, uint32_t,
                        std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
      EXPECT_EQ(rows.size() % g.row(layer).bytes(), 0u);
      std::vector<uint32_t> order(rows.size() / g.row(layer).bytes());
      std::iota(order.rbegin(), order.rend(), 0);
      return order;
    };
    return options;
  }
};

TEST_F(LayersTest, RowsReadTheSameWhereverTheyLie) {
  const auto first = Iota(100), longer = Join(first, Iota(70, 1000));
  const SegmentId a = Stored(first), b = Stored(longer);
  ExpectWhole(a, first);
  ExpectWhole(b, longer);
  ASSERT_OK(store_->Recluster(a, BackToFront()));
  EXPECT_TRUE(store_->GetPrefix(a)->reclustered);
  ExpectWhole(b, longer);
  const auto compacted = store_->Compact(b, 1000);
  ASSERT_OK(compacted);
  ExpectWhole(b, longer);
  ASSERT_OK(store_->Recluster(*compacted, BackToFront()));
  ExpectWhole(b, longer);
  Open();
  ExpectWhole(a, first);
  ExpectWhole(b, longer);
  ExpectSound();
}

TEST_F(LayersTest, PartsWriteTheirShareOfEachLayer) {
  const auto tokens = Iota(130);
  auto writer = store_->BeginPut("m", "t", tokens, "parts");
  ASSERT_OK(writer);
  ASSERT_OK(WriteAll(**writer, model_.geometry, RowsFrom(States(tokens)), 37, true, 1));
  const auto id = (*writer)->Commit();
  ASSERT_OK(id);
  ExpectWhole(*id, tokens);
  auto wrong = store_->BeginPut("m", "t", Iota(10, 5000), "wrong");
  ASSERT_OK(wrong);
  EXPECT_CODE((*wrong)->WriteRows(2, 5000, 1, {}), Code::kInvalidArgument);
  const auto rows = RowsOf(model_.geometry, States(Iota(10, 5000)), 1, 0, 10);
  EXPECT_CODE((*wrong)->WriteRows(0, 0, 10, rows), Code::kInvalidArgument);
  ASSERT_OK((*wrong)->WriteRows(1, 0, 10, rows));
  const Status lacks = (*wrong)->CheckComplete({});
  EXPECT_CODE(lacks, Code::kFailedPrecondition);
  EXPECT_NE(lacks.error().message.find("layer 0 lacks"), std::string::npos);
}

TEST_F(LayersTest, DamageInAnyLayerIsFoundAndLeavesTheOthers) {
  const auto tokens = Iota(90), other = Iota(50, 7000);
  const SegmentId id = Stored(tokens), sound = Stored(other);
  SegmentHeader header;
  header.SetGeometry(model_.geometry);
  header.tokens = {0, 90};
  const SegmentLayout layout = *header.Layout();
  options_.host_tier_bytes = 0;
  for (const uint32_t layer : {0, 1, 3, 4}) {
    const uint32_t last = layout.heads.heads_in(layer) - 1;
    const uint64_t at = layout.KeyAddress(layer, last, 89);
    FlipByte(FileOf(id), at);
    Open();
    {
      const auto prefix = store_->OpenPrefix(id, 0);
      ASSERT_OK(prefix);
      std::vector<std::byte> rows(90 * model_.geometry.row(layer).bytes());
      EXPECT_CODE((*prefix)->ReadRange(layer, last, {0, 90}, rows, nullptr), Code::kCorrupt);
    }
    const auto report = store_->Verify(&id, nullptr);
    ASSERT_OK(report);
    EXPECT_EQ(report->damaged.size(), 1u);
    FlipByte(FileOf(id), at);
    ASSERT_OK(store_->Verify(&id, nullptr));
    Open();
    ExpectWhole(id, tokens);
    ExpectWhole(sound, other);
  }
}

TEST_F(LayersTest, TheCatalogIsMadeAgainFromTheSegments) {
  const auto first = Iota(64), longer = Join(first, Iota(33, 1000));
  const SegmentId a = Stored(first), b = Stored(longer);
  ASSERT_OK(store_->Recluster(a, BackToFront()));
  store_.reset();
  fs::remove_all(options_.dir / "catalog");
  RecoverOptions recover;
  recover.dir = options_.dir;
  recover.verify_data = true;
  const auto report =
      RecoverCatalog(recover, [](uint64_t, uint64_t, std::string_view) { return true; });
  ASSERT_OK(report);
  Open();
  EXPECT_EQ(store_->ListModels().at(0).geometry, model_.geometry);
  ExpectWhole(a, first);
  ExpectWhole(b, longer);
}

TEST_F(LayersTest, AFullStoreEvictsAndStoresTheRest) {
  const SegmentId one = Stored(Iota(64));
  const uint64_t bytes = store_->GetPrefix(one)->own_bytes;
  options_.quota_bytes = 3 * bytes;
  Open();
  SegmentId last = one;
  for (uint32_t i = 1; i < 8; ++i) last = Stored(Iota(64, 1000 * i));
  EXPECT_GT(store_->stats().evictions, 0u);
  EXPECT_LE(store_->stats().bytes_on_disk, 3 * bytes);
  ExpectWhole(last, Iota(64, 7000));
}

// A file of another geometry never counts as a model's, whatever it says of itself.
TEST_F(LayersTest, HeadersAreComparedLayerByLayer) {
  SegmentHeader header;
  header.SetGeometry(model_.geometry);
  EXPECT_TRUE(header.IsOf(model_.geometry));
  EXPECT_EQ(header.incompat, kIncompatLayers);
  EXPECT_FALSE(header.IsOf(TestGeometry(5)));
  KvGeometry other = model_.geometry;
  other.layers[4].value_dim = 91;
  EXPECT_FALSE(header.IsOf(other));
  header.SetGeometry(TestGeometry(5));
  EXPECT_EQ(header.incompat, 0u);
  EXPECT_TRUE(header.layers.empty());
  EXPECT_FALSE(header.IsOf(model_.geometry));
}

}  // namespace
}  // namespace prefixd::storage
