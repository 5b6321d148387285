#include "bench/selection/selection_cases.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>

#include "attention/step/step.h"
#include "index/code_search/code_blocks.h"
#include "index/codes/code_scan.h"
#include "index/codes/key_codes.h"
#include "index/ranking/group_ranking.h"
#include "index/search/key_index.h"
#include "index/search/recall.h"
#include "index/search/tuning.h"
#include "measure/timing/read_bandwidth.h"
#include "measure/timing/statistics.h"
#include "prefixd/selection.h"
#include "runtime/step/shared_sets.h"

namespace prefixd::bench {
namespace {

using index::KeyIndex;
using Built = Result<std::unique_ptr<KeyIndex>>;
using Build = std::function<Built(const HeadTrace&)>;

double Now(bool cpu_time) {
  timespec now;
  clock_gettime(cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

double Seconds(const std::function<void()>& run, bool cpu_time = false) {
  const double begun = Now(cpu_time);
  run();
  return Now(cpu_time) - begun;
}

TokenRange All(const HeadTrace& head) { return {0, static_cast<uint32_t>(head.view().count)}; }

index::SearchRequest RequestOf(const HeadTrace& head, size_t step, uint32_t k) {
  index::SearchRequest request;
  request.queries = head.step(step);
  request.group = head.group;
  request.layer = head.layer;
  request.candidates = All(head);
  request.k = k;
  request.keys = head.view();
  return request;
}

// A candidate is a row of the table: an index and its search effort.
struct Candidate {
  std::string name;
  Build build;                  // null: same index as the row before
  std::optional<float> effort;  // none: the built one
};

// Splits the put's sample in two halves, as the runtime does (runtime/ingest/index_build.cc); every
// query saw at least the first three quarters.
struct Halves {
  index::CausalQueries tune, held_out;
};
Halves HalvesOf(const HeadTrace& head) {
  Halves halves;
  const size_t floats = size_t{head.group} * head.shape.key_dim;
  for (size_t i = 0; (i + 1) * floats <= head.sample_queries.size(); ++i) {
    index::CausalQueries& half = i % 2 == 0 ? halves.tune : halves.held_out;
    const auto q = std::span(head.sample_queries).subspan(i * floats, floats);
    half.q.insert(half.q.end(), q.begin(), q.end());
    half.positions.push_back(All(head).end / 4 * 3);
  }
  return halves;
}

constexpr double kTarget = 0.95;

Built Tuned(const HeadTrace& head, Built built) {
  if (!built.ok()) return built;
  const Halves halves = HalvesOf(head);
  PREFIXD_ASSIGN(const auto measured,
                 index::Tune(**built, {halves.tune, halves.held_out, head.group, head.layer,
                                       head.view(), 0.01, kTarget}));
  static_cast<void>(measured);
  return built;
}

std::vector<Candidate> Candidates(const MeasureOptions& options) {
  std::vector<Candidate> all;
  all.push_back({"exact",
                 [](const HeadTrace& head) -> Built { return index::MakeExactIndex(All(head)); },
                 {}});
  const auto add = [&](const std::string& name, const Build& build, bool untuned = false) {
    const auto wanted = [&](const std::string& full) {
      return full.find(options.only) != std::string::npos;
    };
    if (options.efforts.empty()) {
      if (wanted(name)) {
        all.push_back(
            {name, [build](const HeadTrace& head) { return Tuned(head, build(head)); }, {}});
      }
      if (untuned && wanted(name + ", untuned")) all.push_back({name + ", untuned", build, {}});
    }
    if (!wanted(name)) return;
    for (const float effort : options.efforts) {
      all.push_back({name, effort == options.efforts.front() ? build : nullptr, effort});
    }
  };
  add(
      "codes", [](const HeadTrace& head) { return index::BuildCodesIndex(head.view(), All(head)); },
      /*untuned=*/true);
  add("faiss ivf",
      [](const HeadTrace& head) { return index::BuildIvfIndex(head.view(), All(head), {}); });
  return all;
}

// The members are sums over the heads; they are divided at the end.
struct SearchSums {
  IndexResult result;
  std::vector<double> times, speedups;
  double searches = 0;
};

Status MeasureHead(const HeadTrace& head, const MeasureOptions& options,
                   std::span<const Candidate> candidates, std::vector<SearchSums>& sums) {
  const RowsView keys = head.view();
  const auto k = static_cast<uint32_t>(std::ceil(0.01 * double(keys.count)));
  std::vector<std::shared_ptr<KeyIndex>> indexes;  // one per row; rows may share one
  double build_seconds = 0;
  size_t stored_bytes = 0;
  for (size_t c = 0; c < candidates.size(); ++c) {
    if (candidates[c].build) {
      Built built = std::unique_ptr<KeyIndex>();
      build_seconds = Seconds([&] { built = candidates[c].build(head); }, options.cpu_time);
      if (!built.ok()) return built.error();
      indexes.push_back(std::move(built).value());
      PREFIXD_ASSIGN(const auto bytes, indexes.back()->Serialize());
      stored_bytes = bytes.size();
    } else {
      indexes.push_back(indexes.back());
    }
    IndexResult& r = sums[c].result;
    r.build_seconds += build_seconds;
    r.effort += candidates[c].effort.value_or(indexes.back()->effort());
    r.bytes_per_key += double(stored_bytes) / double(keys.count);
  }
  std::vector<double> recall(candidates.size(), 0.0);
  std::vector<float> scores(head.group * keys.count);
  index::SearchScratch scratch;
  for (size_t step = 0; step < head.n_steps(); ++step) {
    Scores(head.step(step), head.group, head.layer, keys, scores);
    double exact_seconds = 0;
    for (size_t c = 0; c < candidates.size(); ++c) {
      IndexResult& r = sums[c].result;
      if (candidates[c].effort) PREFIXD_TRY(indexes[c]->SetEffort(*candidates[c].effort));
      index::SearchRequest request = RequestOf(head, step, k);
      request.scratch = &scratch;
      std::vector<double> times;
      Result<Selection> selection = Selection{};
      for (uint32_t round = 0; round < options.rounds; ++round) {
        times.push_back(
            Seconds([&] { selection = indexes[c]->Search(request); }, options.cpu_time));
      }
      if (!selection.ok()) return selection.error();
      const double seconds = Summarise(times).median;
      if (c == 0) exact_seconds = seconds;
      sums[c].times.push_back(seconds);
      sums[c].speedups.push_back(exact_seconds / seconds);
      PREFIXD_ASSIGN(const auto quality,
                     index::MeasureSelection(scores, head.group, 0, selection->ids));
      r.recall_k += quality.recall;
      recall[c] += quality.recall;
      double mass = 0;
      for (size_t g = 0; g < head.group; ++g) mass += quality.mass[g] / quality.best_mass[g];
      r.relative_mass += mass / head.group;
      r.keys_scanned += double(selection->keys_scanned) / double(keys.count);
      r.bytes_fraction +=
          double(selection->bytes_scanned) / double(keys.count * keys.shape.key_bytes());
      request.k = std::min(100u, k);
      PREFIXD_ASSIGN(const auto hundred, indexes[c]->Search(request));
      PREFIXD_ASSIGN(const auto quality_100,
                     index::MeasureSelection(scores, head.group, 0, hundred.ids));
      r.recall_100 += quality_100.recall;
      sums[c].searches += 1;
    }
  }
  for (size_t c = 0; c < candidates.size(); ++c) {
    sums[c].result.worst_recall_k =
        std::min(sums[c].result.worst_recall_k, recall[c] / double(head.n_steps()));
  }
  return {};
}

}  // namespace

Result<std::vector<IndexResult>> MeasureIndexes(std::span<const HeadTrace> heads,
                                                const MeasureOptions& options) {
  const std::vector<Candidate> candidates = Candidates(options);
  std::vector<SearchSums> sums(candidates.size());
  for (size_t c = 0; c < candidates.size(); ++c) sums[c].result.index = candidates[c].name;
  for (const HeadTrace& head : heads) {
    PREFIXD_TRY(MeasureHead(head, options, candidates, sums));
  }
  std::vector<IndexResult> results;
  for (SearchSums& sum : sums) {
    IndexResult& r = sum.result;
    r.bytes_per_key /= double(heads.size());
    r.build_seconds /= double(heads.size());
    r.effort /= double(heads.size());
    for (double* mean :
         {&r.keys_scanned, &r.bytes_fraction, &r.recall_100, &r.recall_k, &r.relative_mass}) {
      *mean /= sum.searches;
    }
    std::sort(sum.times.begin(), sum.times.end());
    r.median_ms = 1e3 * sum.times[sum.times.size() / 2];
    r.p99_ms = 1e3 * sum.times[(sum.times.size() - 1) * 99 / 100];
    r.speedup = Summarise(sum.speedups).median;
    results.push_back(std::move(r));
  }
  return results;
}

Result<std::vector<SharedResult>> MeasureSharedSearches(
    const HeadTrace& head, std::span<const StepPolicy::Sharing> settings) {
  const RowsView keys = head.view();
  const size_t n = keys.count;
  const auto k = static_cast<uint32_t>(std::ceil(0.01 * double(n)));
  PREFIXD_ASSIGN(const auto codes, Tuned(head, index::BuildCodesIndex(keys, All(head))));
  std::vector<SharedResult> results;
  std::vector<SharedSets> sets;
  for (const StepPolicy::Sharing& sharing : settings) {
    results.emplace_back().sharing = sharing;
    sets.emplace_back(sharing, std::vector<uint32_t>{head.group});
  }
  std::vector<float> scores(head.group * n);
  index::SearchScratch scratch;
  for (size_t step = 0; step < head.n_steps(); ++step) {
    Scores(head.step(step), head.group, head.layer, keys, scores);
    index::SearchRequest request = RequestOf(head, step, k);
    request.scratch = &scratch;
    PREFIXD_ASSIGN(const Selection own, codes->Search(request));
    const Selection exact = SelectByGroupMax(scores, head.group, static_cast<uint32_t>(n), k, 0,
                                             /*scores_complete=*/true);
    // Dilation takes the best of the retrieved set.
    std::vector<float> of_own;
    for (uint32_t g = 0; g < head.group; ++g) {
      for (const uint32_t id : own.ids) of_own.push_back(scores[g * n + id]);
    }
    const GroupRanking ranking = RankByGroupMax(
        of_own, head.group, static_cast<uint32_t>(own.ids.size()), static_cast<uint32_t>(k / 3));
    for (size_t i = 0; i < results.size(); ++i) {
      SharedResult& r = results[i];
      const SharedSet shared = r.sharing.on() ? sets[i].Find(0, head.step(step)) : nullptr;
      if (!shared) {
        std::vector<uint32_t> best;
        for (uint32_t j = 0; j < k / 3; ++j) best.push_back(own.ids[ranking.best[j]]);
        std::sort(best.begin(), best.end());
        sets[i].Keep(0, head.step(step),
                     {Dilated(own.ids, best, r.sharing.dilation, All(head)), {}});
        r.rho += 1;
        r.search_bytes += double(own.bytes_scanned) / double(n * keys.shape.key_bytes());
      }
      const std::vector<uint32_t>& ids = shared ? shared->ids : own.ids;
      std::vector<uint32_t> hits;
      std::set_intersection(ids.begin(), ids.end(), exact.ids.begin(), exact.ids.end(),
                            std::back_inserter(hits));
      r.recall_k += double(hits.size()) / k;
      r.tokens += double(ids.size()) / k;
      for (uint32_t g = 0; g < head.group; ++g) {
        const float* row = scores.data() + g * n;
        const float top = *std::max_element(row, row + n);
        double read = 0, most = 0;
        for (const uint32_t id : ids) read += std::exp(double{row[id]} - top);
        for (const uint32_t id : exact.ids) most += std::exp(double{row[id]} - top);
        r.relative_mass += read / most / head.group;
      }
    }
  }
  const double steps = double(head.n_steps());
  for (SharedResult& r : results) {
    r.amortized_bytes = r.search_bytes / steps;
    r.search_bytes /= std::max(1.0, r.rho);
    for (double* sum : {&r.rho, &r.tokens, &r.recall_k, &r.relative_mass}) *sum /= steps;
  }
  return results;
}

Result<ScanResult> MeasureScan(uint32_t rounds) {
  constexpr uint32_t kDim = 128, kFields = CodeFields(kDim), kHeads = 4;
  constexpr size_t kKeys = size_t{1} << 20, kPieces = 64;  // 2 GiB, like a store's many heads
  const size_t piece = CodeBlocks(kKeys) * CodeBlockBytes(kDim);
  index::CodeMemory codes(kPieces * piece);  // memory as an index keeps it
  uint64_t state = 1;
  for (size_t i = 0; i + 8 <= codes.bytes().size(); i += 8) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(codes.bytes().data() + i, &state, 8);
  }
  std::vector<int8_t> weights(kHeads * kFields);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<int8_t>(i * 37 % 255 - 127);
  const std::vector<int32_t> bias(kHeads, 0);
  // A search reads its codes in one run, but what it writes stays in the cache.
  constexpr size_t kRun = 4096 / kCodeBlockKeys;
  std::vector<int16_t> out(kHeads * kRun * kCodeBlockKeys);
  size_t turn = 0;
  const auto scan = [&](size_t heads) {
    const std::byte* at = codes.bytes().data() + turn++ % kPieces * piece;
    const double seconds = Seconds([&] {
      for (size_t b = 0; b < CodeBlocks(kKeys); b += kRun) {
        CodeScan().scan(at + b * CodeBlockBytes(kDim), nullptr, kRun,
                        {weights.data(), bias.data(), heads, kFields}, out.data(),
                        kRun * kCodeBlockKeys);
      }
    });
    return double(piece) / seconds;
  };
  std::vector<double> one, four, plain, fraction;
  for (uint32_t round = 0; round < rounds; ++round) {
    std::vector<double> a, b, c;
    for (int i = 0; i < 5; ++i) {
      a.push_back(scan(1));
      b.push_back(scan(kHeads));
      c.push_back(ReadBandwidth(codes.bytes().subspan(turn++ % kPieces * piece, piece)));
    }
    one.push_back(Summarise(a).median);
    four.push_back(Summarise(b).median);
    plain.push_back(Summarise(c).median);
    fraction.push_back(four.back() / plain.back());
  }
  return ScanResult{Summarise(one).median, Summarise(four).median, Summarise(plain).median,
                    Summarise(fraction).median};
}

}  // namespace prefixd::bench
