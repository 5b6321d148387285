#include "bench/attention/passes.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "bench/attention/timing.h"
#include "prefixd/merge.h"

namespace prefixd::bench {
namespace {

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "step failed: %s\n", status.error().message.c_str());
  std::abort();
}

// Splits each KV head into pieces and merges them afterwards, so that all cores have work to the
// end. queries: [heads][n][dim].
double StreamingPass(Team& team, const Layers& layers, size_t layer,
                     const std::vector<float>& queries, uint32_t n) {
  constexpr size_t kPieces = 4;
  const size_t piece = (layers.n_tokens() + kPieces - 1) / kPieces;
  std::vector<float> y(kPieces * queries.size()), lse(kPieces * kKvHeads * n);
  return Seconds([&] {
    team.ForEach(kPieces * kKvHeads, [&](size_t job) {
      const size_t h = job / kPieces, begin = job % kPieces * piece;
      const RowsView rows =
          layers.Head(layer, h).Sub(begin, std::min(piece, layers.n_tokens() - begin));
      Check(ExactAttention(std::span(queries).subspan(h * n * kDim, n * kDim), n, kLayer, rows,
                           std::span(y).subspan(job * n * kDim, n * kDim),
                           std::span(lse).subspan(job * n, n)));
    });
    for (size_t job = 0; job < kPieces * kKvHeads; ++job) {
      if (job % kPieces == 0) continue;
      for (size_t i = 0; i < n; ++i) {
        const size_t to = job / kPieces * kPieces * n + i, from = job * n + i;
        MergeStates(std::span(y).subspan(to * kDim, kDim), &lse[to],
                    std::span(y).subspan(from * kDim, kDim), lse[from]);
      }
    }
  });
}

}  // namespace

const char* VariantName(Variant variant) {
  constexpr const char* kNames[] = {"selection only",   "moment, mean value", "moment, rank 8",
                                    "moment, all of C", "phi, stored 8 bits", "phi, recomputed"};
  return kNames[static_cast<size_t>(variant)];
}

const char* VariantKey(Variant variant) {
  constexpr const char* kKeys[] = {"selection",    "moment_mean", "moment_rank8",
                                   "moment_cross", "phi_stored",  "phi_recompute"};
  return kKeys[static_cast<size_t>(variant)];
}

std::vector<uint32_t> RandomSets(std::mt19937_64& rng, uint32_t n_tokens, uint32_t k) {
  std::vector<uint32_t> ids(size_t{kKvHeads} * k);
  const uint64_t mid = n_tokens - kAnchors;
  for (size_t at = 0; at < ids.size(); ++at) {
    const uint64_t i = at % k, low = i * mid / k, high = std::max(low + 1, (i + 1) * mid / k);
    ids[at] = static_cast<uint32_t>(kSinks + low + rng() % (high - low));
  }
  return ids;
}

Stepper::Stepper(Team& team, const Layers& layers, const Model& model, uint32_t k)
    : team_(team), layers_(layers), model_(model), k_(k) {
  refs_.assign(kKvHeads, std::vector<RowRef>(k));
  y_.resize(model.queries.size());
  lse_.resize(size_t{kKvHeads} * kGroup);
  rho_.resize(size_t{kKvHeads} * kGroup);
}

double Stepper::Run(Variant variant, size_t layer, const std::vector<uint32_t>& ids) {
  return Seconds([&] {
    team_.ForEach(kKvHeads, [&](size_t h) { Head(h, variant, layer, ids.data() + h * k_); });
  });
}

void Stepper::Head(size_t h, Variant variant, size_t layer, const uint32_t* ids) {
  const RowsView rows = layers_.Head(layer, h);
  for (uint32_t i = 0; i < k_; ++i) refs_[h][i] = {rows.key(ids[i]), rows.value(ids[i])};
  const std::vector<Cut> cuts(kGroup, {3, CutKind::kExact});
  GroupStepInput in;
  in.queries = std::span(model_.queries).subspan(h * kGroup * kDim, kGroup * kDim);
  in.group = kGroup;
  in.layer = kLayer;
  in.sinks = rows.Sub(0, kSinks);
  in.tail = rows.Sub(layers_.n_tokens() - kTail, kTail);
  in.retrieved = ScatteredRows(refs_[h], kRow);
  in.cuts = cuts;
  in.estimator = variant == Variant::kNone        ? EstimatorKind::kNone
                 : variant >= Variant::kPhiStored ? EstimatorKind::kPhi
                                                  : EstimatorKind::kMoment;
  if (variant == Variant::kMean) in.moment = &model_.mean[h];
  if (variant == Variant::kRank8) in.moment = &model_.rank8[h];
  if (variant == Variant::kFullCross) in.moment = &model_.full[h];
  if (in.estimator == EstimatorKind::kPhi) {
    in.phi = &model_.phi[h];
    in.phi_q = std::span(model_.phi_q).subspan(h * kGroup, kGroup);
    in.phi_k = &model_.phi_k[h];
    if (variant == Variant::kPhiStored) {
      in.features = {
          {8, FeatureScale::kLinear}, model_.codes.data(), kPhiDim, model_.phi[h].m(), {}};
    }
  }
  in.mid_count = kSummarised;
  Check(GroupStep(in, {std::span(y_).subspan(h * kGroup * kDim, kGroup * kDim),
                       std::span(lse_).subspan(h * kGroup, kGroup),
                       std::span(rho_).subspan(h * kGroup, kGroup)}));
}

double ExactPass(Team& team, const Layers& layers, size_t layer, const Model& model) {
  return StreamingPass(team, layers, layer, model.queries, kGroup);
}

double SuffixPass(Team& team, const Layers& layers, size_t layer, const Model& model,
                  uint32_t n_tokens) {
  const uint32_t n = n_tokens * kGroup;
  std::vector<float> queries(size_t{kKvHeads} * n * kDim);
  for (size_t at = 0; at < queries.size(); ++at)
    queries[at] = model.queries[at % model.queries.size()];
  return StreamingPass(team, layers, layer, queries, n);
}

}  // namespace prefixd::bench
