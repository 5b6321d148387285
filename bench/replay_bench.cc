// Replays requests, a published log or chats with its statistics, in a real store with quota and
// eviction, and beside it what LRU, LFU, GDSF and S3-FIFO hit in simulated caches of as many
// tokens, and a cache without bound. Tells bytes written and what they are over a day.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/support/bench_main.h"
#include "bench/support/served_store.h"
#include "measure/capacity/chat_log.h"
#include "measure/capacity/store_replay.h"
#include "measure/disk/medium.h"
#include "measure/disk/scratch.h"
#include "measure/timing/json_file.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Options {
  fs::path dir;
  std::string log_file, json_file;
  uint32_t block_tokens = 512;
  ChatSpec chats;
  ZipfSpec zipf;
  bool by_zipf = false;
  std::vector<double> parts = {0.05, 0.1, 0.2, 0.4};
  bool simulate_only = false, compact = true, embedded = false;
};

json HitsJson(const CacheHits& h) {
  return {{"hit_tokens", h.hit_tokens},
          {"hit_share", h.hit_share()},
          {"requests_hit", h.requests_hit},
          {"stored_tokens", h.stored_tokens},
          {"distinct_tokens", h.distinct_tokens}};
}

class ReplayBench {
 public:
  explicit ReplayBench(const Options& o) : o_(o) {}

  Status Run() {
    if (o_.by_zipf) {
      log_ = ZipfRequests(o_.zipf, o_.block_tokens);
    } else if (o_.log_file.empty()) {
      log_ = ChatRequests(o_.chats, o_.block_tokens);
    } else {
      PREFIXD_ASSIGN(log_, ReadRequestLog(fs::path(o_.log_file), o_.block_tokens));
    }
    endless_ = ReplayRequests(log_, 0, Eviction::kLru);
    in_memory_ = !MediumOf(o_.dir).disk;
    PREFIXD_ASSIGN(shape_, MeasureStoreShape(o_.dir / "shape"));
    const double mean = double(log_.input_tokens()) / double(log_.requests.size());
    std::printf("%s: %zu requests in %.0f s, %.0f tokens each; a cache without bound hits %.1f%%\n",
                log_.name.c_str(), log_.requests.size(), log_.seconds(), mean,
                100 * endless_.hit_share());
    std::printf("a segment takes %.0f bytes and %.1f for each token of %u bytes of rows\n\n",
                shape_.segment_bytes, shape_.token_bytes, kReplayRowBytes);
    report_ = {{"log", log_.name},
               {"requests", log_.requests.size()},
               {"seconds", log_.seconds()},
               {"input_tokens", log_.input_tokens()},
               {"mean_input_tokens", mean},
               {"endless", HitsJson(endless_)},
               {"segment_bytes", shape_.segment_bytes},
               {"token_bytes", shape_.token_bytes},
               {"row_bytes_per_token", kReplayRowBytes},
               {"compact", o_.compact},
               {"through", o_.simulate_only ? "a model"
                           : o_.embedded    ? "this process"
                                            : "a daemon"},
               {"caches", json::array()}};
    std::printf("%-7s%9s", "cache", "store");
    for (const Eviction policy : kPolicies) std::printf("%16s", PolicyName(policy));
    std::printf("%9s%9s%10s%9s%8s\n", "of best", "of ideal", "written", "amplif.", "took");
    for (const double part : o_.parts) PREFIXD_TRY(Cache(part));
    std::printf(
        "\nTokens hit, %% of all. cache: tokens that it holds, of all different ones; the policies "
        "have as many in\nblocks. of best: the store beside the best policy that is not its own. "
        "written: segments, in rows' bytes\namplif.: bytes written to the disk over bytes of rows "
        "put.\n");
    if (o_.json_file.empty()) return {};
    return WriteJson(o_.json_file, report_);
  }

 private:
  Status Cache(double part) {
    const double tokens = part * double(endless_.distinct_tokens);
    std::vector<CacheHits> simulated;
    const auto capacity = static_cast<uint64_t>(std::max(1.0, tokens));
    CacheHits best;
    for (const Eviction policy : kPolicies) {
      simulated.push_back(ReplayRequests(log_, capacity, policy));
      if (policy != Eviction::kScore && simulated.back().hit_tokens > best.hit_tokens) {
        best = simulated.back();
      }
    }
    // The quota that as many tokens take with what the store needs for its segments.
    const double a_segment = double(endless_.stored_tokens) / double(log_.requests.size());
    StoreShape shape = shape_;
    shape.quota_bytes =
        static_cast<uint64_t>(tokens * (shape.token_bytes + shape.segment_bytes / a_segment));
    const CacheHits model = ReplayInModel(log_, shape);
    ReplayOutcome store;
    if (!o_.simulate_only) {
      ReplayOptions options;
      options.dir = o_.dir / "store";
      options.quota_bytes = shape.quota_bytes;
      options.compact = o_.compact;
      if (!o_.embedded) {
        options.serve = [this](std::unique_ptr<LocalStore> opened) {
          return ServeStore(std::move(opened), o_.dir);
        };
      }
      options.progress = [](uint64_t done, uint64_t all) {
        if (done % 100 == 0) std::fprintf(stderr, "\r%5.1f%%", 100.0 * double(done) / double(all));
      };
      PREFIXD_ASSIGN(store, ReplayInStore(log_, options));
      std::fprintf(stderr, "\r");
      std::error_code ec;
      fs::remove_all(options.dir, ec);
    } else {
      store.hits = model;
    }
    Print(part, store, simulated, best);
    return Keep(part, shape, store, model, simulated, best);
  }

  void Print(double part, const ReplayOutcome& store, const std::vector<CacheHits>& simulated,
             const CacheHits& best) const {
    std::printf("%6.1f%%%8.2f%%", 100 * part, 100 * store.hits.hit_share());
    for (const CacheHits& hits : simulated) std::printf("%15.2f%%", 100 * hits.hit_share());
    std::printf("%9.3f%9.3f", Ratio(store.hits, best), Ratio(store.hits, endless_));
    if (!o_.simulate_only) {
      std::printf("%7.2f GB", double(store.written_bytes) / 1e9);
      in_memory_ ? std::printf("%9s", "-") : std::printf("%9.3f", Amplification(store));
      std::printf("%6.0f s", store.seconds);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  Status Keep(double part, const StoreShape& shape, const ReplayOutcome& store,
              const CacheHits& model, const std::vector<CacheHits>& simulated,
              const CacheHits& best) {
    json cache = {{"part", part},
                  {"quota_bytes", shape.quota_bytes},
                  {"model_of_store", HitsJson(model)},
                  {"best_simulated", best.hit_share()},
                  {"policies", json::object()},
                  {"ratios",
                   {{"hits_vs_best_simulated", Ratio(store.hits, best)},
                    {"hit_rate_vs_ideal", Ratio(store.hits, endless_)}}}};
    for (size_t i = 0; i < simulated.size(); ++i) {
      cache["policies"][PolicyName(kPolicies[i])] = HitsJson(simulated[i]);
    }
    if (!o_.simulate_only) {
      const double days = std::max(1.0, log_.seconds()) / 86400;
      cache["store"] = HitsJson(store.hits);
      cache["store"].update({{"seconds", store.seconds},
                             {"segments", store.segments},
                             {"stored_bytes", store.stored_bytes},
                             {"evictions", store.evictions},
                             {"refused", store.refused},
                             {"row_bytes", store.row_bytes},
                             {"written_bytes", store.written_bytes},
                             {"stored_tokens_a_day", double(store.hits.stored_tokens) / days}});
      if (!in_memory_) {
        cache["store"].update({{"disk_bytes", store.disk_bytes},
                               {"write_amplification", Amplification(store)},
                               {"disk_bytes_a_day", double(store.disk_bytes) / days},
                               {"capacity_writes_a_day",
                                double(store.disk_bytes) / double(shape.quota_bytes) / days}});
      }
    }
    report_["caches"].push_back(std::move(cache));
    return {};
  }

  static double Ratio(const CacheHits& a, const CacheHits& b) {
    return b.hit_tokens ? double(a.hit_tokens) / double(b.hit_tokens) : 0;
  }
  static double Amplification(const ReplayOutcome& store) {
    return store.row_bytes ? double(store.disk_bytes) / double(store.row_bytes) : 0;
  }

  const Options& o_;
  RequestLog log_;
  CacheHits endless_;
  StoreShape shape_;
  bool in_memory_ = false;  // nothing is written to a disk
  json report_;
};

int Main(int argc, char** argv) {
  Options o;
  CLI::App app(
      "Replays an hour of requests in a store with a quota, beside simulated caches: hit tokens, "
      "write amplification, disk wear.");
  fs::path parent;
  app.add_option("--dir", parent,
                 "Directory on the disk to be measured; a short path. The stores lie in a folder "
                 "below it, which goes at the end")
      ->check(CLI::ExistingDirectory)
      ->required();
  app.add_option("--log", o.log_file,
                 "Requests as Mooncake publishes them; else chats with their statistics");
  app.add_option("--block-tokens", o.block_tokens, "Tokens of a block of the log");
  app.add_option("--hours", o.chats.hours, "Of chats that are made up");
  app.add_option("--requests-per-hour", o.chats.requests_per_hour, "Of chats that are made up");
  app.add_option("--seed", o.chats.seed, "Of chats that are made up");
  app.add_option("--zipf", o.zipf.exponent, "Documents by Zipf's law with this exponent instead")
      ->each([&o](const std::string&) { o.by_zipf = true; });
  app.add_option("--documents", o.zipf.documents, "By Zipf's law");
  app.add_option("--caches", o.parts, "Sizes of the cache, as parts of all different tokens")
      ->delimiter(',');
  app.add_flag("!--no-compact", o.compact, "Chains of small segments stay as they are");
  app.add_flag("--embedded", o.embedded, "The store in this process, without a daemon before it");
  app.add_flag("--simulate-only", o.simulate_only, "A model of the store instead of one");
  return BenchMain(app, argc, argv, o.json_file, [&]() -> Status {
    PREFIXD_ASSIGN(const int code, RunInScratch(parent, [&](const fs::path& folder) {
                     o.dir = folder;
                     const Status status = ReplayBench(o).Run();
                     if (status.ok()) return 0;
                     std::fprintf(stderr, "replay_bench: %s\n", status.error().ToString().c_str());
                     return 1;
                   }));
    if (code == 0) return {};
    return Error{Code::kCancelled, "ended early, with status " + std::to_string(code)};
  });
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) { return prefixd::bench::Main(argc, argv); }
