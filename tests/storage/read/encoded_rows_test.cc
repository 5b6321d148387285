// Tests prefixes whose rows are stored as int8: their reads return the rows of the put up to
// rounding, beside prefixes stored as given, through everything that moves or checks rows.
#include <cmath>

#include "attention/rows/rows.h"
#include "storage/recover/recover.h"
#include "storage/remote/remote_memory.h"
#include "storage/segment/segment_format.h"
#include "tests/storage/open_store.h"
#include "tests/storage/read/finite_rows.h"

namespace prefixd::storage {
namespace {

class EncodedRowsTest : public OpenStoreTest {
 protected:
  EncodedRowsTest() { Open(); }

  void UseGeometry(const KvGeometry& g) {
    model_ = TestModel("m" + std::to_string(++models_), g);
    ASSERT_OK(store_->PutModel(model_));
  }

  Result<SegmentId> Put(const std::vector<uint32_t>& tokens, RowEncoding encoding,
                        uint32_t chunk = 37) {
    PREFIXD_ASSIGN(auto writer, store_->BeginPut(model_.name, "t", tokens, "label",
                                                 {.pinned = false, .encoding = encoding}));
    const KvGeometry& g = model_.geometry;
    PREFIXD_TRY(WriteAll(*writer, g, FiniteRows(g.row(0), tokens), chunk, /*layer_major=*/true));
    return writer->Commit();
  }

  // Checks everything that the prefix returns: rows as given up to token `as_given`, then as int8
  // up to `encoded`, then as given again.
  void ExpectPrefix(const SegmentId& id, const std::vector<uint32_t>& tokens, uint32_t as_given,
                    uint32_t encoded) {
    const auto opened = store_->OpenPrefix(id, 0);
    ASSERT_OK(opened);
    const StoredPrefix& prefix = **opened;
    const KvGeometry& g = model_.geometry;
    const RowShape row = g.row(0);
    const auto n = static_cast<uint32_t>(tokens.size());
    ASSERT_EQ(prefix.n_tokens(), n);
    const auto states = States(tokens);
    std::vector<uint32_t> some;
    for (uint32_t t = 0; t < n; t += 1 + t % 7) some.push_back(t);
    const size_t key = row.key_bytes(), value = row.value_bytes(), gap = 3;
    std::vector<std::byte> range(n * row.bytes()), rows(some.size() * row.bytes());
    std::vector<std::byte> keys(n * (key + gap)), values(n * (value + gap));
    std::vector<std::byte> some_values(some.size() * value);
    for (uint32_t run = 0; run < g.n_layers * g.n_kv_heads; ++run) {
      const uint32_t l = run / g.n_kv_heads, h = run % g.n_kv_heads;
      ASSERT_OK(prefix.ReadRange(l, h, {0, n}, range, nullptr));
      ASSERT_OK(prefix.ReadRows(l, h, some, rows, nullptr));
      ASSERT_OK(prefix.ReadRange(l, h, {0, n}, RowPart::kRow,
                                 {keys, key + gap, values, value + gap}, nullptr));
      ASSERT_OK(prefix.ReadRows(l, h, some, RowPart::kValue, {some_values, value}, nullptr));
      std::vector<std::vector<std::byte>> want(n);
      for (uint32_t t = 0; t < n; ++t) {
        want[t] = FiniteRow(row, states[t], l, h);
        if (t >= as_given && t < encoded) want[t] = ThroughInt8(row, want[t]);
        ASSERT_EQ(std::memcmp(&range[t * row.bytes()], want[t].data(), row.bytes()), 0) << t;
        ASSERT_EQ(std::memcmp(&keys[t * (key + gap)], want[t].data(), key), 0) << t;
        ASSERT_EQ(std::memcmp(&values[t * (value + gap)], want[t].data() + key, value), 0) << t;
      }
      for (size_t i = 0; i < some.size(); ++i) {
        const auto& w = want[some[i]];
        ASSERT_EQ(std::memcmp(&rows[i * row.bytes()], w.data(), row.bytes()), 0) << some[i];
        ASSERT_EQ(std::memcmp(&some_values[i * value], w.data() + key, value), 0) << some[i];
      }
    }
  }

  int models_ = 0;
};

TEST_F(EncodedRowsTest, AnyGeometryReadsWhatWasPutButForTheRounding) {
  std::mt19937_64 rng(Seed("EncodedRowsTest.AnyGeometryReadsWhatWasPutButForTheRounding"));
  const uint32_t dims[] = {1, 64, 80, 96, 128, 256};
  for (int round = 0; round < 12; ++round) {
    KvGeometry g = TestGeometry(1 + rng() % 2, 1 + rng() % 3);
    g.n_q_heads = g.n_kv_heads * (1 + rng() % 8);
    g.key_dim = dims[rng() % std::size(dims)];
    g.value_dim = round % 3 == 0 ? dims[rng() % std::size(dims)] : g.key_dim;
    g.dtype = std::array{DType::kF32, DType::kF16, DType::kBf16}[round % 3];
    UseGeometry(g);
    const auto tokens = RandomTokens(rng, 20 + rng() % 200, 1000);
    const auto id = Put(tokens, RowEncoding::kInt8, 1 + rng() % 60);
    ASSERT_OK(id);
    const auto n = static_cast<uint32_t>(tokens.size());
    ExpectPrefix(*id, tokens, 0, n);
    ASSERT_OK(store_->Recluster(*id, Reversed(model_.geometry.row(0).bytes(), 1 + rng() % 100)));
    ExpectPrefix(*id, tokens, 0, n);
  }
  Open();
  ExpectSound();
}

TEST_F(EncodedRowsTest, TakesHalfTheSpaceAndReportsItsError) {
  const auto tokens = Iota(600);
  UseGeometry(TestGeometry(2, 2, 128));
  const auto exact = Put(tokens, RowEncoding::kAsGiven);
  ASSERT_OK(exact);
  const auto as_given = store_->GetPrefix(*exact);
  ASSERT_OK(store_->Remove(*exact));
  const auto id = Put(tokens, RowEncoding::kInt8);
  ASSERT_OK(id);
  const auto encoded = store_->GetPrefix(*id);
  EXPECT_EQ(as_given->encoding, RowEncoding::kAsGiven);
  EXPECT_EQ(as_given->encoding_error, EncodingError{});
  EXPECT_EQ(encoded->encoding, RowEncoding::kInt8);
  EXPECT_LT(encoded->own_bytes, as_given->own_bytes * 55 / 100);

  // The error is measured from outside: rows read against rows put.
  auto prefix = store_->OpenPrefix(*id, 0);
  ASSERT_OK(prefix);
  const RowShape row = model_.geometry.row(0);
  const auto states = States(tokens);
  std::vector<std::byte> rows(600 * row.bytes());
  double squares[2] = {}, largest[2] = {};
  for (uint32_t run = 0; run < 4; ++run) {
    ASSERT_OK((*prefix)->ReadRange(run / 2, run % 2, {0, 600}, rows, nullptr));
    for (uint32_t t = 0; t < 600; ++t) {
      const auto given = FiniteRow(row, states[t], run / 2, run % 2);
      for (int part = 0; part < 2; ++part) {
        std::vector<float> a(128), b(128);
        ToFloat(row.dtype, given.data() + part * 256, a);
        ToFloat(row.dtype, rows.data() + t * row.bytes() + part * 256, b);
        double d = 0, n = 0;
        for (size_t i = 0; i < a.size(); ++i) {
          d += double(a[i] - b[i]) * double(a[i] - b[i]);
          n += double(a[i]) * double(a[i]);
        }
        squares[part] += d / n;
        largest[part] = std::max(largest[part], std::sqrt(d / n));
      }
    }
  }
  const EncodingError& e = encoded->encoding_error;
  EXPECT_NEAR(e.key_rms, std::sqrt(squares[0] / 2400), 1e-6);
  EXPECT_NEAR(e.value_rms, std::sqrt(squares[1] / 2400), 1e-6);
  EXPECT_NEAR(e.key_max, largest[0], 1e-6);
  EXPECT_NEAR(e.value_max, largest[1], 1e-6);
  EXPECT_GT(e.key_max, 0.0f);
  const EncodingError before = e;
  prefix->reset();
  Open();
  EXPECT_EQ(store_->GetPrefix(*id)->encoding_error, before);
  ASSERT_OK(store_->Recluster(*id, Reversed(model_.geometry.row(0).bytes(), 200)));
  Open();
  EXPECT_EQ(store_->GetPrefix(*id)->encoding_error, before);
  EXPECT_EQ(store_->GetPrefix(*id)->encoding, RowEncoding::kInt8);
}

TEST_F(EncodedRowsTest, EitherContinuesTheOther) {
  const auto first = Iota(100), second = Join(first, Iota(80, 1000)),
             third = Join(second, Iota(60, 2000));
  ASSERT_OK(Put(first, RowEncoding::kAsGiven));
  const auto encoded = Put(second, RowEncoding::kInt8);
  ASSERT_OK(encoded);
  const auto last = Put(third, RowEncoding::kAsGiven);
  ASSERT_OK(last);
  ExpectPrefix(*last, third, 100, 180);
  ExpectPrefix(*encoded, second, 100, 180);
  // The branch leaves the encoded segment in its middle.
  const auto branch = Join(std::span(second).first(150), Iota(40, 5000));
  const auto branched = Put(branch, RowEncoding::kAsGiven);
  ASSERT_OK(branched);
  ExpectPrefix(*branched, branch, 100, 150);
  // The segments are not joined: one file has one encoding.
  EXPECT_CODE(store_->Compact(*last, 10'000), Code::kFailedPrecondition);
  Open();
  ExpectPrefix(*last, third, 100, 180);
  ExpectSound();
  // Rows stored already keep their encoding, whatever a put's options are.
  const auto again = Put(second, RowEncoding::kAsGiven);
  ASSERT_OK(again);
  EXPECT_EQ(store_->GetPrefix(*again)->encoding, RowEncoding::kInt8);
}

TEST_F(EncodedRowsTest, MergingKeepsRowsAndJoinsErrors) {
  const auto first = Iota(100), second = Join(first, Iota(50, 1000));
  const auto a = Put(first, RowEncoding::kInt8), b = Put(second, RowEncoding::kInt8);
  ASSERT_OK(a);
  ASSERT_OK(b);
  const EncodingError both = Combine(store_->GetPrefix(*a)->encoding_error, 100,
                                     store_->GetPrefix(*b)->encoding_error, 50);
  const auto compacted = store_->Compact(*b, 1000);
  ASSERT_OK(compacted);
  EXPECT_EQ(store_->GetPrefix(*compacted)->encoding_error, both);
  ExpectPrefix(*compacted, second, 0, 150);
  ExpectPrefix(*a, first, 0, 100);
  ASSERT_OK(store_->Recluster(*compacted, Reversed(model_.geometry.row(0).bytes(), 64)));
  ExpectPrefix(*a, first, 0, 100);
  Open();
  ExpectPrefix(*b, second, 0, 150);
  EXPECT_EQ(store_->GetPrefix(*b)->encoding_error, both);
}

TEST_F(EncodedRowsTest, TravelsAndIsRecovered) {
  const auto tokens = Iota(300);
  const auto id = Put(tokens, RowEncoding::kInt8);
  ASSERT_OK(id);
  const EncodingError error = store_->GetPrefix(*id)->encoding_error;
  MemoryRemoteTier remote;
  ASSERT_OK(store_->Push(*id, remote, nullptr));
  store_.reset();
  std::filesystem::remove_all(options_.dir / "catalog");
  const auto recovered = RecoverCatalog({.dir = options_.dir}, nullptr);
  ASSERT_OK(recovered);
  Open();
  ExpectPrefix(*id, tokens, 0, 300);
  EXPECT_EQ(store_->GetPrefix(*id)->encoding_error, error);
  EXPECT_EQ(store_->GetPrefix(*id)->encoding, RowEncoding::kInt8);

  options_.dir = dir_.path() / "other";
  Open();
  ASSERT_OK(store_->Pull(*id, remote, nullptr));
  ExpectPrefix(*id, tokens, 0, 300);
  EXPECT_EQ(store_->GetPrefix(*id)->encoding_error, error);
  Open();
  ExpectPrefix(*id, tokens, 0, 300);
}

TEST_F(EncodedRowsTest, TheHostTierHoldsThemAsStored) {
  UseGeometry(TestGeometry(1, 1, 128));
  const auto tokens = Iota(310);  // 264 bytes a row, 15 a page
  const auto id = Put(tokens, RowEncoding::kInt8);
  ASSERT_OK(id);
  Open();
  const auto prefix = store_->OpenPrefix(*id, 0);
  ASSERT_OK(prefix);
  const std::vector<uint32_t> ids = {3, 4, 100, 200};  // three pages
  std::vector<std::byte> cold(4 * 512), warm(4 * 512);
  ReadStats first, second;
  ASSERT_OK((*prefix)->ReadRows(0, 0, ids, cold, &first));
  ASSERT_OK((*prefix)->ReadRows(0, 0, ids, warm, &second));
  EXPECT_EQ(cold, warm);
  EXPECT_EQ(first.pages_ssd, 3u);
  EXPECT_EQ(first.bytes[static_cast<size_t>(Tier::kSsd)], 3 * kPageBytes);
  EXPECT_EQ(second.pages_host, 3u);
  // Bytes of the rows as stored.
  EXPECT_EQ(second.bytes[static_cast<size_t>(Tier::kHost)], 4u * 264);
  const auto borrowed = (*prefix)->ReadInPlace(0, 0, ids, nullptr);
  EXPECT_CODE(borrowed, Code::kFailedPrecondition);
  EXPECT_NE(borrowed.error().message.find("ReadRows"), std::string::npos);
  const RowShape row = model_.geometry.row(0);
  std::vector<std::byte> run(row.bytes());
  const WantedRun wanted = {0, {run, row.bytes()}};
  EXPECT_CODE((*prefix)->FindInPlace(0, {0, 1}, {&wanted, 1}, nullptr), Code::kFailedPrecondition);
}

TEST_F(EncodedRowsTest, DamageIsFoundAsElsewhere) {
  const auto tokens = Iota(300);
  const auto id = Put(tokens, RowEncoding::kInt8);
  ASSERT_OK(id);
  store_.reset();
  FlipByte(options_.dir / "segments" / (id->ToString() + ".seg"), kPageBytes + 50);
  Open();
  const auto prefix = store_->OpenPrefix(*id, 0);
  ASSERT_OK(prefix);
  std::vector<std::byte> out(300 * model_.geometry.row(0).bytes());
  EXPECT_CODE((*prefix)->ReadRange(0, 0, {0, 300}, out, nullptr), Code::kCorrupt);
  EXPECT_TRUE(store_->GetPrefix(*id)->quarantined);
}

TEST_F(EncodedRowsTest, RefusedRowsLeaveThePutAsItWas) {
  const auto tokens = Iota(64);
  auto writer = store_->BeginPut("m", "t", tokens, "", {.encoding = RowEncoding::kInt8});
  ASSERT_OK(writer);
  const RowShape row = model_.geometry.row(0);
  std::vector<std::byte> rows;
  for (uint32_t i = 0; i < 2 * 64; ++i) {
    const auto one = FiniteRow(row, i, 0, 0);
    rows.insert(rows.end(), one.begin(), one.end());
  }
  std::vector<std::byte> bad = rows;
  const float nan = NAN;
  FromFloat(row.dtype, {&nan, 1}, bad.data() + (64 + 7) * row.bytes() + row.key_bytes());
  const Status refused = (*writer)->WriteRows(1, 0, 64, bad);
  EXPECT_CODE(refused, Code::kInvalidArgument);
  EXPECT_NE(refused.error().message.find("layer 1, KV head 1, token 7"), std::string::npos)
      << refused.error().message;
  EXPECT_CODE((*writer)->WriteRows(1, 0, 64, std::span(rows).first(100)), Code::kInvalidArgument);
  ASSERT_OK((*writer)->WriteRows(1, 0, 64, rows));
  EXPECT_CODE((*writer)->WriteRows(1, 60, 4, std::span(rows).first(8 * row.bytes())),
              Code::kInvalidArgument);
  EXPECT_CODE((*writer)->CheckRun(1, 60, 4), Code::kInvalidArgument);
  EXPECT_CODE((*writer)->CheckRun(0, 60, 5), Code::kInvalidArgument);
  ASSERT_OK((*writer)->CheckRun(0, 60, 4));
  ASSERT_OK((*writer)->WriteRows(0, 0, 64, rows));
  ASSERT_OK((*writer)->Commit());
}

}  // namespace
}  // namespace prefixd::storage
