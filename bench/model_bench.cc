// Measures what a decoder on a real model gains and loses by prefixd: a prefill that is stored
// beside a prefill alone, the time until what is derived is ready, and decoding over the stored
// prompt, at several lengths and budgets, beside the decoder's own rows in memory and beside
// prefixd reading everything. It also compares greedy texts token by token: from memory, from the
// SSD, and after a restart of the daemon.
//
// The daemon is a process of its own, as users run it. Sides take turns, so that other work on the
// machine slows all alike. Lengths beyond the model's are made of one prompt's rows laid end to
// end, and are good for timing alone.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/model/decode.h"
#include "bench/model/prefill.h"
#include "bench/steps/daemon_child.h"
#include "bench/support/bench_main.h"
#include "decoder/attention/spliced_attention.h"
#include "decoder/checkpoint/checkpoint.h"
#include "measure/timing/json_file.h"

namespace prefixd::bench {
namespace {

using decoder::LocalAttention;
using decoder::SplicedAttention;
using nlohmann::json;

struct Options {
  std::filesystem::path model_dir = "build/models/smollm2";
  std::filesystem::path tokens_file = "build/models/smollm2-licences.json";
  std::vector<uint32_t> lengths = {2048, 4096, 7600};
  uint32_t repeated = 32768;  // 0: left out
  std::vector<double> budgets = {0.01, 0.02, 0.05};
  uint32_t prefills = 3, rounds = 5, steps = 8, greedy = 200;
  uint32_t tier_mib = 3072;
  std::string json_file;
};

std::string Percent(double budget) {
  char text[16];
  std::snprintf(text, sizeof text, "%g%%", 100 * budget);
  return text;
}

void Print(const char* what, const Spread& s, const char* unit) {
  std::printf("  %-52s %9.3f %-6s (%.3f .. %.3f)\n", what, s.median, unit, s.low, s.high);
  std::fflush(stdout);
}

class Bench {
 public:
  Bench(const Options& options, decoder::Model model) : o_(options), model_(std::move(model)) {}

  Status Run() {
    PREFIXD_TRY(ReadTokens());
    PREFIXD_TRY(Start(o_.tier_mib));
    for (const uint32_t n : o_.lengths) PREFIXD_TRY(Length(n));
    if (o_.repeated > 0) PREFIXD_TRY(RepeatedLength());
    if (o_.greedy > 0) PREFIXD_TRY(GreedyTexts());
    if (o_.json_file.empty()) return {};
    out_["ratios"] = ratios_;
    return WriteJson(o_.json_file, out_);
  }

 private:
  Status ReadTokens() {
    std::ifstream in(o_.tokens_file);
    const json ids = json::parse(in, nullptr, false);
    if (!ids.is_array()) {
      return InvalidArgument("'" + o_.tokens_file.string() + "' has no JSON list of token ids");
    }
    for (const json& id : ids) {
      if (!id.is_number_unsigned()) return InvalidArgument("a token id is no whole number");
      tokens_.push_back(id.get<uint32_t>());
    }
    const uint32_t longest = *std::ranges::max_element(o_.lengths);
    const uint32_t most = model_.config().max_positions;
    if (longest + std::max(o_.steps, o_.greedy) > most) {
      return InvalidArgument("lengths and decoded tokens end beyond the model's " +
                             std::to_string(most) + " positions");
    }
    if (tokens_.size() < longest + o_.steps) {
      return InvalidArgument("the text has " + std::to_string(tokens_.size()) + " tokens; " +
                             std::to_string(longest + o_.steps) + " are needed");
    }
    return {};
  }

  Status Start(uint32_t tier_mib) {
    store_.reset();
    PREFIXD_TRY(daemon_.Stop());
    PREFIXD_TRY(daemon_.Start(PREFIXD_BINARY, {"--host-tier-mib", std::to_string(tier_mib)}));
    PREFIXD_ASSIGN(store_, Connect(daemon_.address()));
    return {};
  }

  // Registers the model under another identity, so that the same prompt is stored again.
  Result<std::string> NewModel() {
    const std::string name = "bench" + std::to_string(++models_);
    ModelSpec spec{name, model_.Geometry(DType::kBf16), {}, {}};
    PREFIXD_ASSIGN(spec.identity, decoder::ModelIdentity(o_.model_dir, model_.config()));
    spec.identity.emplace_back("bench", name);
    PREFIXD_TRY(store_->RegisterModel(spec));
    return name;
  }

  Status Length(uint32_t n) {
    std::printf("%u tokens\n", n);
    const std::span<const uint32_t> prompt = std::span(tokens_).first(n);
    std::vector<double> alone, storing, ready, overhead, ready_share;
    for (uint32_t i = 0; i < o_.prefills; ++i) {
      prompt_.reset();
      PREFIXD_ASSIGN(Prefilled own, Prefill(model_, prompt));
      PREFIXD_ASSIGN(const std::string name, NewModel());
      PREFIXD_ASSIGN(const StoredPrefill stored, PrefillAndStore(model_, *store_, name, prompt));
      alone.push_back(own.seconds);
      storing.push_back(stored.seconds);
      ready.push_back(stored.ready_seconds);
      overhead.push_back(stored.seconds / own.seconds);
      ready_share.push_back(stored.ready_seconds / own.seconds);
      prefix_ = stored.prefix;
      prompt_ = std::make_unique<Prefilled>(std::move(own));
    }
    Print("prefill alone", Summarise(alone), "s");
    Print("prefill, stored when it ends", Summarise(storing), "s");
    Print("then, until all that is derived is ready", Summarise(ready), "s");
    json& at = out_["lengths"].emplace_back(json{{"tokens", n}});
    at["prefill_s"] = Summarise(alone);
    at["store_s"] = Summarise(storing);
    at["ready_s"] = Summarise(ready);
    at["prefill_store_overhead"] = Summarise(overhead);
    at["ready_over_prefill"] = Summarise(ready_share);
    Print("stored prefill / prefill alone", Summarise(overhead), "");
    Print("ready / prefill alone", Summarise(ready_share), "");
    PREFIXD_TRY(BesideIngest(prompt, at));
    PREFIXD_TRY(DecodeOver(*prompt_->attention, n, prefix_, n, at));
    if (n != o_.lengths.back()) return {};
    ratios_["prefill_store_overhead"] = at["prefill_store_overhead"];
    ratios_["ready_over_prefill"] = at["ready_over_prefill"];
    ratios_["decode_beside_ingest"] = at["decode_beside_ingest"];
    ratios_["decode_speedup_7k6"] = at["decode_speedup"];
    ratios_["attention_speedup_7k6"] = at["attention_speedup"];
    return {};
  }

  // What building summaries and indexes takes from a decoder that goes on at once.
  Status BesideIngest(std::span<const uint32_t> prompt, json& at) {
    PREFIXD_ASSIGN(const std::string name, NewModel());
    PREFIXD_ASSIGN(const StoredPrefill stored,
                   PrefillAndStore(model_, *store_, name, prompt, false));
    const auto n = static_cast<uint32_t>(prompt.size());
    DecodeOptions o{.position = n, .n_tokens = n, .rounds = 1, .tokens = Continuation(n)};
    LocalAttention& local = *prompt_->attention;
    std::vector<double> beside, after;
    const auto run = [&](std::vector<double>& into) -> Status {
      DecodeSide side{.name = "own", .attention = &local, .rewind = [&] { local.TruncateTo(n); }};
      PREFIXD_TRY(Decode(model_, o, std::span(&side, 1)));
      into.insert(into.end(), side.token_ms.begin(), side.token_ms.end());
      return {};
    };
    for (bool ready = false; !ready;) {
      PREFIXD_ASSIGN(const PrefixDetail detail, store_->Prefix(stored.prefix));
      ready = detail.summary.ingest == IngestState::kReady;
      if (!ready || beside.empty()) PREFIXD_TRY(run(beside));
    }
    while (after.size() < beside.size()) PREFIXD_TRY(run(after));
    const double slower = Summarise(beside).median / Summarise(after).median;
    at["decode_beside_ingest"] = slower;
    std::printf("  %-52s %9.3f\n", "a token beside these builds / alone", slower);
    return {};
  }

  std::vector<uint32_t> Continuation(uint32_t n) const {
    return {tokens_.begin() + n, tokens_.begin() + n + o_.steps};
  }

  Result<std::shared_ptr<Session>> Attach(const std::string& prefix, const StepPolicy& policy,
                                          uint32_t n_tokens = 0) {
    return store_->Attach({.prefix = prefix, .n_tokens = n_tokens, .policy = policy});
  }

  // Decodes from position `position` of the text over a prompt of n tokens.
  Status DecodeOver(LocalAttention& local, uint32_t position, const std::string& prefix, uint32_t n,
                    json& at) {
    std::vector<std::unique_ptr<SplicedAttention>> spliced;
    std::vector<DecodeSide> sides = {{.name = "own rows in memory",
                                      .attention = &local,
                                      .rewind = [&] { local.TruncateTo(n); }}};
    const auto add = [&](const std::string& name, const StepPolicy& policy) -> Status {
      PREFIXD_ASSIGN(std::shared_ptr<Session> session, Attach(prefix, policy));
      SplicedAttention* made =
          spliced.emplace_back(std::make_unique<SplicedAttention>(std::move(session))).get();
      sides.push_back({.name = name,
                       .attention = made,
                       .rewind = [made, n] { made->TruncateTo(n); },
                       .spent = [made] { return made->step_ledger(); }});
      return {};
    };
    PREFIXD_TRY(add("prefixd, everything read", {.mode = StepMode::kFull}));
    for (const double budget : o_.budgets) {
      const Status added = add("prefixd, " + Percent(budget), {.budget = budget});
      if (!added.ok() && added.error().code == Code::kInfeasible) {
        std::printf("  left out: %s\n", added.error().message.c_str());
        continue;
      }
      PREFIXD_TRY(added);
    }
    PREFIXD_TRY(Decode(model_,
                       {.position = position,
                        .n_tokens = n,
                        .rounds = o_.rounds,
                        .tokens = Continuation(position)},
                       sides));
    std::printf("  %-26s %18s %18s   %s\n", "ms a token", "in all", "inside attention",
                "search / read / compute (threads' sum)");
    for (const DecodeSide& side : sides) {
      const Spread all = Summarise(side.token_ms), inside = Summarise(side.inside_ms);
      std::printf("  %-26s %7.1f (%.1f..%.1f) %7.1f (%.1f..%.1f)", side.name.c_str(), all.median,
                  all.low, all.high, inside.median, inside.low, inside.high);
      if (side.spent) {
        std::printf("   %.1f / %.1f / %.1f", side.select_ms, side.read_ms, side.compute_ms);
      }
      std::printf("\n");
      at["decode"].push_back({{"side", side.name},
                              {"token_ms", all},
                              {"inside_attention_ms", inside},
                              {"select_ms", side.select_ms},
                              {"read_ms", side.read_ms},
                              {"compute_ms", side.compute_ms}});
    }
    return Speedups(sides, at);
  }

  // Speedups over the better of the decoder's own rows and prefixd reading everything: the least
  // over the budgets. Attention is compared with the decoder's own.
  Status Speedups(const std::vector<DecodeSide>& sides, json& at) {
    const DecodeSide& own = sides[0];
    const DecodeSide& full = sides[1];
    const bool full_wins = Summarise(full.token_ms).median < Summarise(own.token_ms).median;
    const DecodeSide& best = full_wins ? full : own;
    std::optional<Spread> decode, attention;
    for (size_t i = 2; i < sides.size(); ++i) {
      const Spread token = Ratio(best.round_ms, sides[i].round_ms);
      const Spread inside = Ratio(own.round_inside_ms, sides[i].round_inside_ms);
      at["speedup"].push_back({{"side", sides[i].name}, {"decode", token}, {"attention", inside}});
      if (!decode || token.median < decode->median) decode = token;
      if (!attention || inside.median < attention->median) attention = inside;
    }
    if (!decode) return {};
    at["compared_with"] = best.name;
    at["decode_speedup"] = *decode;
    at["attention_speedup"] = *attention;
    Print(("a token, least gain over '" + best.name + "'").c_str(), *decode, "times");
    Print("attention alone, least gain over own rows", *attention, "times");
    return {};
  }

  Status RepeatedLength() {
    const uint32_t n = o_.lengths.back();
    std::printf("%u tokens: the rows of %u, again and again\n", o_.repeated, n);
    PREFIXD_ASSIGN(const std::string name, NewModel());
    PREFIXD_ASSIGN(const Repeated long_one,
                   PutRepeated(*store_, name, std::span(tokens_).first(n), *prompt_, o_.repeated));
    json& at = out_["lengths"].emplace_back(json{{"tokens", o_.repeated}, {"repeated", n}});
    PREFIXD_TRY(DecodeOver(*long_one.attention, n, long_one.prefix, o_.repeated, at));
    ratios_["attention_speedup_32k"] = at["attention_speedup"];
    ratios_["decode_speedup_32k"] = at["decode_speedup"];
    return {};
  }

  Status GreedyTexts() {
    const uint32_t n = o_.lengths.back();
    std::printf("greedy text of %u tokens after %u, everything read, beside the model's own\n",
                o_.greedy, n);
    const std::span<const uint32_t> prompt = std::span(tokens_).first(n);
    LocalAttention& local = *prompt_->attention;
    local.TruncateTo(n - 1);
    PREFIXD_ASSIGN(const Greedy own, GreedyText(model_, local, prompt.back(), n - 1, o_.greedy));
    local.TruncateTo(n);
    const auto compare = [&](const char* where) -> Status {
      PREFIXD_ASSIGN(const std::shared_ptr<Session> session,
                     Attach(prefix_, {.mode = StepMode::kFull}, n - 1));
      SplicedAttention spliced(session);
      PREFIXD_ASSIGN(const Greedy text,
                     GreedyText(model_, spliced, prompt.back(), n - 1, o_.greedy));
      const Agreement a = Compare(own, text);
      std::printf("  %-22s %u of %u tokens equal, logits within %.2g", where, a.equal, a.of,
                  a.max_logit_difference);
      if (a.margin) std::printf("; at the first difference %.2g nats apart", *a.margin);
      std::printf("\n");
      out_["greedy"].push_back({{"from", where},
                                {"equal", a.equal},
                                {"of", a.of},
                                {"max_logit_difference", a.max_logit_difference},
                                {"margin", a.margin ? json(*a.margin) : json()}});
      return {};
    };
    PREFIXD_TRY(compare("memory"));
    PREFIXD_TRY(Start(o_.tier_mib));
    PREFIXD_TRY(compare("after a restart"));
    PREFIXD_TRY(Start(0));
    return compare("SSD, no host tier");
  }

  Options o_;
  decoder::Model model_;
  std::vector<uint32_t> tokens_;
  DaemonChild daemon_;
  std::unique_ptr<Store> store_;
  uint32_t models_ = 0;
  std::unique_ptr<Prefilled> prompt_;  // of the last length
  std::string prefix_;                 // the same, stored
  json out_, ratios_;
};

Status RunBench(const Options& options) {
  PREFIXD_ASSIGN(decoder::Model model, decoder::Model::Load(options.model_dir, {}));
  return Bench(options, std::move(model)).Run();
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options o;
  CLI::App app{"What a decoder on a real model gains and loses by prefixd"};
  app.add_option("--model", o.model_dir, "Checkpoint, as `make model-smollm2` makes one")
      ->capture_default_str();
  app.add_option("--tokens", o.tokens_file,
                 "A text's token ids, as bench/engines/model_text.py writes them")
      ->capture_default_str();
  app.add_option("--lengths", o.lengths, "Prompts, tokens; the longest last")
      ->capture_default_str();
  app.add_option("--repeated", o.repeated, "Also decode over so many rows, laid end to end; 0: not")
      ->capture_default_str();
  app.add_option("--budgets", o.budgets, "Read budgets of a step")->capture_default_str();
  app.add_option("--prefills", o.prefills, "Pairs of prefills a length")->capture_default_str();
  app.add_option("--rounds", o.rounds, "Rounds of decoding")->capture_default_str();
  app.add_option("--steps", o.steps, "Tokens a round")->capture_default_str();
  app.add_option("--greedy", o.greedy, "Greedy tokens to compare; 0: none")->capture_default_str();
  app.add_option("--tier-mib", o.tier_mib, "The daemon's host tier")->capture_default_str();
  bool missing = false;
  const int code =
      prefixd::bench::BenchMain(app, argc, argv, o.json_file, [&]() -> prefixd::Status {
        missing = !std::filesystem::exists(o.model_dir) || !std::filesystem::exists(o.tokens_file);
        if (!missing) return prefixd::bench::RunBench(o);
        return prefixd::Error{prefixd::Code::kNotFound, "no model in '" + o.model_dir.string() +
                                                            "' or no '" + o.tokens_file.string() +
                                                            "': `make bench-model` makes both"};
      });
  return missing ? 3 : code;
}
