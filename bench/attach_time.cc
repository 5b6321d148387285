#include "bench/attach_time.h"

#include <chrono>

#include "bench/support/prompt_queries.h"

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
    PREFIXD_ASSIGN(const auto store, Store::Open(options_));
    PREFIXD_TRY(Once(*store, report.cold_attach_ms, report.cold_step_ms));
    std::vector<double> attach(repeats + 1), step(repeats + 1);
    for (size_t i = 0; i < attach.size(); ++i) PREFIXD_TRY(Once(*store, attach[i], step[i]));
    attach.erase(attach.begin());  // the first one warms up
    step.erase(step.begin());
    report.warm_attach_ms = Summarise(std::move(attach));
    report.warm_step_ms = Summarise(std::move(step));
    return report;
  }

 private:
  Status Put(AttachReport& report) {
    PREFIXD_ASSIGN(const auto store, Store::Open(options_));
    PREFIXD_TRY(store->RegisterModel(BenchModel(prompt_.geometry)));
    PREFIXD_ASSIGN(const auto put, store->BeginPut({kModelName, "", prompt_.tokens, "attach"}));
    report.found = put->missing().size() == 0;
    if (!report.found) {
      PREFIXD_TRY(WritePrompt(prompt_, *put));
      PREFIXD_TRY(WriteQueries(prompt_, *put));
    }
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    const auto begun = Clock::now();
    PREFIXD_TRY(store->WaitReady(stored.prefix, nullptr));
    report.ingest_seconds = Ms(begun) / 1e3;
    PREFIXD_TRY(store->WaitSettled(nullptr));
    report.settled_seconds = Ms(begun) / 1e3;
    return {};
  }

  // One session: attach and one step of every layer.
  Status Once(Store& store, double& attach_ms, double& step_ms) {
    const KvGeometry& g = prompt_.geometry;
    AttachSpec spec;
    spec.model = kModelName;
    spec.tokens = prompt_.tokens;
    spec.policy = {.estimator = EstimatorKind::kMoment, .budget = 0.02};
    auto begun = Clock::now();
    PREFIXD_ASSIGN(const auto session, store.Attach(spec));
    attach_ms = Ms(begun);
    std::vector<float> q(size_t{g.n_q_heads} * g.key_dim), y(size_t{g.n_q_heads} * g.value_dim);
    std::vector<float> lse(g.n_q_heads);
    step_ms = 0;
    for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
      SyntheticKv synthetic(g.n_kv_heads, g.key_dim, layer + 1);
      for (uint32_t h = 0; h < g.n_q_heads; ++h) {
        synthetic.Query(h / g.group_size(), &q[size_t{h} * g.key_dim]);
      }
      begun = Clock::now();
      PREFIXD_TRY(session->Step(layer, q, y, lse, nullptr));
      step_ms += Ms(begun);
    }
    return {};
  }

  const Prompt& prompt_;
  RuntimeOptions options_;
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
