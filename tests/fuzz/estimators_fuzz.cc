// Fuzzes stored summaries of every estimator, in their envelope: a summary that loads is evaluated
// in a step, also with retrieved rows that it never held, and must give numbers.
#include <cmath>

#include "attention/estimators/estimator.h"
#include "attention/step/step.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

constexpr uint32_t kGroup = 2;
constexpr size_t kRetrieved = 3;
constexpr const char* kProducer = "p";

// Returns numbers of moderate size, like those of keys and queries.
std::vector<float> Floats(FuzzedDataProvider& in, size_t n) {
  std::vector<float> out(n);
  for (float& x : out) x = static_cast<float>(Whole<int8_t>(in)) / 16;
  return out;
}

RowsView View(const std::vector<float>& values, const RowShape& shape, size_t count) {
  return {reinterpret_cast<const std::byte*>(values.data()), count, shape.bytes(), shape};
}

// A World holds what an estimator needs of one prefix, small and arbitrary.
struct World {
  explicit World(FuzzedDataProvider& in) {
    shape = {in.ConsumeIntegralInRange<uint32_t>(1, 5), in.ConsumeIntegralInRange<uint32_t>(1, 5),
             DType::kF32};
    spec.kind = in.PickValueInArray({EstimatorKind::kMoment, EstimatorKind::kPhi,
                                     EstimatorKind::kCentroid, EstimatorKind::kScan});
    spec.key_dim = shape.key_dim;
    spec.value_dim = shape.value_dim;
    spec.cross = in.ConsumeBool();
    spec.covariance = in.ConsumeBool();
    const uint32_t n = in.ConsumeIntegralInRange<uint32_t>(1, 4);
    clustering = Clustering(shape.key_dim, Floats(in, size_t{n} * shape.key_dim));
    map.in_dim = shape.key_dim;
    map.d_emb = 2;
    map.d_phi = in.ConsumeIntegralInRange<uint32_t>(1, 4);
    map.w_in = Floats(in, size_t{2} * map.in_dim);
    map.b_in = Floats(in, 2);
    map.w1 = map.w2 = Floats(in, 4);
    map.b1 = map.b2 = Floats(in, 2);
    map.w_out = Floats(in, size_t{2} * map.d_phi);
    map.b_out = Floats(in, map.d_phi);
    map.alpha = 0.5f;
    spec.phi_k = &map;
    spec.clustering = &clustering;
    rows = Floats(in, kRetrieved * (shape.key_dim + shape.value_dim));
    queries = Floats(in, size_t{kGroup} * shape.key_dim);
    phi_form = in.PickValueInArray({PhiForm::kSigned, PhiForm::kPerFeature});
    cuts.resize(kGroup);
    for (Cut& cut : cuts) {
      cut.score = static_cast<float>(Whole<int8_t>(in)) / 16;
      cut.kind = in.PickValueInArray({CutKind::kNone, CutKind::kApproximate, CutKind::kExact});
    }
  }

  RowShape shape;
  EstimatorSpec spec;
  Clustering clustering;
  FeatureMap map;
  std::vector<float> rows, queries;
  std::vector<Cut> cuts;
  PhiForm phi_form;
};

void Evaluate(const World& w, const EstimatorSummary& summary) {
  GroupStepInput in;
  in.queries = w.queries;
  in.group = kGroup;
  in.layer.scale = 0.5f;
  in.tail = View(w.rows, w.shape, 1);
  in.retrieved = View(w.rows, w.shape, std::min<uint64_t>(kRetrieved, summary.count()));
  in.cuts = w.cuts;
  in.mid_count = summary.count();
  in.phi_form = w.phi_form;
  summary.AttachTo(in);
  // The masses are those of a scan that scored every key.
  const std::vector<float> masses(size_t{kGroup} * w.clustering.size(), 1.5f);
  const std::vector<float> scores(size_t{kGroup} * in.retrieved.count, 0.5f);
  in.scan = {masses, scores, true};
  std::vector<float> y(size_t{kGroup} * w.shape.value_dim), lse(kGroup), rho(kGroup);
  if (!GroupStep(in, {y, lse, rho}).ok()) return;
  for (const auto* out : {&y, &lse, &rho}) {
    for (const float x : *out) FUZZ_EXPECT(!std::isnan(x));
  }
}

void Check(const World& w, const Bytes& bytes) {
  const auto summary = EstimatorSummary::Deserialize(w.spec, kProducer, bytes);
  if (!summary.ok()) return;
  FUZZ_EXPECT(summary->Serialize(kProducer) == bytes);
  Evaluate(w, *summary);
  EstimatorSummary merged = *summary;
  if (merged.Merge(*summary).ok()) Evaluate(w, merged);
  merged = *summary;
  merged.Add(View(w.rows, w.shape, kRetrieved));
  Evaluate(w, merged);
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  const uint8_t mode = Whole<uint8_t>(in);
  const World w(in);
  const auto made = EstimatorSummary::Create(w.spec);
  FUZZ_EXPECT(made.ok());
  // The bytes are any payload behind a right envelope, or a built summary, then damaged.
  if (mode % 2 == 0) {
    Bytes bytes = made->Serialize(kProducer);
    bytes.resize(16 + 1);
    const Bytes payload = Rest(in);
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    Check(w, bytes);
    return;
  }
  EstimatorSummary built = *made;
  const size_t n = in.ConsumeIntegralInRange<size_t>(0, 12);
  const std::vector<float> rows = Floats(in, n * (w.shape.key_dim + w.shape.value_dim));
  built.Add(View(rows, w.shape, n));
  const Bytes bytes = built.Serialize(kProducer);
  const auto back = EstimatorSummary::Deserialize(w.spec, kProducer, bytes);
  FUZZ_EXPECT(back.ok() && back->count() == n);
  CheckDamaged(in, bytes, [&](const Bytes& b) { Check(w, b); });
}

}  // namespace prefixd::fuzz
