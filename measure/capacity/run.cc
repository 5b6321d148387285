#include "measure/capacity/run.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "measure/capacity/store_model.h"
#include "measure/disk/attach_time.h"
#include "measure/disk/memory_left.h"
#include "measure/disk/scratch.h"
#include "measure/disk/storage_speed.h"
#include "measure/disk/try_small.h"
#include "measure/page/text.h"
#include "measure/prompts/bench_prompt.h"
#include "measure/timing/gemm_rate.h"
#include "measure/timing/other_work.h"
#include "runtime/store/local_store.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

// The host tier of a store that is told nothing of memory, as it decides itself.
Result<double> DefaultHostTier(const fs::path& dir) {
  RuntimeOptions o;
  o.dir = dir;
  o.min_free_bytes = 0;
  const auto bytes = [&]() -> Result<double> {
    PREFIXD_ASSIGN(const auto store, LocalStore::Open(o));
    PREFIXD_ASSIGN(const RuntimeStats stats, store->Stats());
    return double(stats.host_tier_capacity);
  }();
  std::error_code ec;
  fs::remove_all(dir, ec);
  if (bytes.ok()) return bytes;
  return Error{bytes.error().code,
               "cannot open a store to see how much memory it takes (give "
               "--memory-gb): " +
                   bytes.error().message};
}

uint64_t TokensIn(double bytes, double token_bytes) {
  return std::max<uint64_t>(1, static_cast<uint64_t>(bytes / token_bytes));
}

// prefixd's own choice is made among segments. What is stored beside the rows is in `token_bytes`.
StoreShape StoreOf(double bytes, double token_bytes) {
  return {.token_bytes = token_bytes,
          .quota_bytes = std::max<uint64_t>(1, static_cast<uint64_t>(bytes))};
}

// What every policy hits in caches of so many bytes, of which a token takes `token_bytes`.
CapacityPoint ReplayAll(const RequestLog& log, double bytes, double token_bytes) {
  CapacityPoint point;
  point.bytes = bytes;
  for (const Eviction policy : kPolicies) {
    point.hits.push_back(policy == Eviction::kScore
                             ? ReplayInModel(log, StoreOf(bytes, token_bytes))
                             : ReplayRequests(log, TokensIn(bytes, token_bytes), policy));
  }
  return point;
}

// Seconds that replaying the log once against all policies takes: of its first thousand requests,
// in a cache that holds a part of them.
double ReplaySeconds(const RequestLog& log) {
  const auto blocks = [](const std::vector<Request>& requests) {
    double sum = 0;
    for (const Request& r : requests) sum += double(r.blocks.size());
    return sum;
  };
  RequestLog first;
  first.block_tokens = log.block_tokens;
  const size_t n = std::min<size_t>(1000, log.requests.size());
  first.requests.assign(log.requests.begin(), log.requests.begin() + ptrdiff_t(n));
  const auto begun = std::chrono::steady_clock::now();
  ReplayAll(first, double(first.input_tokens()) / 8, 1);
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  return took * blocks(log.requests) / blocks(first.requests);
}

int CurvePoints(const CapacityOptions& options) { return options.quick ? 5 : 9; }

// How often a part is measured beside the first time, which does not count.
uint32_t Repeats(const CapacityOptions& options) { return options.quick ? 2 : 3; }

}  // namespace

const CacheHits& CapacityPoint::of(Eviction policy) const {
  return hits[static_cast<size_t>(std::ranges::find(kPolicies, policy) - std::begin(kPolicies))];
}

double CapacityOutcome::PrefillSeconds(double tokens, double squares) const {
  if (what.options.prefill_rate > 0) return tokens / what.options.prefill_rate;
  return gemm_flops > 0 ? what.model.PrefillFlops(tokens, squares) / gemm_flops : 0;
}

double CapacityOutcome::SsdSeconds(double tokens) const {
  return tokens * double(what.model.token_bytes()) / ssd_rate;
}

double CapacityOutcome::HostSeconds(double tokens) const {
  return tokens * double(what.model.token_bytes()) / host_rate;
}

double CapacityOutcome::PutSeconds(double tokens) const {
  return tokens * double(what.model.token_bytes()) / put_rate;
}

double CapacityOutcome::BackgroundSeconds(double tokens) const {
  return tokens * double(what.model.token_bytes()) *
         (ingest_seconds_per_byte + recluster_seconds_per_byte);
}

std::optional<double> CapacityOutcome::ReuseThatPays(double tokens, bool with_background) const {
  const double saved = PrefillSeconds(tokens) - SsdSeconds(tokens);
  if (saved <= 0) return std::nullopt;
  return (with_background ? StoreSeconds(tokens) : PutSeconds(tokens)) / saved;
}

Result<CapacityPlan> PlanCapacity(const CapacityOptions& options, const fs::path& dir,
                                  const CapacityProgress& progress) {
  CapacityPlan plan;
  plan.options = options;
  plan.dir = dir;
  PREFIXD_ASSIGN(plan.model, ModelShapeOf(options.model));
  plan.skipped = plan.model.notes;
  plan.medium = MediumOf(dir);
  if (options.log_file.empty()) {
    ZipfSpec zipf = options.zipf;
    if (options.quick) zipf.requests = std::min(zipf.requests, 2000u);
    plan.log = ZipfRequests(zipf, options.block_tokens);
  } else {
    if (progress) progress("reading " + options.log_file);
    PREFIXD_ASSIGN(plan.log, ReadRequestLog(fs::path(options.log_file), options.block_tokens));
  }
  plan.disk_bytes = options.disk_gb > 0 ? options.disk_gb * 1e9 : double(FreeBytes(dir)) * 0.9;
  if (options.memory_gb > 0) {
    plan.memory_bytes = options.memory_gb * 1e9;
  } else {
    PREFIXD_ASSIGN(plan.memory_bytes, DefaultHostTier(dir / "default"));
  }
  plan.tokens = options.quick ? 2048 : 4096;
  const double layer = double(plan.model.Geometry(1).token_bytes()) * plan.tokens;
  const double room = (double(FreeBytes(dir)) - double(512 << 20)) / 4;
  const double most =
      std::min({options.quick ? 32e6 : 400e6, double(AvailableMemory()) / 8, room}) / layer;
  if (room < layer) {
    return Error{Code::kResourceExhausted,
                 "there is no room on the disk of " + dir.parent_path().string() +
                     " to measure it: " + GigaBytes(4 * layer + double(512 << 20)) + " are needed"};
  }
  plan.layers =
      static_cast<uint32_t>(std::clamp(std::floor(most), 1.0, double(plan.model.n_layers)));
  const double bytes = layer * plan.layers;
  if (progress) progress("trying a small prompt, to know how long the rest takes");
  PREFIXD_ASSIGN(const RowSeconds costs, TrySmallPrompt(plan.model, 2048, dir));
  const double times = Repeats(options) + 1;
  plan.plan.bytes = bytes * (times + 1) + layer * 2.5;
  // Rows are put and stored again for restores; those take less than a put.
  plan.plan.seconds = bytes * (costs.making + costs.putting * (3 * times + 1)) +
                      layer * costs.attaching +
                      (CurvePoints(options) + 1) * ReplaySeconds(plan.log);
  plan.plan.sentences = {"Measures put and restore of " + GigaBytes(bytes) + " of rows of " +
                         plan.model.name + ", and replays " + plan.log.name + " (" +
                         Thousands(double(plan.log.requests.size())) + " requests in " +
                         Seconds(plan.log.seconds()) + ") against caches of several sizes."};
  return plan;
}

Result<CapacityOutcome> MeasureCapacity(const CapacityPlan& plan,
                                        const CapacityProgress& progress) {
  const OtherWork others;
  CapacityOutcome out;
  out.what = plan;
  {
    const Prompt prompt = SyntheticPrompt(plan.model.Geometry(plan.layers), plan.tokens, false);
    SpeedOptions speed;
    speed.dir = plan.dir;
    speed.parts = {"put", "restore", "host"};
    speed.pairs = Repeats(plan.options);
    speed.fio = false;
    speed.progress = progress;
    PREFIXD_ASSIGN(const SpeedReport measured, MeasureSpeed(prompt, speed));
    if (!measured.skipped.empty()) {  // all three are needed
      return Error{Code::kUnavailable, "cannot measure this disk: " + Join(measured.skipped, "; ")};
    }
    out.put_rate = measured.lines.at("put").ours.median;
    out.ssd_rate = measured.lines.at("restore").ours.median;
    out.host_rate = measured.lines.at("host").ours.median;
  }
  if (progress) progress("what is stored beside the rows");
  const Prompt prompt = SyntheticPrompt(plan.model.Geometry(1), plan.tokens, false);
  PREFIXD_ASSIGN(const AttachReport stored, MeasureAttach(prompt, plan.dir / "attach", false, 1));
  const double rows = double(prompt.row_bytes());
  out.stored_per_row_byte = std::max(1.0, stored.stored_bytes / rows);
  out.written_per_row_byte = std::max(out.stored_per_row_byte, stored.written_bytes / rows);
  out.ingest_seconds_per_byte = stored.ingest_seconds / rows;
  out.recluster_seconds_per_byte =
      std::max(0.0, stored.reclustered_seconds - stored.ingest_seconds) / rows;
  if (plan.options.prefill_rate <= 0) out.gemm_flops = GemmFlops(plan.options.quick ? 0.2 : 1);
  if (progress) progress("replaying requests");
  const double on_disk = out.token_bytes_on_disk();
  out.endless = ReplayRequests(plan.log, 0, Eviction::kScore);
  out.disk = ReplayInModel(plan.log, StoreOf(plan.disk_bytes, on_disk));
  // The host tier holds what was used last, whatever the disk keeps.
  const uint64_t in_memory = TokensIn(plan.memory_bytes, double(plan.model.token_bytes()));
  out.memory = ReplayRequests(plan.log, in_memory, Eviction::kLru);
  const double all = double(out.endless.distinct_tokens) * on_disk;
  const int points = CurvePoints(plan.options);
  for (int i = 0; i < points; ++i) {  // from a thousandth to all
    const double bytes = all * std::pow(1000, double(i) / (points - 1) - 1);
    out.curve.push_back(ReplayAll(plan.log, bytes, on_disk));
  }
  out.other_work = others.Share();
  return out;
}

}  // namespace prefixd::bench
