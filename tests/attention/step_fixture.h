// Provides a stored prefix for one KV head, its summaries, and the step over it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/reference/reference.h"
#include "attention/step/step.h"
#include "index/ranking/group_ranking.h"
#include "prefixd/partition.h"
#include "tests/support/random_kv.h"

namespace prefixd::testing {

struct StepOutput {
  std::vector<float> y, lse, rho_z;
  GroupStepOutput spans() { return {y, lse, rho_z}; }
};

// Owns everything that a GroupStepInput borrows.
struct StepCase {
  OwnedRows rows;  // the whole prefix
  Partition parts;
  uint32_t group = 1;
  LayerGeometry layer;
  std::vector<float> queries;
  std::vector<uint32_t> ids;  // retrieved
  OwnedRows retrieved;
  std::vector<Cut> cuts;
  MomentSummary moment;
  PhiCache phi;
  std::vector<FeatureMap> phi_q;
  FeatureMap phi_k;

  StepCase(OwnedRows prefix, Anchors anchors, uint32_t g, std::vector<float> q, float scale)
      : rows(std::move(prefix)),
        parts(Partition::Of(static_cast<uint32_t>(rows.count()), anchors)),
        group(g),
        layer{scale, 0, 0},
        queries(std::move(q)) {}

  RowShape shape() const { return rows.view().shape; }
  RowsView Mid() const { return rows.view().Sub(parts.mid.begin, parts.mid.size()); }
  void Retrieve(std::vector<uint32_t> tokens) {
    ids = std::move(tokens);
    retrieved = rows.Pick(ids);
  }
  // Returns the mid tokens that are not retrieved.
  OwnedRows Rest() const {
    std::vector<uint32_t> rest;
    for (uint32_t i = parts.mid.begin; i < parts.mid.end; ++i) {
      if (!std::binary_search(ids.begin(), ids.end(), i)) rest.push_back(i);
    }
    return rows.Pick(rest);
  }
  // Retrieves the k mid tokens that the exact selector takes, with its cuts.
  void RetrieveTop(uint32_t k) {
    std::vector<float> scores(size_t{group} * parts.mid.size());
    Scores(queries, group, layer, Mid(), scores);
    Selection s = SelectByGroupMax(scores, group, parts.mid.size(), k, parts.mid.begin, true);
    cuts = s.cuts;
    Retrieve(std::move(s.ids));
  }
  void BuildMoment(bool cross) {
    moment = MomentSummary(shape().key_dim, shape().value_dim, cross);
    moment.Add(Mid());
  }
  void BuildPhi(Random& random, uint32_t d_emb, uint32_t d_phi) {
    phi_k = RandomFeatureMap(random, shape().key_dim, d_emb, d_phi);
    phi_q.clear();
    for (uint32_t g = 0; g < group; ++g) {
      phi_q.push_back(RandomFeatureMap(random, shape().key_dim, d_emb, d_phi));
    }
    phi = PhiCache(d_phi, shape().value_dim);
    phi.Add(Mid(), phi_k);
  }

  GroupStepInput Input(EstimatorKind kind) const {
    GroupStepInput in;
    in.queries = queries;
    in.group = group;
    in.layer = layer;
    in.sinks = rows.view().Sub(parts.sink.begin, parts.sink.size());
    in.tail = rows.view().Sub(parts.tail.begin, parts.tail.size());
    in.retrieved = retrieved.view();
    in.cuts = cuts;
    in.mid_count = parts.mid.size();
    in.estimator = kind;
    in.moment = kind != EstimatorKind::kNone && moment.key_dim() > 0 ? &moment : nullptr;
    if (kind == EstimatorKind::kPhi) {
      in.phi = &phi;
      in.phi_q = phi_q;
      in.phi_k = &phi_k;
    }
    return in;
  }
  StepOutput Buffers() const {
    const size_t g = group;
    return {std::vector<float>(g * shape().value_dim, -77), std::vector<float>(g, -77),
            std::vector<float>(g, -77)};
  }
};

// Makes a prefix of `n` random tokens whose scores have the given standard deviation.
inline StepCase RandomCase(Random& random, uint32_t n, RowShape shape, Anchors anchors,
                           uint32_t group, double score_deviation) {
  OwnedRows rows = RandomRows(random, shape, n);
  const float scale = 1 / std::sqrt(static_cast<float>(shape.key_dim));
  std::vector<float> queries =
      random.Normals(size_t{group} * shape.key_dim, static_cast<float>(score_deviation));
  return StepCase(std::move(rows), anchors, group, std::move(queries), scale);
}

// Returns the factor in the bound of step.h.
inline double ExactBound(double max_abs_score) { return 2e-6 + 4e-7 * max_abs_score; }

}  // namespace prefixd::testing
