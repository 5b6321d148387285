// Tests rows in place: the same bytes as copies, wherever they lie.
#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <string>

#include "attention/rows/rows.h"
#include "storage/segment/segment_format.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {
namespace {

class RowViewsTest : public OpenStoreTest {
 protected:
  // Puts rows of small numbers, which can be encoded too.
  Result<SegmentId> PutNumbers(std::span<const uint32_t> tokens, RowEncoding encoding) {
    PREFIXD_ASSIGN(auto writer,
                   store_->BeginPut(model_.name, "t", tokens, "", {.encoding = encoding}));
    const KvGeometry& g = model_.geometry;
    const TokenRange range = writer->range();
    std::vector<float> numbers(size_t{g.n_kv_heads} * range.size() * (g.key_dim + g.value_dim));
    std::vector<std::byte> rows(numbers.size() * DTypeBytes(g.dtype));
    for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
      for (size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = float(Mix(i + layer + tokens.size()) % 1000) / 100;
      }
      FromFloat(g.dtype, numbers, rows.data());
      PREFIXD_TRY(writer->WriteRows(layer, range.begin, range.size(), rows));
    }
    return writer->Commit();
  }

  // Puts a prompt of n tokens as given and opens it.
  Result<std::shared_ptr<const StoredPrefix>> PutAndOpened(uint32_t n) {
    PREFIXD_ASSIGN(id_, PutNumbers(Iota(n), RowEncoding::kAsGiven));
    return store_->OpenPrefix(id_, 0);
  }

  // Checks views of random rows in random order of parts, one after the other in the same memory.
  void ExpectViews(const SegmentId& id, std::mt19937_64& rng) {
    const auto opened = store_->OpenPrefix(id, 0);
    ASSERT_OK(opened);
    const StoredPrefix& prefix = **opened;
    const RowShape row = model_.geometry.row(0);
    RowViews views;
    for (int round = 0; round < 30; ++round) {
      const auto layer = static_cast<uint32_t>(rng() % model_.geometry.n_layers);
      const auto head = static_cast<uint32_t>(rng() % model_.geometry.n_kv_heads);
      const auto part = static_cast<RowPart>(rng() % 3);
      std::vector<uint32_t> ids;
      const size_t step = 1 + rng() % 30;
      for (uint32_t t = static_cast<uint32_t>(rng() % 50); t < prefix.n_tokens();
           t += static_cast<uint32_t>(1 + rng() % step)) {
        ids.push_back(t);
      }
      std::vector<std::byte> want(ids.size() * row.bytes());
      ASSERT_OK(prefix.ReadRows(layer, head, ids, want, nullptr));
      ReadStats stats;
      ASSERT_OK(prefix.ViewRows(layer, head, ids, part, views, &stats));
      ASSERT_EQ(views.rows.size(), ids.size());
      EXPECT_GT(stats.pages_host + stats.pages_ssd, 0u);
      for (size_t i = 0; i < ids.size(); ++i) {
        const std::byte* expected = want.data() + i * row.bytes();
        if (part != RowPart::kValue) {
          ASSERT_EQ(std::memcmp(views.rows[i].key, expected, row.key_bytes()), 0)
              << "key of token " << ids[i] << ", round " << round;
        }
        if (part != RowPart::kKey) {
          ASSERT_EQ(std::memcmp(views.rows[i].value, expected + row.key_bytes(), row.value_bytes()),
                    0)
              << "value of token " << ids[i] << ", round " << round;
        }
      }
    }
  }

  // Checks that a visit gives every row of the first n_tokens (0: all) once, in any order.
  void ExpectVisits(const SegmentId& id, uint32_t n_tokens, RowViews& room) {
    SCOPED_TRACE(n_tokens);
    const auto opened = store_->OpenPrefix(id, n_tokens);
    ASSERT_OK(opened);
    const StoredPrefix& prefix = **opened;
    const RowShape row = model_.geometry.row(0);
    for (uint32_t run = 0; run < model_.geometry.n_layers * model_.geometry.n_kv_heads; ++run) {
      const uint32_t layer = run / model_.geometry.n_kv_heads;
      const uint32_t head = run % model_.geometry.n_kv_heads;
      std::vector<std::byte> want(prefix.n_tokens() * row.bytes()), got;
      ASSERT_OK(prefix.ReadRange(layer, head, {0, prefix.n_tokens()}, want, nullptr));
      ReadStats stats;
      ASSERT_OK(prefix.VisitRows(
          layer, head, room,
          [&](std::span<const RowRef> rows) -> Status {
            EXPECT_FALSE(rows.empty());
            for (const RowRef& r : rows) {
              got.insert(got.end(), r.key, r.key + row.key_bytes());
              got.insert(got.end(), r.value, r.value + row.value_bytes());
            }
            return {};
          },
          &stats));
      EXPECT_GT(stats.pages_host + stats.pages_ssd, 0u);
      ASSERT_EQ(Sorted(got), Sorted(want)) << "run " << run;
    }
  }
  std::vector<std::string> Sorted(const std::vector<std::byte>& rows) const {
    const size_t bytes = model_.geometry.row(0).bytes();
    std::vector<std::string> out;
    for (size_t at = 0; at + bytes <= rows.size(); at += bytes) {
      out.emplace_back(reinterpret_cast<const char*>(rows.data()) + at, bytes);
    }
    EXPECT_EQ(rows.size() % bytes, 0u);
    std::sort(out.begin(), out.end());
    return out;
  }

  SegmentId id_;  // the prompt of PutAndOpened
};

// One chain holds reclustered, arrival and encoded rows; the host tier has room for all, for less
// than a view, or is absent.
TEST_F(RowViewsTest, AreTheRows) {
  std::mt19937_64 rng(Seed("RowViews"));
  for (const uint64_t tier : {uint64_t{4} << 20, uint64_t{32} << 10, uint64_t{0}}) {
    SCOPED_TRACE(tier);
    options_.host_tier_bytes = tier;
    Open();
    const auto first = static_cast<uint32_t>(tier >> 10) + 1;  // other tokens for each
    const auto reclustered = PutNumbers(Iota(600, first), RowEncoding::kAsGiven);
    ASSERT_OK(reclustered);
    ReclusterOptions recluster;
    recluster.chunk_tokens = 256;
    const size_t row_bytes = model_.geometry.row(0).bytes();
    recluster.order = [row_bytes](
                          uint32_t, uint32_t, uint32_t,
                          std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
      std::vector<uint32_t> order(rows.size() / row_bytes);
      std::iota(order.rbegin(), order.rend(), 0);
      return order;
    };
    ASSERT_OK(store_->Recluster(*reclustered, recluster));
    ASSERT_OK(PutNumbers(Iota(1000, first), RowEncoding::kAsGiven));
    const auto encoded = PutNumbers(Iota(1300, first), RowEncoding::kInt8);
    ASSERT_OK(encoded);
    ExpectViews(*encoded, rng);
    RowViews room;
    room.rows.resize(7);  // left from a use before
    for (const uint32_t n : {0u, 1u, 1 + static_cast<uint32_t>(rng() % 1300), 600u, 601u}) {
      ExpectVisits(*encoded, n, room);
    }
  }
}

// A visit covers several batches of several chunks, of a prefix that is cut in the middle of one;
// keys and values have different sizes, which fill no page; as given and encoded; with a tier for a
// part of them.
TEST_F(RowViewsTest, VisitsOfManyRows) {
  std::mt19937_64 rng(Seed("RowVisitsMany"));
  KvGeometry geometry = TestGeometry(1, 1, 23, DType::kF32);
  geometry.value_dim = 21;
  model_ = TestModel("uneven", geometry);
  const size_t row_bytes = geometry.row(0).bytes();
  options_.host_tier_bytes = 8u << 20;
  Open();
  ReclusterOptions recluster;
  recluster.chunk_tokens = 30000;
  recluster.order = [&rng, row_bytes](
                        uint32_t, uint32_t, uint32_t,
                        std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
    std::vector<uint32_t> order(rows.size() / row_bytes);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    return order;
  };
  RowViews room;
  uint32_t first = 1;
  for (const RowEncoding encoding : {RowEncoding::kAsGiven, RowEncoding::kInt8}) {
    const auto id = PutNumbers(Iota(50000, first++), encoding);
    ASSERT_OK(id);
    ExpectVisits(*id, 0, room);
    ExpectVisits(*id, 26000, room);
    ASSERT_OK(store_->Recluster(*id, recluster));
    for (const uint32_t n : {0u, 3u, 20000u, 30001u, 47000u}) ExpectVisits(*id, n, room);
  }
}

// A cut prefix is charged for its own rows.
TEST_F(RowViewsTest, VisitsChargeWhatIsWanted) {
  options_.host_tier_bytes = 4u << 20;
  Open();
  const auto id = PutNumbers(Iota(600), RowEncoding::kAsGiven);
  ASSERT_OK(id);
  const size_t row_bytes = model_.geometry.row(0).bytes();
  ASSERT_OK(store_->Recluster(*id, Reversed(row_bytes, 256)));
  const auto opened = store_->OpenPrefix(*id, 300);
  ASSERT_OK(opened);
  RowViews room;
  const RowVisitor nothing = [](std::span<const RowRef>) { return Status(); };
  ASSERT_OK((*opened)->VisitRows(0, 0, room, nothing, nullptr));
  ReadStats warm;
  ASSERT_OK((*opened)->VisitRows(0, 0, room, nothing, &warm));
  EXPECT_EQ(warm.bytes[static_cast<size_t>(Tier::kHost)], 300 * row_bytes);
}

// A visit reads the missing rows into the tier where there is room; it pins nothing afterwards,
// also when it ends with the visitor's error or exception.
TEST_F(RowViewsTest, VisitsBringWhatIsMissingAndHoldNothing) {
  options_.host_tier_bytes = 4u << 20;
  Open();
  const auto opened = PutAndOpened(600);
  ASSERT_OK(opened);
  RowViews room;
  ReadStats cold, warm;
  const RowVisitor nothing = [](std::span<const RowRef>) { return Status(); };
  ASSERT_OK((*opened)->VisitRows(0, 0, room, nothing, &cold));
  ASSERT_OK((*opened)->VisitRows(0, 0, room, nothing, &warm));
  EXPECT_GT(cold.pages_ssd, 0u);
  EXPECT_EQ(warm.pages_ssd, 0u);
  EXPECT_EQ(warm.bytes[static_cast<size_t>(Tier::kHost)], 600 * model_.geometry.row(0).bytes());
  const Status status = (*opened)->VisitRows(
      0, 0, room,
      [](std::span<const RowRef>) {
        return Error{Code::kCancelled, "enough"};
      },
      nullptr);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kCancelled);
  EXPECT_EQ(room.hold, nullptr);
  EXPECT_TRUE(room.rows.empty());
  const RowVisitor throws = [](std::span<const RowRef>) -> Status { throw std::bad_alloc(); };
  EXPECT_THROW((void)(*opened)->VisitRows(0, 0, room, throws, nullptr), std::bad_alloc);
  EXPECT_EQ(room.hold, nullptr);
  EXPECT_FALSE((*opened)->VisitRows(7, 0, room, nothing, nullptr).ok());
}

TEST_F(RowViewsTest, OfRowsLargerThanAPage) {
  std::mt19937_64 rng(Seed("RowViewsLarge"));
  model_ = TestModel("large", TestGeometry(1, 1, 1024, DType::kF32));
  Open();
  const auto id = PutNumbers(Iota(200), RowEncoding::kAsGiven);
  ASSERT_OK(id);
  ExpectViews(*id, rng);
  RowViews room;
  ExpectVisits(*id, 0, room);
  ASSERT_OK(store_->Recluster(*id, Reversed(model_.geometry.row(0).bytes(), 64)));
  ExpectVisits(*id, 0, room);
  ExpectVisits(*id, 77, room);
}

// A view's pages stay unchanged although others compete for their place, and count against no
// bound.
TEST_F(RowViewsTest, HoldWhatTheyShow) {
  options_.host_tier_bytes = 64 << 10;  // 16 pages
  Open();
  const auto opened = PutAndOpened(2000);
  ASSERT_OK(opened);
  const RowShape row = model_.geometry.row(0);
  std::vector<uint32_t> ids;
  for (uint32_t t = 0; t < 600; ++t) ids.push_back(t);  // 12 pages
  std::vector<std::byte> want(ids.size() * row.bytes());
  ASSERT_OK((*opened)->ReadRows(0, 0, ids, want, nullptr));
  RowViews views, others;
  ASSERT_OK((*opened)->ViewRows(0, 0, ids, RowPart::kRow, views, nullptr));
  std::vector<uint32_t> all(2000);
  std::iota(all.begin(), all.end(), 0);
  for (uint32_t head = 0; head < 2; ++head) {
    ASSERT_OK((*opened)->ViewRows(1, head, all, RowPart::kRow, others, nullptr));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    ASSERT_EQ(std::memcmp(views.rows[i].key, want.data() + i * row.bytes(), row.key_bytes()), 0);
  }
  // Once released, the place is free for others.
  views.hold.reset();
  others.hold.reset();
  ReadStats cold, warm;
  const std::vector<uint32_t> few(all.begin() + 1500, all.begin() + 1600);
  ASSERT_OK((*opened)->ViewRows(1, 1, few, RowPart::kRow, others, &cold));
  others.hold.reset();
  ASSERT_OK((*opened)->ViewRows(1, 1, few, RowPart::kRow, others, &warm));
  EXPECT_EQ(warm.pages_ssd, 0u);
}

TEST_F(RowViewsTest, DamageIsAnErrorNotARow) {
  Open();
  const auto id = PutNumbers(Iota(500), RowEncoding::kAsGiven);
  ASSERT_OK(id);
  store_.reset();
  std::filesystem::path file;
  for (const auto& entry : std::filesystem::directory_iterator(options_.dir / "segments")) {
    if (entry.path().extension() == ".seg") file = entry.path();
  }
  Open();
  const auto opened = store_->OpenPrefix(*id, 0);
  ASSERT_OK(opened);
  for (uint64_t page = 1; page * kPageBytes < std::filesystem::file_size(file) / 2; ++page) {
    FlipByte(file, page * kPageBytes + 100);
  }
  std::vector<uint32_t> ids(500);
  std::iota(ids.begin(), ids.end(), 0);
  RowViews views;
  const Status status = (*opened)->ViewRows(0, 0, ids, RowPart::kRow, views, nullptr);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kCorrupt);
}

TEST_F(RowViewsTest, DamageIsNotVisited) {
  Open();
  const auto opened = PutAndOpened(500);
  ASSERT_OK(opened);
  FlipByte(FileOf(id_), kPageBytes + 100);
  RowViews room;
  const Status status = (*opened)->VisitRows(
      0, 0, room,
      [](std::span<const RowRef>) -> Status {
        ADD_FAILURE();
        return {};
      },
      nullptr);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kCorrupt);
}

TEST_F(RowViewsTest, RefuseIdsThatDoNotAscendOrExist) {
  Open();
  const auto opened = PutAndOpened(100);
  ASSERT_OK(opened);
  RowViews views;
  for (const std::vector<uint32_t>& ids : {std::vector<uint32_t>{5, 4}, {99, 100}}) {
    const Status status = (*opened)->ViewRows(0, 0, ids, RowPart::kRow, views, nullptr);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace prefixd::storage
