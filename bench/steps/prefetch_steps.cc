#include "bench/steps/prefetch_steps.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "bench/prompts/traced_store.h"
#include "runtime/store/local_store.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Holds the times of one case over all its rounds.
struct Samples {
  std::vector<double> ms, read_ms;
  double tokens = 0, ssd_pages = 0, prefetched_pages = 0, prefetch_used_pages = 0;
};

class Decode {
 public:
  Decode(std::span<const HeadTrace> heads, const PrefetchSetting& setting)
      : setting_(setting), n_steps_(heads[0].n_steps()), prompt_(heads, setting.n_layers) {
    options_.dir = setting.dir;
    options_.selector_memory_bytes = 4 * prompt_.row_bytes();
    options_.scrub_bytes_per_second = 0;
  }
  ~Decode() {
    store_.reset();
    std::error_code ec;
    std::filesystem::remove_all(setting_.dir, ec);
  }

  Status Put() {
    PREFIXD_TRY(Open(1));
    PREFIXD_ASSIGN(prefix_, prompt_.Put(*store_, {}));
    PREFIXD_TRY(store_->WaitReady(prefix_, nullptr));
    return store_->WaitRewritten(nullptr);
  }

  // Runs one decode; the tier holds what its first step read.
  Status Run(const PrefetchCase& of, Samples& samples) {
    PREFIXD_TRY(Open(of.tier));
    AttachSpec spec;
    spec.model = prompt_.model();
    spec.prefix = prefix_;
    spec.policy.k = static_cast<uint32_t>(std::ceil(setting_.fraction * prompt_.n_tokens()));
    PREFIXD_ASSIGN(const auto session, store_->Attach(spec));
    // Keys and indexes are in memory when the decode begins.
    PREFIXD_TRY(Token(*session, 0, nullptr));
    while (store_->Stats().value().preload_queue > 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    spec.policy.prefetch = of.prefetch;
    PREFIXD_TRY(session->SetPolicy(spec.policy));
    PREFIXD_ASSIGN(const SessionReport report_before, session->report());
    const Ledger& before = report_before.total;
    for (size_t step = 0; step < n_steps_; ++step) {
      PREFIXD_TRY(Token(*session, step, &samples));
      std::this_thread::sleep_for(std::chrono::milliseconds(of.pause_ms));
    }
    PREFIXD_ASSIGN(const SessionReport report, session->Detach());
    const auto pages = [](uint64_t now, uint64_t then) { return double(now - then) / 4096; };
    constexpr auto kSsd = static_cast<size_t>(Tier::kSsd);
    samples.tokens += double(n_steps_);
    samples.ssd_pages += pages(report.total.physical_bytes[kSsd], before.physical_bytes[kSsd]);
    samples.prefetched_pages += pages(report.total.prefetched_bytes, 0);
    samples.prefetch_used_pages += pages(report.total.prefetch_used_bytes, 0);
    return {};
  }

 private:
  Status Open(double tier) {
    store_.reset();
    options_.host_tier_bytes = static_cast<uint64_t>(tier * double(prompt_.row_bytes()));
    PREFIXD_ASSIGN(store_, LocalStore::Open(options_));
    return prompt_.Register(*store_);
  }

  Status Token(Session& session, size_t step, Samples* samples) {
    const KvGeometry& g = prompt_.geometry();
    std::vector<float> y(size_t{g.n_q_heads} * g.value_dim), lse(g.n_q_heads);
    double ms = 0, read_ms = 0;
    for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
      const std::vector<float> q = prompt_.Queries(layer, step);
      StepInfo info;
      const auto begun = Clock::now();
      PREFIXD_TRY(session.Step(layer, q, y, lse, &info));
      ms += std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
      read_ms += double(info.ledger.read_ns) * 1e-6;
    }
    if (!samples) return {};
    samples->ms.push_back(ms);
    samples->read_ms.push_back(read_ms);
    return {};
  }

  const PrefetchSetting& setting_;
  const size_t n_steps_;
  const TracedPrompt prompt_;
  RuntimeOptions options_;
  std::unique_ptr<LocalStore> store_;
  std::string prefix_;
};

}  // namespace

Result<std::vector<PrefetchCase>> MeasurePrefetch(std::span<const HeadTrace> heads,
                                                  const PrefetchSetting& setting) {
  if (setting.n_layers == 0 || heads.empty() || heads.size() % setting.n_layers != 0) {
    return InvalidArgument("the heads cannot be split evenly among the layers");
  }
  std::error_code ec;
  if (std::filesystem::exists(setting.dir, ec)) {
    return Error{Code::kAlreadyExists, setting.dir.string() +
                                           " exists, and would be removed in the end; name another "
                                           "--dir, or remove it"};
  }
  std::filesystem::create_directories(setting.dir.parent_path(), ec);  // Put reports an error
  Decode decode(heads, setting);
  PREFIXD_TRY(decode.Put());
  std::vector<PrefetchCase> cases;
  for (const double tier : setting.tiers) {
    for (const uint32_t pause : setting.pauses_ms) {
      for (const auto& prefetch : setting.prefetch) {
        PrefetchCase& of = cases.emplace_back();
        of.tier = tier, of.pause_ms = pause, of.prefetch = prefetch;
      }
    }
  }
  std::vector<Samples> samples(cases.size());
  for (uint32_t round = 0; round < setting.rounds; ++round) {
    for (size_t i = 0; i < cases.size(); ++i) PREFIXD_TRY(decode.Run(cases[i], samples[i]));
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    const Samples& s = samples[i];
    cases[i].ms = Summarise(s.ms), cases[i].read_ms = Summarise(s.read_ms);
    cases[i].ssd_pages = s.ssd_pages / s.tokens;
    cases[i].prefetched_pages = s.prefetched_pages / s.tokens;
    cases[i].prefetch_used_pages = s.prefetch_used_pages / s.tokens;
  }
  return cases;
}

}  // namespace prefixd::bench
