#include "measure/break_even/measure_tiers.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "measure/break_even/engine_cache.h"
#include "measure/disk/page_cache.h"
#include "measure/prompts/random_maps.h"
#include "measure/prompts/synthetic_kv.h"
#include "measure/prompts/synthetic_put.h"
#include "runtime/store/local_store.h"
#include "runtime/work/thread_pool.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

constexpr const char* kModel = "bench";
constexpr uint32_t kGammas[] = {1, 2, 3, 5, 7, 10};

double TakenMs(Clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
}

// Sessions that are measured in turns, each with queries of its own: the rows of one are not in the
// processor's caches because another has just read them.
struct Contender {
  std::shared_ptr<Session> session;
  std::vector<double> select, load, compute, wall;
  Ledger ledger;
};

class LengthBench {
 public:
  LengthBench(const LengthSpec& spec)
      : spec_(spec), geometry_(spec.model.Geometry(spec.layers)), pool_(0) {
    scale_ = double(spec.model.n_layers) / spec.layers;
    out_.tokens = spec.tokens;
    out_.k_phi = OnePercent(spec.tokens);
    out_.layers = spec.layers;
    for (uint32_t l = 0; l < spec.layers; ++l) {
      synthetic_.emplace_back(geometry_.n_kv_heads, geometry_.key_dim, l + 1);
    }
  }

  Result<LengthOutcome> Run(LengthSeconds* seconds) {
    const auto begun = Clock::now();
    maps_ = spec_.dir / "phi.safetensors";
    PREFIXD_TRY(WriteRandomMaps(maps_, geometry_, spec_.tokens));
    PREFIXD_TRY(PutPrompt());
    const double storing = TakenMs(begun) / 1e3;
    for (const TierSpec& tier : spec_.tiers) {
      const Status measured = MeasureTier(tier);
      if (measured.ok()) continue;
      out_.skipped.push_back(tier.name + ": " + measured.error().message);
      if (&tier == &spec_.tiers.back() && out_.tiers.empty()) return measured.error();
    }
    if (spec_.stored_features) MeasureStoredFeatures();
    std::error_code ec;
    fs::remove_all(spec_.dir, ec);
    if (seconds != nullptr) {
      seconds->storing = storing;
      seconds->step = in_turns_ms_ / 1e3 / (spec_.steps + LengthSeconds::kWarmUp);
      seconds->once = (TakenMs(begun) - in_turns_ms_) / 1e3 - storing;
    }
    return out_;
  }

 private:
  Result<std::unique_ptr<LocalStore>> Open(bool host, const std::string& compute,
                                           const char* features) {
    RuntimeOptions o;
    o.dir = spec_.dir / "store";
    o.host_tier_bytes = host ? geometry_.token_bytes() * spec_.tokens / 4 * 5 + (16u << 20) : 0;
    o.compute = compute;
    o.phi_features = features;
    o.estimators = {EstimatorKind::kMoment, EstimatorKind::kPhi};
    o.recluster = false;  // rows stay where the put wrote them, for all tiers alike
    o.scrub_bytes_per_second = 0;
    o.min_free_bytes = 0;
    return LocalStore::Open(o);
  }

  void Say(const std::string& what) const {
    if (spec_.progress) spec_.progress(what);
  }

  Status PutPrompt() {
    PREFIXD_ASSIGN(const auto store, Open(false, "cpu", "none"));
    PREFIXD_TRY(store->RegisterModel({kModel, geometry_, {{"weights", "synthetic"}}, {maps_}}));
    tokens_.resize(spec_.tokens);
    for (uint32_t i = 0; i < spec_.tokens; ++i) tokens_[i] = i;
    PREFIXD_ASSIGN(const auto put, store->BeginPut({kModel, "", tokens_, "break-even"}));
    PREFIXD_ASSIGN(const double writing,
                   WriteSynthetic(*put, geometry_, spec_.tokens, synthetic_, [&](uint32_t layer) {
                     Say("storing: layer " + std::to_string(layer + 1) + " of " +
                         std::to_string(geometry_.n_layers));
                   }));
    const auto committing = Clock::now();
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    out_.put_seconds = writing + TakenMs(committing) / 1e3;
    prefix_ = stored.prefix;
    Say("making summaries and indexes");
    const auto ingest = Clock::now();
    PREFIXD_TRY(store->WaitReady(prefix_, nullptr));
    out_.ingest_seconds = TakenMs(ingest) / 1e3;
    PREFIXD_ASSIGN(const RuntimeStats stats, store->Stats());
    out_.stored_bytes = double(stats.bytes_on_disk);
    return {};
  }

  Result<std::shared_ptr<Session>> Attach(LocalStore& store, const StepPolicy& policy) {
    AttachSpec spec;
    spec.model = kModel;
    spec.tokens = tokens_;
    spec.policy = policy;
    return store.Attach(spec);
  }

  StepPolicy Policy(EstimatorKind estimator, uint32_t k) const {
    StepPolicy p;
    p.estimator = estimator;
    p.k = k;
    p.selector = spec_.selector;
    return p;
  }

  std::vector<float> Queries(uint32_t layer) {
    const KvGeometry& g = geometry_;
    std::vector<float> q(size_t{g.n_q_heads} * g.key_dim);
    for (uint32_t h = 0; h < g.n_q_heads; ++h) {
      synthetic_[layer].Query(h / g.group_size(layer), &q[size_t{h} * g.key_dim]);
    }
    return q;
  }

  // One generated token: a step of every measured layer.
  Status Token(Session& session, Contender* into) {
    std::vector<float> y(size_t{geometry_.n_q_heads} * geometry_.value_dim);
    std::vector<float> lse(geometry_.n_q_heads);
    Ledger sum;
    double wall = 0;
    for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
      const std::vector<float> q = Queries(layer);
      StepInfo info;
      const auto begun = Clock::now();
      PREFIXD_TRY(session.Step(layer, q, y, lse, &info));
      wall += TakenMs(begun);
      sum += info.ledger;
    }
    if (into == nullptr) return {};
    into->wall.push_back(wall * scale_);
    into->select.push_back(double(sum.select_ns) / 1e6 * scale_);
    into->load.push_back(double(sum.read_ns) / 1e6 * scale_);
    into->compute.push_back(double(sum.compute_ns) / 1e6 * scale_);
    into->ledger += sum;
    return {};
  }

  static void WaitForPreloading(LocalStore& store) {
    for (int i = 0; i < 6000; ++i) {
      const auto stats = store.Stats();
      if (!stats.ok() || stats->preload_queue == 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  static TokenMs TimesOf(const Contender& c) {
    return {Summarise(c.select), Summarise(c.load), Summarise(c.compute), Summarise(c.wall)};
  }

  static CompletionPoint PointOf(const std::string& name, const Contender& c,
                                 const Contender& topk) {
    CompletionPoint point{name, TimesOf(c), {}, 0};
    std::vector<double> more;
    for (size_t i = 0; i < c.compute.size() && i < topk.compute.size(); ++i) {
      more.push_back(c.compute[i] - topk.compute[i]);
    }
    point.estimate = Summarise(std::move(more));
    return point;
  }

  Status RunInTurns(std::vector<Contender>& contenders) {
    const auto begun = Clock::now();
    for (uint32_t step = 0; step < spec_.steps + LengthSeconds::kWarmUp; ++step) {
      for (Contender& c : contenders) {
        PREFIXD_TRY(Token(*c.session, step < LengthSeconds::kWarmUp ? nullptr : &c));
      }
    }
    in_turns_ms_ += TakenMs(begun);
    return {};
  }

  // A store just opened reads or merges summaries and loads indexes for its first session. Those
  // lie in files that are read through the page cache: nothing of them is there, as after a boot.
  Result<FirstUse> MeasureFirstUse(const TierSpec& spec, EstimatorKind estimator) {
    PREFIXD_ASSIGN(const auto store, Open(spec.host, spec.compute, "none"));
    PREFIXD_TRY(store->WaitReady(prefix_, nullptr));
    DropPageCache(spec_.dir);
    FirstUse use;
    const auto begun = Clock::now();
    PREFIXD_ASSIGN(const auto session, Attach(*store, Policy(estimator, out_.k_phi)));
    use.attach_ms = TakenMs(begun) * scale_;
    Contender once;
    PREFIXD_TRY(Token(*session, &once));
    use.first_ms = once.wall.front();
    return use;
  }

  Status MeasureTier(const TierSpec& spec) {
    Say(spec.name);
    TierOutcome tier;
    tier.name = spec.name;
    tier.host = spec.host;
    tier.compute = spec.compute;
    PREFIXD_ASSIGN(tier.completed, MeasureFirstUse(spec, EstimatorKind::kMoment));
    PREFIXD_ASSIGN(tier.selected, MeasureFirstUse(spec, EstimatorKind::kNone));
    PREFIXD_ASSIGN(const auto store, Open(spec.host, spec.compute, "none"));
    PREFIXD_TRY(store->WaitReady(prefix_, nullptr));
    PREFIXD_TRY(MeasureRestore(*store, tier));
    std::vector<Contender> contenders;
    for (const uint32_t gamma : kGammas) {
      PREFIXD_ASSIGN(auto session,
                     Attach(*store, Policy(EstimatorKind::kNone, gamma * out_.k_phi)));
      contenders.push_back({std::move(session), {}, {}, {}, {}, {}});
    }
    for (const EstimatorKind kind : {EstimatorKind::kMoment, EstimatorKind::kPhi}) {
      PREFIXD_ASSIGN(auto session, Attach(*store, Policy(kind, out_.k_phi)));
      contenders.push_back({std::move(session), {}, {}, {}, {}, {}});
    }
    WaitForPreloading(*store);
    PREFIXD_TRY(RunInTurns(contenders));
    for (size_t i = 0; i < std::size(kGammas); ++i) {
      tier.topk.push_back({kGammas[i], kGammas[i] * out_.k_phi, TimesOf(contenders[i])});
    }
    const Ledger& read = contenders.front().ledger;
    if (!spec.host && read.logical_bytes > 0) {
      tier.amplification =
          double(read.physical_bytes[static_cast<size_t>(Tier::kSsd)]) / double(read.logical_bytes);
    }
    const Contender& moment = contenders[std::size(kGammas)];
    const Contender& phi = contenders[std::size(kGammas) + 1];
    tier.completion.push_back(PointOf("moment", moment, contenders.front()));
    tier.completion.push_back(PointOf("phi recomputed", phi, contenders.front()));
    for (size_t i = 0; i < 2; ++i) {
      PREFIXD_TRY(ReadSummaryTokens(contenders[std::size(kGammas) + i], tier.completion[i]));
    }
    if (spec.compute != "cpu") PREFIXD_TRY(MeasureFullOnDevice(*store, tier));
    out_.tiers.push_back(std::move(tier));
    return {};
  }

  // Restores, each with a token of full attention behind it, as an engine goes on. The first one
  // fills the host tier. On a device an engine has its arrays there; see MeasureFullOnDevice.
  Status MeasureRestore(LocalStore& store, TierOutcome& tier) {
    PREFIXD_ASSIGN(const auto session, Attach(store, Policy(EstimatorKind::kNone, out_.k_phi)));
    EngineCache cache(geometry_, spec_.tokens, pool_);  // gone before steps need the memory
    std::vector<double> restores, full;
    std::vector<float> y(size_t{geometry_.n_q_heads} * geometry_.value_dim);
    for (uint32_t i = 0; i <= spec_.restores; ++i) {
      const auto restoring = Clock::now();
      PREFIXD_TRY(cache.Restore(*session));
      if (i > 0) restores.push_back(TakenMs(restoring) * scale_);
      if (tier.compute != "cpu") continue;
      double attending = 0;
      for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
        const std::vector<float> q = Queries(layer);
        const auto begun = Clock::now();
        PREFIXD_TRY(cache.Attend(layer, q, y));
        attending += TakenMs(begun);
      }
      if (i > 0) full.push_back(attending * scale_);
    }
    tier.restore_ms = Summarise(std::move(restores));
    tier.full_ms = Summarise(std::move(full));
    return {};
  }

  // prefixd's own full steps, out of the host tier: it has no arrays of an engine on a device.
  Status MeasureFullOnDevice(LocalStore& store, TierOutcome& tier) {
    if (!tier.host) {  // what was restored lies where rows of the tier in memory do
      const auto at = std::ranges::find_if(out_.tiers, [&](const TierOutcome& other) {
        return other.host && other.compute == tier.compute;
      });
      if (at != out_.tiers.end()) tier.full_ms = at->full_ms;
      return {};
    }
    StepPolicy all;
    all.mode = StepMode::kFull;
    PREFIXD_ASSIGN(const auto session, Attach(store, all));
    Contender full;
    for (int i = 0; i < 4; ++i) PREFIXD_TRY(Token(*session, i == 0 ? nullptr : &full));
    tier.full_ms = Summarise(full.wall);
    return {};
  }

  static Status ReadSummaryTokens(Contender& c, CompletionPoint& point) {
    PREFIXD_ASSIGN(const SessionReport report, c.session->report());
    const double heads = double(report.per_head.size());
    point.summary_tokens = heads > 0 ? report.total.summary_tokens / heads : 0;
    return {};
  }

  // Ingest stores features of tokens now, so that steps need not compute them.
  void MeasureStoredFeatures() {
    for (TierOutcome& tier : out_.tiers) {
      if (tier.compute != "cpu") continue;
      const std::string what = tier.name + ", stored features";
      Say(what);
      const Status measured = MeasureStoredFeatures(tier);
      if (!measured.ok()) out_.skipped.push_back(what + ": " + measured.error().message);
    }
  }

  Status MeasureStoredFeatures(TierOutcome& tier) {
    PREFIXD_ASSIGN(const auto store, Open(tier.host, "cpu", "log8"));
    PREFIXD_TRY(store->WaitReady(prefix_, nullptr));
    std::vector<Contender> contenders;
    for (const EstimatorKind kind : {EstimatorKind::kNone, EstimatorKind::kPhi}) {
      PREFIXD_ASSIGN(auto session, Attach(*store, Policy(kind, out_.k_phi)));
      contenders.push_back({std::move(session), {}, {}, {}, {}, {}});
    }
    if (tier.host) {  // fills it
      PREFIXD_TRY(EngineCache(geometry_, spec_.tokens, pool_).Restore(*contenders.front().session));
    }
    WaitForPreloading(*store);
    PREFIXD_TRY(RunInTurns(contenders));
    CompletionPoint point = PointOf("phi stored", contenders[1], contenders[0]);
    PREFIXD_TRY(ReadSummaryTokens(contenders[1], point));
    tier.completion.push_back(std::move(point));
    return {};
  }

  const LengthSpec& spec_;
  const KvGeometry geometry_;
  ThreadPool pool_;
  double scale_ = 1;  // from the measured layers to all
  LengthOutcome out_;
  std::vector<SyntheticKv> synthetic_;  // per layer
  fs::path maps_;
  double in_turns_ms_ = 0;  // of all RunInTurns
  std::vector<uint32_t> tokens_;
  std::string prefix_;
};

}  // namespace

uint32_t OnePercent(uint32_t tokens) { return (tokens + 99) / 100; }

Result<LengthOutcome> MeasureLength(const LengthSpec& spec, LengthSeconds* seconds) {
  std::error_code ec;
  fs::create_directories(spec.dir, ec);
  if (ec) return Error{Code::kIo, "cannot create '" + spec.dir.string() + "': " + ec.message()};
  return LengthBench(spec).Run(seconds);
}

}  // namespace prefixd::bench
