#include "bench/prefetch_steps.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "runtime/store.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kRunTokens = 4096;
constexpr const char* kModel = "traced";

// Times of one case, of all its rounds.
struct Samples {
  std::vector<double> ms, read_ms;
  double tokens = 0, ssd_pages = 0, ahead_pages = 0, ahead_used_pages = 0;
};

class Decode {
 public:
  Decode(std::span<const HeadTrace> heads, const PrefetchSetting& setting)
      : heads_(heads), setting_(setting), n_(static_cast<uint32_t>(heads[0].view().count)) {
    const HeadTrace& head = heads[0];
    geometry_.n_layers = setting.n_layers;
    geometry_.n_kv_heads = static_cast<uint32_t>(heads.size() / setting.n_layers);
    geometry_.n_q_heads = geometry_.n_kv_heads * head.group;
    geometry_.key_dim = geometry_.value_dim = head.shape.key_dim;
    geometry_.dtype = head.shape.dtype;
    geometry_.layers.assign(setting.n_layers, head.layer);
    options_.dir = setting.dir;
    options_.selector_memory_bytes = 4 * RowBytes();
    options_.scrub_bytes_per_second = 0;
  }
  ~Decode() {
    store_.reset();
    std::error_code ec;
    std::filesystem::remove_all(setting_.dir, ec);
  }

  Status Put() {
    PREFIXD_TRY(Open(1));
    std::vector<uint32_t> tokens(n_);
    for (uint32_t t = 0; t < n_; ++t) tokens[t] = t;
    PREFIXD_ASSIGN(const auto put, store_->BeginPut({kModel, "", tokens, "prefetch"}));
    std::mt19937 rng(1);
    std::vector<std::byte> k, v;
    for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
      for (uint32_t first = 0; first < n_; first += kRunTokens) {
        const uint32_t count = std::min(kRunTokens, n_ - first);
        Rows(layer, first, count, rng, k, v);
        PREFIXD_TRY(put->Write(layer, first, count, k, v));
      }
    }
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    prefix_ = stored.prefix;
    PREFIXD_TRY(store_->WaitReady(prefix_, nullptr));
    return store_->WaitSettled(nullptr);
  }

  // One decode; the tier holds what its first step read.
  Status Run(const PrefetchCase& of, Samples& samples) {
    PREFIXD_TRY(Open(of.tier));
    AttachSpec spec;
    spec.model = kModel;
    spec.prefix = prefix_;
    spec.policy.k = static_cast<uint32_t>(std::ceil(setting_.fraction * n_));
    PREFIXD_ASSIGN(const auto session, store_->Attach(spec));
    // Keys and indexes are in memory when the decode begins.
    PREFIXD_TRY(Token(*session, 0, nullptr));
    while (store_->stats().load_queue > 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    spec.policy.prefetch = of.prefetch;
    PREFIXD_TRY(session->SetPolicy(spec.policy));
    const Ledger before = session->report().total;
    for (size_t step = 0; step < heads_[0].n_steps(); ++step) {
      PREFIXD_TRY(Token(*session, step, &samples));
      std::this_thread::sleep_for(std::chrono::milliseconds(of.pause_ms));
    }
    PREFIXD_ASSIGN(const SessionReport report, session->Detach());
    const auto pages = [](uint64_t now, uint64_t then) { return double(now - then) / 4096; };
    constexpr auto kSsd = static_cast<size_t>(Tier::kSsd);
    samples.tokens += double(heads_[0].n_steps());
    samples.ssd_pages += pages(report.total.physical_bytes[kSsd], before.physical_bytes[kSsd]);
    samples.ahead_pages += pages(report.total.ahead_bytes, 0);
    samples.ahead_used_pages += pages(report.total.ahead_used_bytes, 0);
    return {};
  }

 private:
  uint64_t RowBytes() const { return uint64_t{n_} * heads_.size() * geometry_.row().bytes(); }

  Status Open(double tier) {
    store_.reset();
    options_.host_tier_bytes = static_cast<uint64_t>(tier * double(RowBytes()));
    PREFIXD_ASSIGN(store_, Store::Open(options_));
    ModelSpec model;
    model.name = kModel;
    model.geometry = geometry_;
    model.identity = {{"weights", "traced"}};
    return store_->RegisterModel(model);
  }

  // Keys of the traces, and values of no meaning: they decide nothing that is measured.
  void Rows(uint32_t layer, uint32_t first, uint32_t count, std::mt19937& rng,
            std::vector<std::byte>& k, std::vector<std::byte>& v) const {
    const size_t key_bytes = geometry_.row().key_bytes(),
                 value_bytes = geometry_.row().value_bytes();
    k.resize(count * geometry_.n_kv_heads * key_bytes);
    v.resize(count * geometry_.n_kv_heads * value_bytes);
    std::normal_distribution<float> normal;
    std::vector<float> values(geometry_.value_dim);
    for (uint32_t t = 0; t < count; ++t) {
      for (uint32_t h = 0; h < geometry_.n_kv_heads; ++h) {
        const size_t row = size_t{t} * geometry_.n_kv_heads + h;
        const HeadTrace& head = heads_[size_t{layer} * geometry_.n_kv_heads + h];
        std::copy_n(head.keys.data() + size_t{first + t} * key_bytes, key_bytes,
                    k.data() + row * key_bytes);
        for (float& x : values) x = normal(rng);
        FromFloat(geometry_.dtype, values, v.data() + row * value_bytes);
      }
    }
  }

  Status Token(Session& session, size_t step, Samples* samples) {
    std::vector<float> q, y(size_t{geometry_.n_q_heads} * geometry_.value_dim);
    std::vector<float> lse(geometry_.n_q_heads);
    double ms = 0, read_ms = 0;
    for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
      q.clear();
      for (uint32_t h = 0; h < geometry_.n_kv_heads; ++h) {
        const auto of_head = heads_[size_t{layer} * geometry_.n_kv_heads + h].step(step);
        q.insert(q.end(), of_head.begin(), of_head.end());
      }
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

  const std::span<const HeadTrace> heads_;
  const PrefetchSetting& setting_;
  const uint32_t n_;
  KvGeometry geometry_;
  RuntimeOptions options_;
  std::unique_ptr<Store> store_;
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
  std::filesystem::create_directories(setting.dir.parent_path(), ec);  // else opening says why
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
    cases[i].ahead_pages = s.ahead_pages / s.tokens;
    cases[i].ahead_used_pages = s.ahead_used_pages / s.tokens;
  }
  return cases;
}

}  // namespace prefixd::bench
