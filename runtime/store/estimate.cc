#include "runtime/store/estimate.h"

#include <algorithm>

#include "base/session_arguments.h"

namespace prefixd {
namespace {

// The least that is known of two rates says how well their sum is known.
EstimateSource Both(EstimateSource a, EstimateSource b) {
  return a == EstimateSource::kEarlier ? a : b;
}

TimeEstimate RestoreTime(const MeasuredRates& rates, const ReuseEstimate& estimate, bool opened) {
  TimeEstimate time;
  const auto add = [&](uint64_t bytes, const Rate& rate) {
    if (bytes == 0) return true;
    if (!rate.known()) return false;
    time.seconds += double(bytes) / rate.value;
    time.source = time.known() ? Both(time.source, rate.source) : rate.source;
    return true;
  };
  if (!add(estimate.memory_bytes, rates.Host()) || !add(estimate.disk_bytes, rates.Disk())) {
    return {};
  }
  // Opening is a small part: the time without it stands where it was not measured.
  if (const Rate open = rates.Open(); time.known() && !opened && open.known()) {
    time.seconds += open.value;
    time.source = Both(time.source, open.source);
  }
  return time;
}

}  // namespace

ReuseEstimate EstimateReuse(const Core& core, const EngineSpeed& engine, const EstimateOf& of) {
  ReuseEstimate estimate;
  const TokenRange tokens{std::min(engine.cached_tokens, of.n_tokens), of.n_tokens};
  estimate.tokens = tokens.size();
  if (estimate.tokens == 0) return estimate;
  const auto info = core.storage->GetPrefix(of.prefix);
  const bool restorable = !info.ok() || info->kept_rows == 0;
  if (const auto held = core.storage->HeldRows(of.prefix, tokens); restorable && held.ok()) {
    estimate.memory_bytes = held->memory_bytes;
    estimate.disk_bytes = held->disk_bytes;
    estimate.restore = RestoreTime(core.rates, estimate, of.opened);
  }
  if (const Rate step = core.rates.Step(of.tenant, of.model.name, of.n_tokens); step.known()) {
    estimate.retrieve = {step.value * StoredLayers(of.model.geometry), step.source};
  }
  Rate prefill{engine.prefill_tokens_per_second, EstimateSource::kGiven};
  if (prefill.value == 0) prefill = core.rates.Prefill(of.tenant, of.model.name);
  if (prefill.known()) {
    estimate.prefill_tokens_per_second = prefill.value;
    estimate.recompute = {double(estimate.tokens) / prefill.value, prefill.source};
  }
  estimate.advice = FastestWay(estimate, engine.answer_tokens);
  return estimate;
}

}  // namespace prefixd
