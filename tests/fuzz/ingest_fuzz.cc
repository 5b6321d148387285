// Fuzzes the blobs of the ingest other than summaries: the choice of an estimator per head, the
// sample of queries it was measured on, and the clusterings.
#include <cmath>

#include "runtime/derived/query_samples.h"
#include "runtime/ingest/choice.h"
#include "runtime/summaries/clustering_codec.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

constexpr uint32_t kKeyDim = 3;

KvGeometry Geometry() {
  KvGeometry g;
  g.n_layers = 2;
  g.n_q_heads = 2;
  g.n_kv_heads = 1;
  g.key_dim = g.value_dim = kKeyDim;
  g.layers.assign(2, {0.5f, 0, 0});
  return g;
}

void CheckChoices(const Bytes& bytes) {
  const auto choices = DeserializeChoices(bytes);
  if (!choices.ok()) return;
  for (const HeadChoice& c : *choices) {
    FUZZ_EXPECT(c.budget >= 0 && c.budget <= 1 && c.chosen.kind != EstimatorKind::kAuto);
    for (const EstimatorError& e : c.errors) FUZZ_EXPECT(std::isfinite(e.error));
  }
  // The JSON may express the same value in several ways; after one round trip it is canonical.
  const Bytes again = SerializeChoices(*choices);
  const auto back = DeserializeChoices(again);
  FUZZ_EXPECT(back.ok() && SerializeChoices(*back) == again);
}

void CheckSamples(const Bytes& bytes) {
  const KvGeometry geometry = Geometry();
  const auto samples = QuerySamples::Deserialize(bytes, geometry);
  if (!samples.ok()) return;
  FUZZ_EXPECT(samples->Serialize() == bytes);
  for (const QuerySamples::Layer& layer : samples->layers) {
    FUZZ_EXPECT(layer.q.size() == layer.positions.size() * geometry.n_q_heads * geometry.key_dim);
    for (size_t i = 0; i < layer.positions.size(); ++i) {
      FUZZ_EXPECT(i == 0 || layer.positions[i - 1] < layer.positions[i]);
      FUZZ_EXPECT(layer.positions[i] < samples->prompt_tokens);
    }
  }
}

void CheckClusterings(const Bytes& bytes) {
  const std::vector<uint32_t> dims = {kKeyDim, 0, kKeyDim};
  const auto clusterings = DeserializeClusterings(bytes, dims);
  if (!clusterings.ok()) return;
  FUZZ_EXPECT(SerializeClusterings(*clusterings) == bytes);
  const std::vector<float> keys = {0, 0, 0, 1, -1, 2, 1e30f, -1e30f, 1};
  const RowsView rows{
      reinterpret_cast<const std::byte*>(keys.data()), 3, 12, {kKeyDim, 0, DType::kF32}};
  for (size_t head = 0; head < dims.size(); ++head) {
    FUZZ_EXPECT(((*clusterings)[head].size() > 0) == (dims[head] > 0));
    if (dims[head] == 0) continue;
    for (const uint16_t c : (*clusterings)[head].Assign(rows)) {
      FUZZ_EXPECT(c < (*clusterings)[head].size());
    }
  }
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  switch (Whole<uint8_t>(in) % 5) {
    case 0:
      CheckChoices(Rest(in));
      break;
    case 1:
      CheckSamples(Rest(in));
      break;
    case 2:
      CheckClusterings(Rest(in));
      break;
    case 3: {
      QueryReservoir reservoir(Geometry(), 40, 4);
      for (uint32_t n = in.ConsumeIntegralInRange<uint32_t>(0, 9); n > 0; --n) {
        std::vector<float> q(Geometry().n_q_heads * kKeyDim, float(Whole<int8_t>(in)));
        reservoir.Add(n % 2, 30 + n, 1, q);
      }
      const Bytes bytes = reservoir.Take().Serialize();
      FUZZ_EXPECT(QuerySamples::Deserialize(bytes, Geometry()).ok());
      CheckDamaged(in, bytes, CheckSamples);
      break;
    }
    case 4: {
      std::vector<Clustering> clusterings(3);
      for (const size_t head : {0, 2}) {
        std::vector<float> centres(kKeyDim * in.ConsumeIntegralInRange<size_t>(1, 4));
        for (float& x : centres) x = Whole<int8_t>(in);
        clusterings[head] = Clustering(kKeyDim, std::move(centres));
      }
      const Bytes bytes = SerializeClusterings(clusterings);
      const std::vector<uint32_t> dims = {kKeyDim, 0, kKeyDim};
      FUZZ_EXPECT(DeserializeClusterings(bytes, dims).ok());
      CheckDamaged(in, bytes, CheckClusterings);
      break;
    }
  }
}

}  // namespace prefixd::fuzz
