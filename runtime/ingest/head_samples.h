// Gathers what the trials of one head need (runtime/ingest/choice.h): sampled queries, their exact
// outputs, every key's score, and the rows that are retrieved.
//
// Thread-safety: used by one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "index/ranking/group_ranking.h"
#include "prefixd/ingest.h"
#include "runtime/derived/query_samples.h"
#include "runtime/summaries/materialised_summaries.h"

namespace prefixd {

// One candidate at one budget.
struct Trial {
  size_t budget = 0;
  EstimatorVariant estimator = EstimatorKind::kNone;
  uint32_t k = 0;
};

// What is tried on the heads of a layer: layers whose rows differ can pay for different estimators.
struct Trials {
  std::vector<double> budgets;
  std::vector<Trial> all;
  uint32_t most = 0;     // largest k in any trial
  double row_bytes = 0;  // mean, as stored
};

// The prefix that is tried on, cut at P.
struct ChoiceInputs {
  const DerivedContext& context;
  const Model& model;
  const storage::StoredPrefix& prefix;
  const QuerySamples& samples;
  const FeatureMapSet* maps = nullptr;
  std::vector<SegmentPart> parts;  // the chain, up to P
  Partition partition;
  std::vector<Trials> trials;  // [layers]
  KeptSummaries kept;
  bool has_codes = false;
};

class HeadSamples {
 public:
  HeadSamples(const ChoiceInputs& in, uint32_t layer, uint32_t kv_head);

  Status Read();

  size_t count() const { return count_; }
  uint32_t group() const { return shape_.group_size(); }
  std::span<const float> queries(size_t s) const { return Part(queries_, s, shape_.key_dim); }
  std::span<const float> exact(size_t s) const { return Part(exact_, s, shape_.value_dim); }
  std::span<const float> scores(size_t s) const { return Part(scores_, s, mid_.size()); }
  const GroupRanking& ranking(size_t s) const { return rankings_[s]; }
  // Returns the k best rows of sample s, best first.
  RowsView retrieved(size_t s, uint32_t k) const {
    const RowShape row = shape_.row();
    return {retrieved_.data() + s * most_ * row.bytes(), k, row.bytes(), row};
  }
  RowsView sinks() const { return Anchors(0, in_.partition.sink.size()); }
  RowsView tail() const { return Anchors(in_.partition.sink.size(), in_.partition.tail.size()); }
  std::span<const uint16_t> clusters() const { return clusters_; }  // [mid], if a trial needs them

 private:
  std::span<const float> Part(const std::vector<float>& all, size_t s, size_t dim) const {
    return std::span(all).subspan(s * group() * dim, group() * dim);
  }
  RowsView Anchors(size_t first, size_t n) const {
    const RowShape row = shape_.row();
    return {anchors_.data() + first * row.bytes(), n, row.bytes(), row};
  }
  void PickQueries();
  template <typename Visit>
  Status Stream(Visit visit);
  Status ReadScores();
  Status ReadRetrieved();

  const ChoiceInputs& in_;
  const uint32_t most_;
  const LayerGeometry& layer_geometry_;
  const LayerShape shape_;
  const uint32_t layer_, kv_head_, n_;
  const TokenRange mid_;
  size_t count_ = 0;
  std::vector<float> queries_, exact_, scores_;  // [count][G][...]
  std::vector<GroupRanking> rankings_;           // [count]
  std::vector<uint16_t> clusters_;               // [mid]
  std::vector<std::byte> anchors_;
  std::vector<std::byte> retrieved_;  // [count][most] rows, best first
};

}  // namespace prefixd
