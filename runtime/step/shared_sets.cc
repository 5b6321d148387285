#include "runtime/step/shared_sets.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "attention/rows/sum_of.h"
#include "index/codes/code_scan.h"

namespace prefixd {

SharedSets::SharedSets(const StepPolicy::Sharing& sharing, std::span<const uint32_t> groups,
                       const MemoryAccount& memory)
    : sharing_(sharing), heads_(groups.size()) {
  for (size_t head = 0; head < groups.size(); ++head) {
    heads_[head].group = groups[head];
    heads_[head].memory = memory.Charge(MemoryKind::kSharedSets);
  }
}

uint64_t SharedSets::BytesOf(const Query& query) const {
  return sizeof(Step) + query.q.size() * sizeof(float) + query.norms.size() * sizeof(double);
}

uint64_t SharedSets::BytesOf(const Retrieved& retrieved) const {
  return sizeof(Retrieved) + sizeof(RetrievedSet) + sizeof(GatheredRowsSlot) +
         BytesOf(retrieved.query) + retrieved.set->ids.size() * sizeof(uint32_t) +
         retrieved.set->offsets.size() * sizeof(Cut);
}

namespace {

double Dot(std::span<const float> a, std::span<const float> b) {
  return SumOf(a.size(), [&](size_t i) { return double{a[i]} * b[i]; });
}

}  // namespace

SharedSets::Query SharedSets::QueryOf(std::span<const float> q, uint32_t group) {
  Query query{{q.begin(), q.end()}, {}};
  const size_t dim = q.size() / group;
  for (uint32_t g = 0; g < group; ++g) {
    const auto head = q.subspan(g * dim, dim);
    query.norms.push_back(std::sqrt(Dot(head, head)));
  }
  return query;
}

bool SharedSets::Similar(const Query& a, const Query& b) const {
  const size_t group = a.norms.size(), dim = a.q.size() / group;
  for (size_t g = 0; g < group; ++g) {
    const double ab =
        Dot(std::span(a.q).subspan(g * dim, dim), std::span(b.q).subspan(g * dim, dim));
    // A query of zeros is similar to none.
    if (!(ab > sharing_.similarity * a.norms[g] * b.norms[g])) return false;
  }
  return true;
}

SharedSet SharedSets::Find(size_t head, std::span<const float> q, bool* last) {
  Head& state = heads_[head];
  Query query = QueryOf(q, state.group);
  std::lock_guard lock(state.mutex);
  std::shared_ptr<const Retrieved> found;
  if (state.at == 0) {
    // Across the border of blocks only the last step's set is shared, compared with the query that
    // retrieved it, so that a set never drifts further than the threshold allows.
    if (sharing_.across && !state.earlier.empty()) {
      const auto& before = state.earlier.back().set;
      if (Similar(query, before->query)) found = before;
    }
    state.earlier.clear();
    state.memory.Set(0);
    if (found && !state.memory.TryResize(BytesOf(*found))) found = nullptr;
  } else {
    for (auto step = state.earlier.rbegin(); step != state.earlier.rend() && !found; ++step) {
      if (Similar(query, step->query)) found = step->set;
    }
  }
  state.at = (state.at + 1) % sharing_.block;
  if (last) *last = state.at == 0 && !sharing_.across;
  if (!found) return nullptr;
  if (state.memory.TryResize(state.memory.bytes() + BytesOf(query))) {
    state.earlier.push_back({std::move(query), found});
  }
  return found->set;
}

void SharedSets::Keep(size_t head, std::span<const float> q, RetrievedSet set) {
  Head& state = heads_[head];
  Query query = QueryOf(q, state.group);
  auto kept = std::make_shared<const Retrieved>(
      Retrieved{query, std::make_shared<const RetrievedSet>(std::move(set))});
  std::lock_guard lock(state.mutex);
  if (!state.memory.TryResize(state.memory.bytes() + BytesOf(query) + BytesOf(*kept))) return;
  state.earlier.push_back({std::move(query), std::move(kept)});
}

namespace {

// Returns [G] log-sum-exps of scores [G][n], n >= 1.
std::vector<double> LogSumExps(std::span<const float> scores, size_t group) {
  const size_t n = scores.size() / group;
  std::vector<double> out;
  for (size_t g = 0; g < group; ++g) {
    const float* row = scores.data() + g * n;
    const float top = CodeScan().largest_float(row, n);
    out.push_back(top + std::log(CodeScan().exp_total(row, n, -top)));
  }
  return out;
}

}  // namespace

std::vector<Cut> MakeCutOffsets(std::span<const Cut> cuts, std::span<const float> scores) {
  if (cuts.empty() || scores.empty()) return std::vector<Cut>(cuts.size());
  const std::vector<double> lse = LogSumExps(scores, cuts.size());
  std::vector<Cut> offsets(cuts.size());
  for (size_t g = 0; g < cuts.size(); ++g) {
    if (cuts[g].kind == CutKind::kNone) continue;
    offsets[g] = {static_cast<float>(cuts[g].score - lse[g]), CutKind::kApproximate};
  }
  return offsets;
}

std::vector<Cut> CutsFromOffsets(std::span<const Cut> offsets, std::span<const float> scores) {
  if (offsets.empty() || scores.empty()) return std::vector<Cut>(offsets.size());
  const std::vector<double> lse = LogSumExps(scores, offsets.size());
  std::vector<Cut> cuts(offsets.size());
  for (size_t g = 0; g < cuts.size(); ++g) {
    if (offsets[g].kind == CutKind::kNone) continue;
    cuts[g] = {static_cast<float>(offsets[g].score + lse[g]), CutKind::kApproximate};
  }
  return cuts;
}

std::vector<uint32_t> Dilated(std::span<const uint32_t> ids, std::span<const uint32_t> best,
                              uint32_t reach, TokenRange within) {
  std::vector<uint32_t> of(best.begin(), best.end());
  std::sort(of.begin(), of.end());
  std::vector<uint32_t> near;
  uint32_t next = within.begin;  // tokens before it are taken or excluded
  for (const uint32_t id : of) {
    const uint32_t end = id >= within.end ? 0 : std::min(reach, within.end - 1 - id) + id + 1;
    for (next = std::max(next, id - std::min(id, reach)); next < end; ++next) near.push_back(next);
  }
  std::vector<uint32_t> out;
  out.reserve(ids.size() + near.size());
  std::set_union(ids.begin(), ids.end(), near.begin(), near.end(), std::back_inserter(out));
  return out;
}

}  // namespace prefixd
