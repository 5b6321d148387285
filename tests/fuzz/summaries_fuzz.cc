// Fuzzes moment summaries and phi caches. Bytes that decode are exactly what serialising the value
// writes.
#include "attention/estimators/moments.h"
#include "attention/estimators/phi_cache.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

template <typename Summary>
void Check(const Bytes& bytes) {
  const auto decoded = Summary::Deserialize(bytes);
  if (!decoded.ok()) return;
  FUZZ_EXPECT(decoded->Serialize() == bytes);
  Summary merged = *decoded;  // the empty set changes nothing
  merged.Merge(Summary());
  FUZZ_EXPECT(merged.Serialize() == bytes);
}

// Rows are small float32 rows that a put can have stored.
struct Rows {
  explicit Rows(FuzzedDataProvider& in) {
    view.shape = {in.ConsumeIntegralInRange<uint32_t>(1, 9),
                  in.ConsumeIntegralInRange<uint32_t>(1, 9), DType::kF32};
    view.count = in.ConsumeIntegralInRange<size_t>(0, 12);
    view.stride = view.shape.bytes();
    values.resize(view.count * (view.shape.key_dim + view.shape.value_dim));
    for (float& v : values) v = static_cast<float>(Whole<int8_t>(in)) / 16;
    view.data = reinterpret_cast<const std::byte*>(values.data());
  }
  std::vector<float> values;
  RowsView view;
};

template <typename Summary>
void CheckValue(FuzzedDataProvider& in, const Summary& summary) {
  const Bytes bytes = summary.Serialize();
  const auto back = Summary::Deserialize(bytes);
  FUZZ_EXPECT(back.ok() && back->count() == summary.count());
  CheckDamaged(in, bytes, Check<Summary>);
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  switch (Whole<uint8_t>(in) % 4) {
    case 0:
      Check<MomentSummary>(Rest(in));
      break;
    case 1:
      Check<PhiCache>(Rest(in));
      break;
    case 2: {
      const Rows rows(in);
      MomentSummary summary(rows.view.shape.key_dim, rows.view.shape.value_dim, in.ConsumeBool());
      summary.Add(rows.view);
      CheckValue(in, summary);
      break;
    }
    case 3: {
      const Rows rows(in);
      const uint32_t d_phi = in.ConsumeIntegralInRange<uint32_t>(1, 9);
      std::vector<float> log_phi(rows.view.count * d_phi);
      for (float& v : log_phi) v = static_cast<float>(Whole<int16_t>(in)) / 64;
      PhiCache cache(d_phi, rows.view.shape.value_dim);
      std::vector<uint32_t> outweighing;
      for (uint32_t i = 0; i < rows.view.count; ++i) {
        if (in.ConsumeBool()) outweighing.push_back(i);
      }
      cache.AddFeatures(rows.view, log_phi, outweighing);
      CheckValue(in, cache);
      break;
    }
  }
}

}  // namespace prefixd::fuzz
