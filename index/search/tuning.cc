#include "index/search/tuning.h"

#include <algorithm>
#include <cmath>

#include "attention/step/step.h"
#include "index/search/recall.h"

namespace prefixd::index {
namespace {

// Means over the queries as the index stands.
Result<MeasuredRecall> Measure(const KeyIndex& index, const TuningInput& in,
                               const CausalQueries& queries, SearchScratch& scratch) {
  const size_t floats = size_t{in.group} * in.keys.shape.key_dim;
  const TokenRange covered = index.covered();
  std::vector<float> scores;
  MeasuredRecall sum;
  for (size_t i = 0; i < queries.positions.size(); ++i) {
    const uint32_t end = std::min(queries.positions[i], covered.end);
    if (end < covered.begin + kMinCodeKeys) continue;
    SearchRequest request;
    request.queries = std::span(queries.q).subspan(i * floats, floats);
    request.group = in.group;
    request.layer = in.layer;
    request.candidates = {covered.begin, end};
    request.k = static_cast<uint32_t>(std::ceil(in.fraction * request.candidates.size()));
    request.keys = in.keys;
    request.first_token = covered.begin;
    request.scratch = &scratch;
    PREFIXD_ASSIGN(const Selection selection, index.Search(request));
    const RowsView seen = in.keys.Sub(0, request.candidates.size());
    scores.resize(in.group * seen.count);
    Scores(request.queries, in.group, in.layer, seen, scores);
    PREFIXD_ASSIGN(const SelectionQuality quality,
                   MeasureSelection(scores, in.group, covered.begin, selection.ids));
    sum.recall += quality.recall;
    sum.mass += quality.worst_relative_mass();
    sum.k = std::max(sum.k, request.k);
    ++sum.queries;
  }
  if (sum.queries > 0) {
    sum.recall /= sum.queries;
    sum.mass /= sum.queries;
  }
  return sum;
}

}  // namespace

Result<MeasuredRecall> Tune(KeyIndex& index, const TuningInput& in) {
  SearchScratch scratch;
  // What the held-out half finds lies around what this half found: a quarter of what may be missing
  // is left as room.
  const double wanted = in.target + (1 - in.target) / 4;
  const float own = index.effort();
  const std::vector<float> efforts = index.efforts();
  size_t least = 0, most = efforts.size() - 1;  // more effort finds no less
  MeasuredRecall found;
  for (bool known = false; least < most || !known;) {
    const size_t middle = (least + most) / 2;
    PREFIXD_TRY(index.SetEffort(efforts[middle]));
    PREFIXD_ASSIGN(found, Measure(index, in, in.tune, scratch));
    if (found.queries == 0) {
      PREFIXD_TRY(index.SetEffort(own));
      break;
    }
    known = least == most;
    if (found.recall >= wanted || known) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  if (!in.held_out.positions.empty()) {
    PREFIXD_ASSIGN(found, Measure(index, in, in.held_out, scratch));
  }
  return found;
}

}  // namespace prefixd::index
