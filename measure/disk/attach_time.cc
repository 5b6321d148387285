#include "measure/disk/attach_time.h"

#include <chrono>
#include <string>

#include "measure/disk/page_cache.h"
#include "measure/prompts/prompt_queries.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

double Ms(Clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
}

class AttachBench {
 public:
  AttachBench(const Prompt& prompt, const std::filesystem::path& dir) : prompt_(prompt) {
    options_.dir = dir;
    options_.host_tier_bytes = prompt.row_bytes() / 4 * 5;
  }

  Result<AttachReport> Run(uint32_t repeats) {
    AttachReport report;
    PREFIXD_TRY(Put(report));
    PREFIXD_ASSIGN(const auto store, LocalStore::Open(options_));
    PREFIXD_TRY(store->WaitReady(prefix_, nullptr));  // it looks for what is missing
    DropPageCache(options_.dir);
    PREFIXD_ASSIGN(const Times cold, Once(*store));
    report.cold_attach_ms = cold.attach;
    report.cold_step_ms = cold.first.ms;
    report.cold_step_bytes = cold.first.ssd_bytes;
    report.cold_step_row_bytes = cold.first.row_bytes;
    report.cold_stages = cold.first.stages;
    report.cold_next_step_ms = cold.next.ms;
    std::vector<double> attach, first, next;
    for (uint32_t i = 0; i <= repeats; ++i) {
      PREFIXD_ASSIGN(const Times warm, Once(*store));
      if (i == 0) continue;  // warm-up
      attach.push_back(warm.attach);
      first.push_back(warm.first.ms);
      next.push_back(warm.next.ms);
      report.first_stages = warm.first.stages;
      report.next_stages = warm.next.stages;
    }
    report.warm_attach_ms = Summarise(std::move(attach));
    report.warm_step_ms = Summarise(std::move(first));
    report.next_step_ms = Summarise(std::move(next));
    return report;
  }

 private:
  Status Put(AttachReport& report) {
    PREFIXD_ASSIGN(const auto store, LocalStore::Open(options_));
    PREFIXD_TRY(store->RegisterModel(BenchModel(prompt_.geometry)));
    PREFIXD_ASSIGN(const auto put, store->BeginPut({kModelName, "", prompt_.tokens, "attach"}));
    report.found = put->missing().size() == 0;
    if (!report.found) {
      PREFIXD_TRY(WritePrompt(prompt_, *put));
      PREFIXD_TRY(WriteQueries(prompt_, *put));
    }
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    prefix_ = stored.prefix;
    const auto begun = Clock::now();
    PREFIXD_TRY(store->WaitReady(stored.prefix, nullptr));
    report.ingest_seconds = Ms(begun) / 1e3;
    PREFIXD_TRY(store->WaitRewritten(nullptr));
    report.reclustered_seconds = Ms(begun) / 1e3;
    PREFIXD_ASSIGN(const RuntimeStats stats, store->Stats());
    report.stored_bytes = double(stats.bytes_on_disk);
    report.written_bytes = double(stats.bytes_on_disk + stats.bytes_rewritten);
    return {};
  }

  struct StepTime {
    double ms = 0, ssd_bytes = 0, row_bytes = 0;
    StageMs stages;
  };
  struct Times {
    double attach = 0;
    StepTime first, next;
  };

  // Runs one session: attach and two steps of every layer, each with its own queries.
  Result<Times> Once(Store& store) {
    AttachSpec spec;
    spec.model = kModelName;
    spec.tokens = prompt_.tokens;
    spec.policy = {.estimator = EstimatorKind::kMoment, .budget = 0.02};
    Times times;
    const auto begun = Clock::now();
    PREFIXD_ASSIGN(const auto session, store.Attach(spec));
    times.attach = Ms(begun);
    std::vector<SyntheticKv> synthetic;
    for (uint32_t layer = 0; layer < prompt_.geometry.n_layers; ++layer) {
      synthetic.emplace_back(prompt_.geometry.n_kv_heads, prompt_.geometry.key_dim, layer + 1);
    }
    for (StepTime* step : {&times.first, &times.next}) {
      PREFIXD_ASSIGN(*step, Step(*session, synthetic));
    }
    return times;
  }

  Result<StepTime> Step(Session& session, std::span<SyntheticKv> synthetic) const {
    const KvGeometry& g = prompt_.geometry;
    std::vector<float> q(size_t{g.n_q_heads} * g.key_dim), y(size_t{g.n_q_heads} * g.value_dim);
    std::vector<float> lse(g.n_q_heads);
    StepTime time;
    for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
      for (uint32_t h = 0; h < g.n_q_heads; ++h) {
        synthetic[layer].Query(h / g.group_size(0), &q[size_t{h} * g.key_dim]);
      }
      StepInfo info;
      const auto begun = Clock::now();
      PREFIXD_TRY(session.Step(layer, q, y, lse, &info));
      time.ms += Ms(begun);
      time.ssd_bytes += double(info.ledger.physical_bytes[static_cast<size_t>(Tier::kSsd)]);
      time.row_bytes += double(info.ledger.logical_bytes);
      time.stages.read += double(info.ledger.read_ns) / 1e6;
      time.stages.select += double(info.ledger.select_ns) / 1e6;
      time.stages.compute += double(info.ledger.compute_ns) / 1e6;
    }
    return time;
  }

  const Prompt& prompt_;
  RuntimeOptions options_;
  std::string prefix_;
};

}  // namespace

Result<AttachReport> MeasureAttach(const Prompt& prompt, const std::filesystem::path& dir,
                                   bool keep, uint32_t repeats) {
  auto report = AttachBench(prompt, dir).Run(repeats);
  std::error_code ec;
  if (!keep) std::filesystem::remove_all(dir, ec);
  return report;
}

}  // namespace prefixd::bench
