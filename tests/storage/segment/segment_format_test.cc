#include "storage/segment/segment_format.h"

#include <map>
#include <nlohmann/json.hpp>

#include "storage/segment/blob_format.h"
#include "storage/segment/records.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

SegmentHeader SomeHeader() {
  SegmentHeader h;
  for (uint8_t i = 0; i < 16; ++i) {
    h.store[i] = i;
    h.segment[i] = static_cast<uint8_t>(0x20 + i);
    h.file[i] = static_cast<uint8_t>(0x60 + i);
    h.parent[i] = static_cast<uint8_t>(0x40 + i);
  }
  h.model = TestModel().fingerprint;
  h.tokens = {100, 1100};
  h.n_layers = 3;
  h.n_kv_heads = 2;
  h.key_dim = h.value_dim = 64;
  h.dtype = DType::kBf16;
  h.manifest_bytes = 5000;
  h.created_unix_ms = 1'700'000'000'000;
  return h;
}

using FormatPage = std::array<std::byte, kPageBytes>;

TEST(SegmentFormat, ArrivalLayoutOfSmallRows) {
  const SegmentLayout l = *SomeHeader().Layout();  // rows of 256 bytes, 16 a page
  EXPECT_FALSE(l.reclustered());
  EXPECT_EQ(l.of(0).row.per_page, 16u);
  EXPECT_EQ(l.of(0).pages_per_run, 63u);  // 1000 rows
  EXPECT_EQ(l.run_page(2, 1), 1u + 5 * 63);
  EXPECT_EQ(l.KeyAddress(2, 1, 17), (1 + 5 * 63 + 1) * kPageBytes + 256);
  EXPECT_EQ(l.ValueAddress(2, 1, 17), l.KeyAddress(2, 1, 17) + 128);
  EXPECT_EQ(l.token_page, 1u + 6 * 63);
  EXPECT_EQ(l.manifest_page, l.token_page + 1);
  EXPECT_EQ(l.table_page, l.manifest_page + 2);
  EXPECT_EQ(l.footer_page, l.table_page + 1);
}

TEST(SegmentFormat, ReclusteredLayoutKeepsKeysAndValuesApart) {
  SegmentHeader header = SomeHeader();
  header.chunk_tokens = 400;
  const SegmentLayout l = *header.Layout();  // 32 keys or values of 128 bytes a page
  EXPECT_EQ(l.chunks(), 3u);
  EXPECT_EQ(l.chunk_size(2), 200u);
  EXPECT_EQ(l.of(0).pages_per_chunk, 2u * 13);
  EXPECT_EQ(l.of(0).pages_per_run, 2u * 2 * 13 + 2 * 7);
  EXPECT_EQ(l.KeyAddress(0, 0, 33), (1 + 1) * kPageBytes + 128);
  EXPECT_EQ(l.ValueAddress(0, 0, 33), (1 + 13 + 1) * kPageBytes + 128);
  EXPECT_EQ(l.KeyAddress(0, 0, 800), (1 + 2 * 26) * kPageBytes);
  EXPECT_EQ(l.ValueAddress(0, 0, 800), (1 + 2 * 26 + 7) * kPageBytes);
  EXPECT_EQ(l.pages_per_order, 1u);
  EXPECT_EQ(l.table_page, l.order_page + 6);
}

// Checks that every item is inside its run and shares no byte with another; small ones straddle no
// page.
TEST(SegmentFormat, ItemsNeitherStraddlePagesNorOverlap) {
  for (const uint32_t bytes : {1u, 7u, 80u, 1000u, 1366u, 2048u, 2049u, 4096u, 5000u, 8192u}) {
    for (const uint32_t chunk : {0u, 1u, 63u, 500u}) {
      const SegmentLayout l = *SegmentLayout::Of({2, 2, bytes, bytes + 3, 500, chunk, 0});
      const uint64_t begin = l.run_page(1, 0) * kPageBytes, end = l.run_page(1, 1) * kPageBytes;
      std::map<uint64_t, uint64_t> taken;
      for (uint32_t slot = 0; slot < 500; ++slot) {
        const uint64_t key = l.KeyAddress(1, 0, slot), value = l.ValueAddress(1, 0, slot);
        for (const auto& [at, n] : {std::pair{key, bytes}, {value, bytes + 3}}) {
          ASSERT_GE(at, begin);
          ASSERT_LE(at + n, end);
          if (n <= kPageBytes && (l.reclustered() || l.of(0).row_bytes() <= kPageBytes)) {
            ASSERT_LE(at % kPageBytes + n, kPageBytes);
          }
          ASSERT_TRUE(taken.emplace(at, at + n).second);
        }
      }
      uint64_t last = 0;
      for (const auto& [at, to] : taken) {
        ASSERT_LE(last, at);
        last = to;
      }
    }
  }
}

TEST(SegmentFormat, ImpossibleShapesAreRefused) {
  EXPECT_CODE(SegmentLayout::Of({1024, 1024, 4096, 4096, 1u << 30, 0, 0}), Code::kInvalidArgument);
  EXPECT_CODE(SegmentLayout::Of({1024, 1024, 4096, 4096, 1u << 30, 4096, 0}),
              Code::kInvalidArgument);
  EXPECT_CODE(SegmentLayout::Of({1, 1, 64, 64, 100, 1u << 20, 0}), Code::kInvalidArgument);
  EXPECT_CODE(SegmentLayout::Of({1, 1, 64, 0, 100, 0, 0}), Code::kInvalidArgument);
}

TEST(SegmentFormat, HeaderRoundTripAndEveryBitFlipIsRefused) {
  SegmentHeader header = SomeHeader();
  header.chunk_tokens = 64;
  FormatPage page;
  header.Encode(page);
  ASSERT_OK(SegmentHeader::Decode(page));
  EXPECT_EQ(*SegmentHeader::Decode(page), header);
  for (size_t i = 0; i < page.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      page[i] ^= std::byte(1 << bit);
      ASSERT_FALSE(SegmentHeader::Decode(page).ok()) << "byte " << i << " bit " << bit;
      page[i] ^= std::byte(1 << bit);
    }
  }
}

TEST(SegmentFormat, FooterRoundTripAndEveryBitFlipIsRefused) {
  const SegmentFooter footer{
      SomeHeader().file, 7, 400, 0x1234567890abcdef, 5000, 99, {0.25f, 0.125f, 0.5f, 0.0625f}};
  FormatPage page;
  footer.Encode(page);
  EXPECT_EQ(*SegmentFooter::Decode(page), footer);
  for (size_t i = 0; i < page.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      page[i] ^= std::byte(1 << bit);
      ASSERT_FALSE(SegmentFooter::Decode(page).ok()) << "byte " << i << " bit " << bit;
      page[i] ^= std::byte(1 << bit);
    }
  }
}

TEST(SegmentFormat, UnknownFeaturesRefuseButUnknownCompatBitsDoNot) {
  FormatPage page;
  SegmentHeader header = SomeHeader();
  header.compat = 1ull << 40;
  header.Encode(page);
  EXPECT_TRUE(SegmentHeader::Decode(page).ok());
  header.incompat = 1ull << 40;
  header.Encode(page);
  EXPECT_CODE(SegmentHeader::Decode(page), Code::kFailedPrecondition);
}

TEST(SegmentFormat, EncodedRowsAreASizeOfTheirOwnAndAFeatureToKnow) {
  FormatPage page;
  SegmentHeader header = SomeHeader();
  header.encoding = RowEncoding::kInt8;
  header.incompat = kIncompatEncodedRows;
  const SegmentLayout l = *header.Layout();  // 68 bytes of key and of value, 30 rows a page
  EXPECT_EQ(l.of(0).row_bytes(), 136u);
  EXPECT_EQ(l.of(0).row.per_page, 30u);
  EXPECT_EQ(l.of(0).pages_per_run, 34u);
  EXPECT_EQ(l.ValueAddress(2, 1, 31), (1 + 5 * 34 + 1) * kPageBytes + 136 + 68);
  header.Encode(page);
  ASSERT_OK(SegmentHeader::Decode(page));
  EXPECT_EQ(*SegmentHeader::Decode(page), header);
  // A prefixd without the feature refuses by this bit; it must be set exactly when rows are
  // encoded.
  header.incompat = 0;
  header.Encode(page);
  EXPECT_CODE(SegmentHeader::Decode(page), Code::kCorrupt);
  header.incompat = kIncompatEncodedRows;
  header.encoding = RowEncoding::kAsGiven;
  header.Encode(page);
  EXPECT_CODE(SegmentHeader::Decode(page), Code::kCorrupt);
  header.encoding = RowEncoding::kInt8;
  header.key_dim = 3000;  // larger than a page
  header.value_dim = 1100;
  EXPECT_CODE(header.Layout(), Code::kInvalidArgument);
}

// Layers of 2 heads of 64 + 64, none, 3 heads of 32 + 48, and 2 of 64 + 64 again.
SegmentHeader LayeredHeader() {
  SegmentHeader header = SomeHeader();
  header.n_layers = 4;
  header.layers = {{2, 64, 64}, {}, {3, 32, 48}, {2, 64, 64}};
  header.incompat = kIncompatLayers;
  return header;
}

TEST(SegmentFormat, LayersThatDifferFollowOneAnother) {
  SegmentHeader header = LayeredHeader();
  const SegmentLayout l = *header.Layout();
  EXPECT_EQ(l.kinds.size(), 3u);
  EXPECT_EQ(l.runs(), 7u);
  EXPECT_EQ(l.of(2).row.per_page, 25u);  // 160 bytes
  EXPECT_EQ(l.run_page(0, 1), 1u + 63);
  EXPECT_EQ(l.run_page(2, 0), 1u + 2 * 63);
  EXPECT_EQ(l.run_page(2, 2), 1u + 2 * 63 + 2 * 40);
  EXPECT_EQ(l.run_page(3, 0), 1u + 2 * 63 + 3 * 40);
  EXPECT_EQ(l.token_page, 1u + 4 * 63 + 3 * 40);
  EXPECT_EQ(l.KeyAddress(2, 1, 26), (l.run_page(2, 1) + 1) * kPageBytes + 160);
  EXPECT_EQ(l.ValueAddress(2, 1, 26), l.KeyAddress(2, 1, 26) + 64);
  header.chunk_tokens = 500;
  const SegmentLayout r = *header.Layout();
  EXPECT_EQ(r.order_page_of(3, 1), r.order_page + 6 * r.pages_per_order);
  EXPECT_EQ(r.table_page, r.order_page + 7);
  EXPECT_EQ(r.ValueAddress(2, 0, 0), (r.run_page(2, 0) + 8) * kPageBytes);  // 500 keys of 64 bytes
}

// What no layer has cannot be too large for a page.
TEST(SegmentFormat, RowsOfInt8AreMeasuredWhereTheyAreStored) {
  SegmentHeader header = LayeredHeader();
  header.encoding = RowEncoding::kInt8;
  header.incompat |= kIncompatEncodedRows;
  header.key_dim = header.value_dim = 4096;  // of no layer
  ASSERT_OK(header.Layout());
  FormatPage page;
  header.Encode(page);
  ASSERT_OK(SegmentHeader::Decode(page));
  EXPECT_EQ(*SegmentHeader::Decode(page), header);
  header.layers.back() = {header.n_kv_heads, 4096, 4096};
  EXPECT_CODE(header.Layout(), Code::kInvalidArgument);
}

TEST(SegmentFormat, LayersThatDifferAreAFeatureToKnow) {
  SegmentHeader header = LayeredHeader();
  FormatPage page;
  header.Encode(page);
  ASSERT_OK(SegmentHeader::Decode(page));
  EXPECT_EQ(*SegmentHeader::Decode(page), header);
  EXPECT_EQ(SegmentHeader::Decode(page)->row(2), (RowShape{32, 48, DType::kBf16}));
  for (size_t i = 0; i < page.size(); ++i) {
    page[i] ^= std::byte{1};
    ASSERT_FALSE(SegmentHeader::Decode(page).ok()) << "byte " << i;
    page[i] ^= std::byte{1};
  }
  header.incompat = 0;  // an older prefixd would read it
  header.Encode(page);
  EXPECT_CODE(SegmentHeader::Decode(page), Code::kCorrupt);
  header = SomeHeader();
  header.incompat = kIncompatLayers;  // without a table
  header.Encode(page);
  EXPECT_CODE(SegmentHeader::Decode(page), Code::kCorrupt);
  header = LayeredHeader();
  header.layers = {{2, 64, 64}, {2, 64, 64}, {2, 64, 64}, {2, 64, 64}};  // nothing differs
  header.Encode(page);
  EXPECT_CODE(SegmentHeader::Decode(page), Code::kCorrupt);
}

// Golden bytes of a prefixd that took all layers for alike.
TEST(SegmentFormat, UniformHeadersStayWhatTheyAre) {
  SegmentHeader header = SomeHeader();
  header.model = {};
  header.chunk_tokens = 64;
  FormatPage page;
  header.Encode(page);
  uint64_t checksum = 0;
  std::memcpy(&checksum, page.data() + kPageBytes - sizeof(checksum), sizeof(checksum));
  EXPECT_EQ(checksum, 0x820697e9ed24cb48u);
}

TEST(SegmentFormat, ChecksumsDependOnThePlace) {
  FormatPage page{};
  const Uuid a{1}, b{2};
  const uint64_t sum = PageChecksum(a, 5, page);
  EXPECT_NE(sum, PageChecksum(a, 6, page));
  EXPECT_NE(sum, PageChecksum(b, 5, page));
  page[4095] = std::byte{1};
  EXPECT_NE(sum, PageChecksum(a, 5, page));
}

TEST(Records, RoundTripAndTruncationIsCorrupt) {
  SegmentRecord r;
  r.id.bytes[3] = 9;
  r.parent.bytes[0] = 1;
  r.sequence = 12;
  r.model = "m";
  r.tenant = std::string("t\0x", 3);
  r.label = "l";
  r.tokens = {5, 9};
  r.first_token = 77;
  r.file_bytes = 1 << 20;
  const std::string bytes = EncodeSegment(r);
  const auto back = DecodeSegment(bytes);
  ASSERT_OK(back);
  EXPECT_EQ(back->id, r.id);
  EXPECT_EQ(back->tenant, r.tenant);
  EXPECT_EQ(back->tokens, r.tokens);
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_CODE(DecodeSegment(std::string_view(bytes).substr(0, n)), Code::kCorrupt);
  }
  r.encoding = RowEncoding::kInt8;
  r.encoding_error = {0.02f, 0.01f, 0.03f, 0.005f};
  const auto encoded = DecodeSegment(EncodeSegment(r));
  ASSERT_OK(encoded);
  EXPECT_EQ(*encoded, r);
  r.encoding_error.key_max = -1;
  EXPECT_CODE(DecodeSegment(EncodeSegment(r)), Code::kCorrupt);
  const ModelRecord model = TestModel("name");
  const auto model_back = DecodeModel(EncodeModel(model));
  ASSERT_OK(model_back);
  EXPECT_EQ(model_back->geometry, model.geometry);
  EXPECT_EQ(model_back->fingerprint, model.fingerprint);
  const auto manifest = DecodeManifest(
      EncodeManifest({model, "t", "l", 16, false, {{{}, {}, 7, "x", 9}}, {SegmentId{}}}));
  ASSERT_OK(manifest);
  EXPECT_EQ(manifest->model.name, "name");
  EXPECT_EQ(manifest->block_tokens, 16u);
  ASSERT_EQ(manifest->aliases.size(), 1u);
  EXPECT_EQ(manifest->aliases[0].n_tokens, 7u);
  EXPECT_CODE(DecodeModel(bytes), Code::kCorrupt);
}

TEST(Records, ModelsWhoseLayersDifferAreRefusedByOlderProgrammes) {
  const auto version = [](const std::string& bytes) {
    return nlohmann::json::from_msgpack(bytes).at("v").get<int>();
  };
  ModelRecord model = TestModel("m");
  const std::string alike = EncodeModel(model);
  EXPECT_EQ(version(alike), 2);
  EXPECT_EQ(nlohmann::json::from_msgpack(alike).at("layers").at(0).size(), 3u);
  EXPECT_EQ(version(EncodeManifest({model, "t", "l", 16, true, {}, {}})), 2);
  model.geometry.layers[0].stored = false;
  model.geometry.layers[1].n_q_heads = 6, model.geometry.layers[1].n_kv_heads = 3;
  model.geometry.layers[1].key_dim = 8, model.geometry.layers[1].value_dim = 9;
  EXPECT_EQ(version(EncodeModel(model)), 3);
  const auto back = DecodeModel(EncodeModel(model));
  ASSERT_OK(back);
  EXPECT_EQ(back->geometry, model.geometry);
  EXPECT_EQ(back->geometry.layers, model.geometry.layers);
  const std::string manifest = EncodeManifest({model, "t", "l", 16, true, {}, {}});
  EXPECT_EQ(version(manifest), 3);
  ASSERT_OK(DecodeManifest(manifest));
  EXPECT_EQ(DecodeManifest(manifest)->model.geometry, model.geometry);
}

TEST(Records, NumbersThatDoNotFitAreCorruptNotWrapped) {
  const auto packed = [](nlohmann::json value) {
    const std::vector<uint8_t> bytes = nlohmann::json::to_msgpack(value);
    return std::string(bytes.begin(), bytes.end());
  };
  const std::string good = EncodeSegment(
      {{}, {}, 1, "m", "t", "l", {}, {0, 4}, 1, 4096, 0, false, true, false, 0, {1, 2}});
  const nlohmann::json record = nlohmann::json::from_msgpack(good);
  ASSERT_OK(DecodeSegment(packed(record)));
  for (const char* key : {"end", "first_token", "sequence", "file_bytes", "v"}) {
    for (const nlohmann::json& bad : {nlohmann::json(-1), nlohmann::json(1.5), nlohmann::json(true),
                                      nlohmann::json("4"), nlohmann::json(nullptr)}) {
      nlohmann::json changed = record;
      changed[key] = bad;
      SCOPED_TRACE(std::string(key) + " " + bad.dump());
      EXPECT_CODE(DecodeSegment(packed(changed)), Code::kCorrupt);
    }
  }
  nlohmann::json changed = record;
  changed["end"] = (1ull << 32) + 4;
  EXPECT_CODE(DecodeSegment(packed(changed)), Code::kCorrupt);
  changed = record;
  changed["lead"] = {1, 2, 3, 4, 5};  // more than its tokens
  EXPECT_CODE(DecodeSegment(packed(changed)), Code::kCorrupt);
  nlohmann::json model = nlohmann::json::from_msgpack(EncodeModel(TestModel("m")));
  ASSERT_OK(DecodeModel(packed(model)));
  model["dtype"] = 256 + 3;
  EXPECT_CODE(DecodeModel(packed(model)), Code::kCorrupt);
}

TEST(Records, DeepNestingIsCorruptAndDoesNotEndTheStack) {
  EXPECT_CODE(DecodeSegment(std::string(4 << 20, '\x91')), Code::kCorrupt);
  EXPECT_CODE(DecodeManifest("\x81\xa1v" + std::string(4 << 20, '\x91')), Code::kCorrupt);
}

TEST(BlobFormat, EveryByteHasAMeaning) {
  const std::vector<std::byte> payload(70, std::byte{9});
  const std::vector<std::byte> file = EncodeBlob({{}, "name", "producer", payload});
  const auto decoded = DecodeBlob(file);
  ASSERT_OK(decoded);
  EXPECT_EQ(decoded->name, "name");
  EXPECT_EQ(decoded->producer, "producer");
  EXPECT_EQ(decoded->payload.size(), payload.size());
  for (size_t n = 0; n < file.size(); ++n) {
    EXPECT_CODE(DecodeBlob(std::span(file).first(n)), Code::kCorrupt);
    std::vector<std::byte> changed = file;
    changed[n] ^= std::byte{0x20};
    EXPECT_CODE(DecodeBlob(changed), Code::kCorrupt);
  }
}

TEST(Records, RandomBytesNeverCrash) {
  std::mt19937_64 rng(Seed("Records.RandomBytesNeverCrash"));
  const std::string good = EncodeSegment({{}, {}, 1, "m", "t", "l", {}, {0, 4}, 1, 4096, 0});
  ASSERT_OK(DecodeSegment(good));
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = good;
    for (uint64_t k = rng() % 4 + 1; k > 0; --k) {
      bytes[rng() % bytes.size()] = static_cast<char>(rng());
    }
    const auto decoded = DecodeSegment(bytes);  // either result is fine, but no crash and no throw
    if (decoded.ok()) {
      EXPECT_LT(decoded->tokens.begin, decoded->tokens.end);
    }
    (void)DecodeModel(bytes).ok();
  }
}

}  // namespace
}  // namespace prefixd::storage
