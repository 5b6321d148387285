#include "measure/break_even/outcome.h"

#include <algorithm>

#include "measure/timing/json_file.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

json Optional(const std::optional<double>& value) { return value ? json(*value) : json(); }

json TimesJson(const TokenMs& ms) {
  return {{"select_ms", ms.select},
          {"load_ms", ms.load},
          {"compute_ms", ms.compute},
          {"wall_ms", ms.wall}};
}

json CompletionJson(const TradeOff& map, const TierOutcome& tier, const CompletionPoint& point) {
  const CompletedTimes done = CompletedOf(tier, point);
  json even = json::array();
  for (const double xi : kMapXis) {
    even.push_back({{"xi", xi},
                    {"gamma", Optional(map.BreakEvenGamma(done, xi, 1, false))},
                    {"gamma_with_selection", Optional(map.BreakEvenGamma(done, xi, 1, true))}});
  }
  json contours = json::array();
  for (const double c : kContourShares) {
    for (const bool with_selection : {false, true}) {
      json points = json::array();
      for (const double xi : LogSteps(TradeOff::kMaxXi, 13)) {
        points.push_back(
            {{"xi", xi}, {"gamma", Optional(map.BreakEvenGamma(done, xi, c, with_selection))}});
      }
      contours.push_back({{"c", c}, {"with_selection", with_selection}, {"points", points}});
    }
  }
  return {{"times", TimesJson(point.ms)},
          {"estimate_ms", point.estimate},
          {"summary_tokens", point.summary_tokens},
          {"break_even", even},
          {"contours", contours}};
}

json TierJson(const BreakEvenOutcome& outcome, const LengthOutcome& length,
              const TierOutcome& tier) {
  const TradeOff map = MapOf(length, tier);
  json out = {{"name", tier.name},
              {"compute", tier.compute},
              {"xi", XiOf(length, tier)},
              {"full_attention_ms", tier.full_ms},
              {"topk", json::array()},
              {"completion", json::object()},
              {"attach_ms", tier.completed.attach_ms},
              {"first_token_ms", tier.completed.first_ms},
              {"topk_attach_ms", tier.selected.attach_ms},
              {"topk_first_token_ms", tier.selected.first_ms},
              {"restore_ms", tier.restore_ms},
              {"amplification", tier.amplification},
              {"ways", json::array()}};
  for (const TopKPoint& p : tier.topk) {
    out["topk"].push_back({{"gamma", p.gamma}, {"k", p.k}, {"times", TimesJson(p.ms)}});
  }
  for (const CompletionPoint& p : tier.completion) {
    out["completion"][p.name] = CompletionJson(map, tier, p);
  }
  for (const Way& way : WaysOf(outcome, length, tier)) {
    out["ways"].push_back(
        {{"name", way.name}, {"once_ms", way.once_ms}, {"token_ms", way.token_ms}});
  }
  const double restore = tier.restore_ms.median / 1e3;
  out["restore_tokens_per_second"] = restore > 0 ? json(length.tokens / restore) : json();
  return out;
}

// Of the shortest length, with rows in host memory: where the map's axis of xi begins.
json RatiosJson(const BreakEvenOutcome& outcome) {
  json ratios = json::object();
  for (const LengthOutcome& length : outcome.lengths) {
    if (length.tokens == 16384) {
      ratios["attach_ms_16k"] = length.tiers.front().completed.attach_ms;
      ratios["attach_ms_16k_layers_measured"] = length.layers;
    }
  }
  if (outcome.lengths.empty()) return ratios;
  const LengthOutcome& length = outcome.lengths.front();
  const TierOutcome& tier = length.tiers.front();
  if (!tier.host || tier.compute != "cpu") return ratios;
  for (const CompletionPoint& p : tier.completion) {
    if (p.name != "moment") continue;
    const TradeOff map = MapOf(length, tier);
    const CompletedTimes done = CompletedOf(tier, p);
    ratios["break_even_gamma_at_xi1_moment"] = Optional(map.BreakEvenGamma(done, 1, 1, true));
    ratios["break_even_gamma_at_xi1_moment_without_selection"] =
        Optional(map.BreakEvenGamma(done, 1, 1, false));
  }
  return ratios;
}

}  // namespace

double BreakEvenOutcome::PrefillSeconds(uint64_t n) const {
  if (prefill_tokens_per_second > 0) return double(n) / prefill_tokens_per_second;
  return gemm_flops > 0 ? model.PrefillFlops(n) / gemm_flops : 0;
}

TradeOff MapOf(const LengthOutcome& length, const TierOutcome& tier) {
  std::vector<SweepPoint> sweep;
  for (const TopKPoint& p : tier.topk) {
    sweep.push_back({double(p.k), {p.ms.select.median, p.ms.load.median, p.ms.compute.median}});
  }
  return {std::move(sweep), double(length.k_phi)};
}

CompletedTimes CompletedOf(const TierOutcome& tier, const CompletionPoint& point) {
  const double topk = tier.topk.front().ms.compute.median;
  return {{point.ms.select.median, point.ms.load.median, topk},
          std::max(0.0, point.estimate.median)};
}

double XiOf(const LengthOutcome& length, const TierOutcome& tier) {
  const auto base = std::ranges::find_if(length.tiers, [&](const TierOutcome& other) {
    return other.host && other.compute == tier.compute;
  });
  if (base == length.tiers.end()) return 0;
  const double load = base->topk.front().ms.load.median;
  return load > 0 ? tier.topk.front().ms.load.median / load : 0;
}

std::vector<std::vector<const TierOutcome*>> ByBackend(const LengthOutcome& length) {
  std::vector<std::vector<const TierOutcome*>> out;
  for (const TierOutcome& base : length.tiers) {
    if (!base.host) continue;
    auto& tiers = out.emplace_back(1, &base);
    for (const TierOutcome& tier : length.tiers) {
      if (&tier != &base && tier.compute == base.compute) tiers.push_back(&tier);
    }
  }
  return out;
}

std::string BackendName(const TierOutcome& tier) {
  return tier.compute == "cpu" ? "the CPU" : "the CUDA device";
}

const CompletionPoint* BestCompletion(const TierOutcome& tier) {
  const auto best = std::ranges::min_element(tier.completion, {}, [](const CompletionPoint& p) {
    return p.ms.compute.median + p.ms.load.median;
  });
  return best == tier.completion.end() ? nullptr : &*best;
}

std::vector<Way> WaysOf(const BreakEvenOutcome& outcome, const LengthOutcome& length,
                        const TierOutcome& tier) {
  std::vector<Way> ways;
  const CompletionPoint* best = BestCompletion(tier);
  if (best != nullptr) {
    const double later = best->ms.wall.median;
    ways.push_back(
        {"attach, 1% and an estimate (" + best->name + ")", tier.completed.once_ms(later), later});
  }
  std::vector<SweepPoint> wall;
  for (const TopKPoint& p : tier.topk) wall.push_back({double(p.k), {0, 0, p.ms.wall.median}});
  const TradeOff walls(wall, double(length.k_phi));
  const double more = walls.TopK(1, kPaperGamma * length.k_phi, false);
  ways.push_back({"attach, Top-K at 1.8%", tier.selected.once_ms(more), more});
  if (tier.full_ms.median <= 0) return ways;
  ways.push_back({"restore, full attention", tier.restore_ms.median, tier.full_ms.median});
  const double prefill = outcome.PrefillSeconds(length.tokens);
  if (prefill > 0 && outcome.ComparesPrefill(tier)) {
    ways.push_back({"compute the prompt, full attention", prefill * 1e3, tier.full_ms.median});
  }
  return ways;
}

json OutcomeJson(const BreakEvenOutcome& outcome) {
  const ModelShape& m = outcome.model;
  json out = {{"benchmark", "break_even"},
              {"model",
               {{"name", m.name},
                {"n_layers", m.n_layers},
                {"n_q_heads", m.n_q_heads},
                {"n_kv_heads", m.n_kv_heads},
                {"head_dim", m.head_dim},
                {"dtype", std::string(DTypeName(m.dtype))}}},
              {"steps", outcome.steps},
              {"selector", outcome.selector},
              {"skipped", outcome.skipped},
              {"on_disk", outcome.medium.disk},
              {"other_work_share", outcome.other_work},
              {"ratios", RatiosJson(outcome)},
              {"lengths", json::array()}};
  out["prefill"] = {
      {"tokens_per_second_given",
       outcome.prefill_tokens_per_second > 0 ? json(outcome.prefill_tokens_per_second) : json()},
      {"gemm_flops_per_second", outcome.gemm_flops > 0 ? json(outcome.gemm_flops) : json()}};
  for (const LengthOutcome& length : outcome.lengths) {
    json l = {{"tokens", length.tokens},
              {"k_phi", length.k_phi},
              {"layers_measured", length.layers},
              {"put_seconds", length.put_seconds},
              {"ingest_seconds", length.ingest_seconds},
              {"stored_bytes", length.stored_bytes},
              {"prefill_seconds", outcome.PrefillSeconds(length.tokens)},
              {"tiers", json::array()}};
    for (const TierOutcome& tier : length.tiers)
      l["tiers"].push_back(TierJson(outcome, length, tier));
    out["lengths"].push_back(std::move(l));
  }
  return out;
}

}  // namespace prefixd::bench
