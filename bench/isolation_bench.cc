// Measures whether a tenant can tell by the clock that another tenant stored something: it asks the
// real daemon for what the other has and for what nobody has, in random turns, and the times of the
// two are compared. Fails where they differ by more than --margin.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/steps/daemon_child.h"
#include "bench/support/bench_main.h"
#include "measure/timing/json_file.h"
#include "prefixd/client.h"

namespace prefixd::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  uint32_t tries = 10000, prefixes = 64, tokens = 512;
  double margin = 0.05;
  std::string json_file;
};

// The chance that a call of the first kind takes longer than one of the second: 0.5 where the times
// tell nothing. `low` and `high` bound it with 95% confidence (Hanley and McNeil, 1982).
struct Auc {
  double value = 0.5, low = 0, high = 1;
};

Auc Compare(const std::vector<double>& first, const std::vector<double>& second) {
  std::vector<std::pair<double, bool>> all;
  for (const double t : first) all.emplace_back(t, true);
  for (const double t : second) all.emplace_back(t, false);
  std::ranges::sort(all);
  double ranks = 0;
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    size_t of_first = 0;
    for (; end < all.size() && all[end].first == all[begin].first; ++end) {
      if (all[end].second) ++of_first;
    }
    ranks += double(of_first) * (double(begin + end + 1) / 2);  // equal times share their ranks
  }
  const double n = double(first.size()), m = double(second.size());
  const double a = (ranks - n * (n + 1) / 2) / (n * m);
  const double q1 = a / (2 - a), q2 = 2 * a * a / (1 + a);
  const double variance = (a * (1 - a) + (n - 1) * (q1 - a * a) + (m - 1) * (q2 - a * a)) / (n * m);
  const double reach = 1.96 * std::sqrt(std::max(variance, 0.0));
  return {a, a - reach, a + reach};
}

class Bench {
 public:
  explicit Bench(const Options& o) : o_(o) {
    model_.name = "bench";
    model_.geometry = {1, 2, 1, 16, 16, DType::kBf16, {{0.25f, 0, 0}}};
    model_.identity = {{"weights", "none"}};
  }

  Status Run() {
    PREFIXD_TRY(Prepare());
    std::printf("%u tries each, %u prefixes of %u tokens; medians in us\n", o_.tries, o_.prefixes,
                o_.tokens);
    std::printf("%-38s %9s %9s %7s  %s\n", "", "another's", "nobody's", "AUC", "95%");
    const auto match = [this](const Asked& asked) {
      return store_->Match({.model = model_.name, .tokens = asked.tokens}).ok();
    };
    const auto prefix = [this](const Asked& asked) { return !store_->Prefix(asked.id).ok(); };
    const auto attach = [this](const Asked& asked) {
      return !store_->Attach({.model = model_.name, .prefix = asked.id}).ok();
    };
    const auto remove = [this](const Asked& asked) { return !store_->Remove(asked.id).ok(); };
    const auto own = [this](const Asked& asked) {
      static_cast<void>(store_->Prefix(asked.id));
      return true;
    };
    PREFIXD_TRY(Measure("match", foreign_, nobodys_, match));
    PREFIXD_TRY(Measure("prefix by id", foreign_, nobodys_, prefix));
    PREFIXD_TRY(Measure("attach by id", foreign_, nobodys_, attach));
    PREFIXD_TRY(Measure("remove by id", foreign_, nobodys_, remove));
    const auto told = told_;
    // What may be told, so that the others are known to be seen.
    PREFIXD_TRY(Measure("prefix by id, own (for comparison)", own_, nobodys_, own));
    if (!o_.json_file.empty()) {
      PREFIXD_TRY(WriteJson(o_.json_file, {{"tries", o_.tries},
                                           {"prefixes", o_.prefixes},
                                           {"tokens", o_.tokens},
                                           {"margin", o_.margin},
                                           {"calls", figures_}}));
    }
    if (told_.size() == told.size()) {
      return Error{Code::kInternal, "not even an own prefix is told apart: nothing was measured"};
    }
    if (told.empty()) return {};
    std::string all;
    for (const std::string& name : told) all += (all.empty() ? "" : ", ") + name;
    return Error{Code::kInternal, "the time tells whether another tenant stored it: " + all};
  }

 private:
  struct Asked {
    std::vector<uint32_t> tokens;
    std::string id;
  };

  std::vector<uint32_t> Tokens() {
    std::vector<uint32_t> tokens(o_.tokens);
    for (uint32_t& t : tokens) t = uint32_t(rng_() % 50000);
    return tokens;
  }

  Result<std::vector<Asked>> Put(Store& store) {
    const std::vector<std::byte> rows(size_t{o_.tokens} * 16 * 2);
    std::vector<Asked> all;
    for (uint32_t i = 0; i < o_.prefixes; ++i) {
      Asked asked{Tokens(), ""};
      PREFIXD_ASSIGN(auto put, store.BeginPut({model_.name, "", asked.tokens, ""}));
      PREFIXD_TRY(put->Write(0, 0, o_.tokens, rows, rows));
      PREFIXD_ASSIGN(const PutResult result, put->Commit());
      PREFIXD_TRY(store.WaitReady(result.prefix, {}));
      asked.id = result.prefix;
      all.push_back(std::move(asked));
    }
    return all;
  }

  Status Prepare() {
    PREFIXD_TRY(daemon_.Start(PREFIXD_BINARY, {}));
    ConnectOptions other;
    other.tenant = "other";
    PREFIXD_ASSIGN(const auto others, Connect(daemon_.address(), other));
    ConnectOptions asker;
    asker.tenant = "asker";
    PREFIXD_ASSIGN(store_, Connect(daemon_.address(), asker));
    PREFIXD_TRY(others->RegisterModel(model_));
    PREFIXD_ASSIGN(foreign_, Put(*others));
    PREFIXD_ASSIGN(own_, Put(*store_));
    for (uint32_t i = 0; i < o_.prefixes; ++i) {
      std::string id = foreign_[i].id;
      for (char& c : id) {
        if (c != '-') c = "0123456789abcdef"[rng_() % 16];
      }
      nobodys_.push_back({Tokens(), id});
    }
    return {};
  }

  // `call` returns whether the answer is the one that both kinds must get.
  Status Measure(const std::string& name, const std::vector<Asked>& first,
                 const std::vector<Asked>& second, const std::function<bool(const Asked&)>& call) {
    std::vector<uint8_t> turns(size_t{2} * o_.tries, 0);
    std::fill_n(turns.begin(), o_.tries, uint8_t{1});
    std::ranges::shuffle(turns, rng_);
    std::vector<double> times[2];
    for (const uint8_t turn : turns) {
      const Asked& asked = (turn ? first : second)[rng_() % o_.prefixes];
      const auto begin = Clock::now();
      const bool as_expected = call(asked);
      const std::chrono::duration<double, std::micro> took = Clock::now() - begin;
      if (!as_expected) return Error{Code::kInternal, name + ": another answer was expected"};
      times[turn ? 0 : 1].push_back(took.count());
    }
    const Auc auc = Compare(times[0], times[1]);
    const bool tells = auc.low < 0.5 - o_.margin || auc.high > 0.5 + o_.margin;
    if (tells) told_.push_back(name);
    const Spread a = Summarise(times[0]), b = Summarise(times[1]);
    std::printf("%-38s %9.2f %9.2f %7.3f  %.3f to %.3f%s\n", name.c_str(), a.median, b.median,
                auc.value, auc.low, auc.high, tells ? "  told apart" : "");
    figures_.push_back({{"call", name},
                        {"first_us", a},
                        {"second_us", b},
                        {"auc", auc.value},
                        {"auc_low", auc.low},
                        {"auc_high", auc.high}});
    return {};
  }

  const Options& o_;
  std::mt19937_64 rng_{20261125};
  ModelSpec model_;
  DaemonChild daemon_;
  std::unique_ptr<Store> store_;
  std::vector<Asked> foreign_, own_, nobodys_;
  std::vector<std::string> told_;
  nlohmann::json figures_ = nlohmann::json::array();
};

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  CLI::App app("Whether the daemon's times tell a tenant what another tenant stored.");
  prefixd::bench::Options options;
  app.add_option("--tries", options.tries, "Calls of each kind")->check(CLI::Range(100, 10000000));
  app.add_option("--prefixes", options.prefixes, "Prefixes of each tenant")
      ->check(CLI::Range(1, 10000));
  app.add_option("--tokens", options.tokens, "Tokens of each prefix")->check(CLI::Range(1, 100000));
  app.add_option("--margin", options.margin,
                 "How far from 0.5 the interval of an AUC may reach before the run fails")
      ->check(CLI::Range(0.0, 0.5));
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&options] { return prefixd::bench::Bench(options).Run(); });
}
