#include "tests/fuzz/page.h"

namespace prefixd::fuzz {
namespace {

using storage::kPageBytes;
using storage::SegmentHeader;
using storage::SegmentLayout;

// Checks that a key or value lies inside its run, and straddles no page if it fits into one.
void CheckItem(const SegmentLayout& l, uint32_t layer, uint32_t head, uint64_t at, uint64_t bytes,
               uint64_t whole) {
  const uint64_t begin = l.run_page(layer, head) * kPageBytes;
  FUZZ_EXPECT(at >= begin && at + bytes <= begin + l.of(layer).pages_per_run * kPageBytes);
  FUZZ_EXPECT(whole > kPageBytes || at % kPageBytes + bytes <= kPageBytes);
}

void CheckLayout(const SegmentLayout& l) {
  const storage::SegmentShape& s = l.shape;
  FUZZ_EXPECT(l.token_page < l.manifest_page && l.manifest_page <= l.order_page);
  FUZZ_EXPECT(l.order_page <= l.table_page);
  FUZZ_EXPECT(l.table_page < l.footer_page && l.footer_page < UINT32_MAX);
  FUZZ_EXPECT(l.file_bytes() == (l.footer_page + 1) * kPageBytes);
  FUZZ_EXPECT((l.manifest_page - l.token_page) * storage::kTokensPerPage >= s.n_tokens);
  FUZZ_EXPECT((l.footer_page - l.table_page) * storage::kChecksumsPerPage >= l.table_page);
  FUZZ_EXPECT(l.pages_per_order * storage::kSlotsPerPage >= (l.reclustered() ? s.n_tokens : 0));
  for (const uint32_t layer : {0u, s.n_layers / 2, s.n_layers - 1}) {
    const storage::RunLayout& own = l.of(layer);
    const uint32_t heads = l.heads.heads_in(layer);
    FUZZ_EXPECT(heads == own.rows.n_kv_heads);
    if (heads == 0) continue;
    const uint64_t key_bytes = own.key_bytes(), value_bytes = own.value_bytes();
    for (const uint32_t head : {0u, heads - 1}) {
      FUZZ_EXPECT(l.heads.layer_of(l.run(layer, head)) == layer);
      FUZZ_EXPECT(l.heads.head_of(l.run(layer, head)) == head);
      const uint64_t run = l.run_page(layer, head);
      FUZZ_EXPECT(run >= 1 && run + l.of(layer).pages_per_run <= l.token_page);
      FUZZ_EXPECT(l.order_page_of(layer, head) + l.pages_per_order <= l.table_page);
      for (const uint32_t i : {0u, s.n_tokens / 2, s.n_tokens - 1}) {
        const uint64_t key = l.KeyAddress(layer, head, i), value = l.ValueAddress(layer, head, i);
        CheckItem(l, layer, head, key, key_bytes, l.reclustered() ? key_bytes : own.row_bytes());
        CheckItem(l, layer, head, value, value_bytes,
                  l.reclustered() ? value_bytes : own.row_bytes());
        FUZZ_EXPECT(key + key_bytes <= value || value + value_bytes <= key);
      }
    }
  }
}

void Check(const Page& page) {
  if (!CheckPage<SegmentHeader>(page)) return;
  const auto header = SegmentHeader::Decode(page);
  const auto layout = header->Layout();
  FUZZ_EXPECT(layout.ok());
  FUZZ_EXPECT(layout->shape.n_tokens == header->tokens.size() && header->tokens.size() > 0);
  FUZZ_EXPECT(layout->reclustered() == (header->chunk_tokens > 0));
  CheckLayout(*layout);
}

// Layers of a few kinds, one of which has no rows.
void MakeLayers(FuzzedDataProvider& in, SegmentHeader& h) {
  h.n_layers = 1 + h.n_layers % 1024;
  const storage::StoredLayer own{h.n_kv_heads, h.key_dim, h.value_dim};
  std::vector<storage::StoredLayer> kinds = {own, {}};
  for (size_t i = in.ConsumeIntegralInRange<size_t>(0, kMaxLayerKinds - 1); i > 0; --i) {
    kinds.push_back({1u + Whole<uint8_t>(in), 1u + Whole<uint8_t>(in), 1u + Whole<uint8_t>(in)});
  }
  bool differ = false;
  for (uint32_t l = 0; l < h.n_layers; ++l) {
    h.layers.push_back(kinds[Whole<uint8_t>(in) % kinds.size()]);
    differ |= h.layers.back() != own;
  }
  if (!differ) h.layers.back() = {};
  h.incompat |= storage::kIncompatLayers;
}

SegmentHeader MakeHeader(FuzzedDataProvider& in) {
  SegmentHeader h;
  h.compat = Whole<uint64_t>(in);
  Fill(in, h.store);
  Fill(in, h.segment);
  Fill(in, h.file);
  Fill(in, h.parent);
  Fill(in, h.model.bytes);
  h.tokens.begin = in.ConsumeIntegralInRange<uint32_t>(0, UINT32_MAX - 1);
  h.tokens.end = in.ConsumeBool()
                     ? in.ConsumeIntegralInRange<uint32_t>(h.tokens.begin + 1, UINT32_MAX)
                     : h.tokens.begin + 1 +
                           std::min<uint32_t>(Whole<uint16_t>(in), UINT32_MAX - 1 - h.tokens.begin);
  h.n_layers = in.ConsumeBool() ? Whole<uint32_t>(in) : 1 + Whole<uint8_t>(in);
  h.n_kv_heads = in.ConsumeBool() ? Whole<uint32_t>(in) : 1 + Whole<uint8_t>(in);
  h.key_dim = in.ConsumeIntegralInRange<uint32_t>(0, 1 << 16);
  h.value_dim = in.ConsumeIntegralInRange<uint32_t>(0, 1 << 16);
  h.dtype = in.PickValueInArray({DType::kF32, DType::kF16, DType::kBf16});
  h.manifest_bytes = in.ConsumeBool() ? Whole<uint64_t>(in) : Whole<uint16_t>(in);
  h.created_unix_ms = Whole<int64_t>(in);
  if (in.ConsumeBool()) {
    h.encoding = RowEncoding::kInt8;
    h.incompat = storage::kIncompatEncodedRows;
  }
  if (in.ConsumeBool()) {
    Fill(in, h.lineage);
    if (h.lineage != storage::Lineage{}) h.incompat |= storage::kIncompatDerivedRows;
  }
  if (in.ConsumeBool()) MakeLayers(in, h);
  return h;
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  const uint8_t mode = Whole<uint8_t>(in) % 3;
  if (mode < 2) {
    Page page = PageOf(Rest(in));
    if (mode == 1) PutChecksumRight(page);
    Check(page);
    return;
  }
  const SegmentHeader header = MakeHeader(in);
  if (!header.Layout().ok()) return;  // larger than a segment may be
  Page page;
  header.Encode(page);
  const auto back = SegmentHeader::Decode(page);
  FUZZ_EXPECT(back.ok() && *back == header);
  CheckDamaged(in, page, Check, PutChecksumRight);
}

}  // namespace prefixd::fuzz
