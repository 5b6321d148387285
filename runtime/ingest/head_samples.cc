#include "runtime/ingest/head_samples.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "attention/step/step.h"
#include "base/check.h"
#include "prefixd/merge.h"

namespace prefixd {
namespace {

// Measuring costs samples x tokens, so longer prefixes get fewer samples.
constexpr uint64_t kSampleTokens = 16 * 16384;
constexpr size_t kMinSamples = 4;

}  // namespace

HeadSamples::HeadSamples(const ChoiceInputs& in, uint32_t layer, uint32_t kv_head)
    : in_(in),
      most_(in.trials[layer].most),
      layer_geometry_(in.model.spec.geometry.layers[layer]),
      shape_(in.model.spec.geometry.layer(layer)),
      layer_(layer),
      kv_head_(kv_head),
      n_(in.partition.tail.end),
      mid_(in.partition.mid) {}

Status HeadSamples::Read() {
  PickQueries();
  if (count_ == 0) return {};
  PREFIXD_TRY(ReadScores());
  rankings_.clear();
  for (size_t s = 0; s < count_; ++s) {
    rankings_.push_back(RankByGroupMax(scores(s), group(), mid_.size(), most_));
  }
  return ReadRetrieved();
}

// Picks samples spread over the kept positions, which ascend.
void HeadSamples::PickQueries() {
  const QuerySamples::Layer& samples = in_.samples.layers[layer_];
  const size_t wanted = std::max<size_t>(kMinSamples, kSampleTokens / n_);
  count_ = std::min(samples.positions.size(), wanted);
  for (size_t s = 0; s < count_; ++s) {
    const size_t at = s * samples.positions.size() / count_;
    const float* q =
        samples.q.data() + (at * shape_.n_q_heads + size_t{kv_head_} * group()) * shape_.key_dim;
    queries_.insert(queries_.end(), q, q + size_t{group()} * shape_.key_dim);
  }
}

// Calls visit(run, rows) for every row once, in order.
template <typename Visit>
Status HeadSamples::Stream(Visit visit) {
  const RowShape row = shape_.row();
  const auto scratch = in_.context.scratch.Acquire();
  for (uint32_t at = 0; at < n_;) {
    const TokenRange run{at, std::min(n_, RunEnd(in_.prefix.parts(), at, kRunTokens))};
    const auto bytes = Scratch::Take(scratch->rows, run.size() * row.bytes());
    PREFIXD_TRY(in_.prefix.ReadRange(layer_, kv_head_, run, bytes, nullptr));
    PREFIXD_TRY(visit(run, RowsView{bytes.data(), run.size(), row.bytes(), row}));
    at = run.end;
  }
  return {};
}

Status HeadSamples::ReadScores() {
  const RowShape row = shape_.row();
  const auto heads = static_cast<uint32_t>(count_ * group());
  const size_t head = in_.model.heads.of(layer_, kv_head_);
  const PrefixClusters* clusters = nullptr;
  for (const auto& [variant, kept] : in_.kept) {
    const auto of = kept.find(head);
    if (of != kept.end() && of->second->clusters) clusters = of->second->clusters.get();
  }
  exact_.assign(size_t{heads} * row.value_dim, 0);
  scores_.resize(size_t{heads} * mid_.size());
  anchors_.resize(in_.partition.anchor_count() * row.bytes());
  std::vector<float> lse(heads, -std::numeric_limits<float>::infinity());
  std::vector<float> run_y(exact_.size()), run_lse(heads), block;
  return Stream([&](TokenRange run, const RowsView& rows) -> Status {
    const LayerGeometry& layer = layer_geometry_;
    PREFIXD_TRY(ExactAttention(queries_, heads, layer, rows, run_y, run_lse));
    for (uint32_t h = 0; h < heads; ++h) {
      const size_t at = size_t{h} * row.value_dim;
      MergeStates(std::span(exact_).subspan(at, row.value_dim), &lse[h],
                  std::span(run_y).subspan(at, row.value_dim), run_lse[h]);
    }
    block.resize(size_t{heads} * rows.count);
    Scores(queries_, heads, layer, rows, block);
    for (uint32_t t = run.begin; t < run.end; ++t) {
      const size_t i = t - run.begin;
      if (mid_.contains(t)) continue;
      const size_t at = t < mid_.begin ? t : in_.partition.sink.size() + t - mid_.end;
      std::memcpy(anchors_.data() + at * row.bytes(), rows.key(i), row.bytes());
    }
    const uint32_t begin = std::max(run.begin, mid_.begin), end = std::min(run.end, mid_.end);
    for (uint32_t h = 0; h < heads && begin < end; ++h) {
      std::copy_n(block.data() + size_t{h} * rows.count + (begin - run.begin), end - begin,
                  scores_.data() + size_t{h} * mid_.size() + (begin - mid_.begin));
    }
    if (clusters && begin < end && in_.model.Summarised(layer_)) {
      const auto of_run =
          clusters->Of(head, {begin, end}, rows.Sub(begin - run.begin, end - begin));
      clusters_.insert(clusters_.end(), of_run.begin(), of_run.end());
    }
    return {};
  });
}

// Reads the rows that any trial retrieves, in one pass in order of position.
Status HeadSamples::ReadRetrieved() {
  const RowShape row = shape_.row();
  struct Wanted {
    uint32_t token;
    size_t slot;
    bool operator<(const Wanted& o) const { return token < o.token; }
  };
  std::vector<Wanted> wanted;
  for (size_t s = 0; s < count_; ++s) {
    const std::vector<uint32_t>& best = rankings_[s].best;
    const size_t k = std::min<size_t>(best.size(), most_);
    for (size_t i = 0; i < k; ++i) wanted.push_back({mid_.begin + best[i], s * most_ + i});
  }
  if (wanted.empty()) return {};
  std::sort(wanted.begin(), wanted.end());
  retrieved_.resize(count_ * most_ * row.bytes());
  auto next = wanted.begin();
  PREFIXD_TRY(Stream([&](TokenRange run, const RowsView& rows) -> Status {
    for (; next != wanted.end() && next->token < run.end; ++next) {
      std::memcpy(retrieved_.data() + next->slot * row.bytes(), rows.key(next->token - run.begin),
                  row.bytes());
    }
    return {};
  }));
  PREFIXD_CHECK(next == wanted.end());  // the runs were ascending and left nothing out
  return {};
}

}  // namespace prefixd
