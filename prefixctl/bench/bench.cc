#include "prefixctl/bench/bench.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "measure/break_even/run.h"
#include "measure/capacity/run.h"
#include "measure/io/run.h"
#include "prefixctl/bench/bench_run.h"

namespace prefixd::ctl {
namespace {

using bench::BreakEvenOptions;

// Declared on each benchmark, and not on `bench` as well: an option given to both would be refused.
void AddBenchFlags(CLI::App* app, BenchOptions* o) {
  app->add_option("--dir", o->dir,
                  "A directory on the disk to be measured, not one with a store: the run makes a "
                  "folder in it, which goes when it ends. Else /var/tmp or /tmp, whichever is on "
                  "the disk of /var/lib/prefixd.")
      ->type_name("PATH");
  app->add_option("--json", o->json_file, "Write the figures to this file.")->type_name("FILE");
  app->add_option("--html", o->html_file, "Write one page with plots to this file.")
      ->type_name("FILE");
  app->add_flag("--quick", o->quick, "Small sizes and few repeats: to see what it does.");
  app->add_flag("--plan", o->plan_only, "Say what it would do, how long and where, and stop.");
  app->add_flag("-q,--quiet", o->quiet, "No progress on standard error.");
}

void AddModel(CLI::App* app, std::string* model) {
  app->add_option("--model", *model,
                  "SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B, Llama-3.1-70B, Qwen3-8B, or the "
                  "config.json of a checkpoint (or its folder).")
      ->type_name("NAME|FILE")
      ->capture_default_str();
}

using Machine = std::vector<std::pair<std::string, std::string>>;

// Joins what a benchmark consists of: how it plans, measures and reports.
template <typename PlanOf, typename Planning, typename Measuring, typename Reporting, typename O>
std::function<int()> Runner(const char* name, Planning plan_it, Measuring measure, Reporting report,
                            std::shared_ptr<BenchOptions> common, std::shared_ptr<O> o) {
  return [=] {
    auto plan = std::make_shared<PlanOf>();
    const auto progress = BenchProgress(common->quiet);
    o->quick = common->quick;
    return RunBenchmark(*common, {name,
                                  [=](const std::string& dir) -> Result<bench::Plan> {
                                    PREFIXD_ASSIGN(*plan, plan_it(*o, dir, progress));
                                    return plan->plan;
                                  },
                                  [=](const Machine& machine) -> Result<bench::Report> {
                                    PREFIXD_ASSIGN(const auto outcome, measure(*plan, progress));
                                    return report(outcome, machine);
                                  }});
  };
}

void DeclareBreakEven(CLI::App* parent, std::function<int()>* chosen) {
  CLI::App* app = parent->add_subcommand(
      "break-even",
      "When is reading 1% of a prompt and estimating the rest as fast as reading more? Measures "
      "selecting, loading, computing and estimating, with rows in memory and on the disk, and "
      "compares with restoring the prompt and with computing it again.");
  app->footer("Example: prefixctl bench break-even --model Llama-3.2-1B --html break-even.html");
  const auto common = std::make_shared<BenchOptions>();
  const auto o = std::make_shared<BreakEvenOptions>();
  AddBenchFlags(app, common.get());
  AddModel(app, &o->model);
  app->add_option("--lengths", o->lengths,
                  "Tokens of the prompts, with commas. Else 16384, 131072 and 1048576, those that "
                  "fit into the time, the disk and the memory.")
      ->delimiter(',')
      ->type_name("N,N,...")
      ->check(CLI::Range(1024, 1 << 21));
  app->add_option("--layers", o->layers,
                  "Layers that are measured; times are scaled to all. Else as many as fit.")
      ->type_name("N")
      ->check(CLI::Range(1, 1024));
  app->add_option("--steps", o->steps, "Generated tokens that are measured for each point (15).")
      ->type_name("N")
      ->check(CLI::Range(2, 1000));
  app->add_option("--minutes", o->minutes, "About how long it may take (5).")
      ->type_name("M")
      ->check(CLI::Range(0.1, 10000.0));
  app->add_option("--prefill-rate", o->prefill_rate,
                  "Tokens per second that your engine prefills at this length. Else an estimate "
                  "from the model's arithmetic and this processor's rate of matrix products.")
      ->type_name("R")
      ->check(CLI::PositiveNumber);
  app->add_option("--selector", o->selector, "How tokens are found: auto, exact or codes.")
      ->type_name("auto|exact|codes")
      ->check(CLI::IsMember({"auto", "exact", "codes"}))
      ->capture_default_str();
  app->callback([=] {
    *chosen =
        Runner<bench::BreakEvenPlan>("break-even", bench::PlanBreakEven, bench::MeasureBreakEven,
                                     bench::BreakEvenReport, common, o);
  });
}

void DeclareIo(CLI::App* parent, std::function<int()>* chosen) {
  CLI::App* app = parent->add_subcommand(
      "io",
      "Is the store as fast as this disk and memory? Puts, restores, single rows and attach, in "
      "turns with fio (where it is installed) and memcpy.");
  app->footer("Example: prefixctl bench io --dir /mnt/nvme --html io.html");
  const auto common = std::make_shared<BenchOptions>();
  const auto o = std::make_shared<bench::IoOptions>();
  AddBenchFlags(app, common.get());
  AddModel(app, &o->model);
  app->add_option("--tokens", o->tokens, "Tokens of the prompt (16384).")
      ->type_name("N")
      ->check(CLI::Range(2048, 1 << 20));
  app->add_option("--layers", o->layers, "Layers of the model. Else as many as fit, up to 2 GB.")
      ->type_name("N")
      ->check(CLI::Range(1, 1024));
  app->add_option("--pairs", o->pairs, "How often each is measured beside its floor (7).")
      ->type_name("N")
      ->check(CLI::Range(1, 1000));
  app->callback([=] {
    *chosen =
        Runner<bench::IoPlan>("io", bench::PlanIo, bench::MeasureIo, bench::IoReport, common, o);
  });
}

void DeclareCapacity(CLI::App* parent, std::function<int()>* chosen) {
  CLI::App* app = parent->add_subcommand(
      "capacity",
      "How many prompts do this disk and memory hold, what does a hit save, and from which rate of "
      "reuse on does storing pay? For your own log of requests, or for Zipf's law.");
  app->footer(
      "Example: prefixctl bench capacity --log requests.jsonl --prefill-rate 8000, with lines as\n"
      R"(  {"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]})");
  const auto common = std::make_shared<BenchOptions>();
  const auto o = std::make_shared<bench::CapacityOptions>();
  AddBenchFlags(app, common.get());
  AddModel(app, &o->model);
  CLI::Option* log =
      app->add_option(
             "--log", o->log_file,
             "Requests, one JSON object a line: timestamp in milliseconds, input_length and "
             "output_length in tokens, hash_ids of the prompt's blocks.")
          ->type_name("FILE");
  app->add_option("--block-tokens", o->block_tokens, "Tokens of a block of the log.")
      ->type_name("N")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app->add_option("--prefill-rate", o->prefill_rate,
                  "Tokens per second that your engine prefills. Else an estimate from the model's "
                  "arithmetic and this processor's rate of matrix products.")
      ->type_name("R")
      ->check(CLI::PositiveNumber);
  app->add_option("--disk-gb", o->disk_gb, "Disk for the store. Else what is free.")
      ->type_name("GB")
      ->check(CLI::PositiveNumber);
  app->add_option("--memory-gb", o->memory_gb,
                  "Memory for the host tier. Else what a store would take here.")
      ->type_name("GB")
      ->check(CLI::PositiveNumber);
  bench::ZipfSpec& z = o->zipf;
  const auto zipf = [&](const char* name, auto& value, const char* help, auto check) {
    app->add_option(name, value, help)
        ->type_name("N")
        ->check(check)
        ->capture_default_str()
        ->excludes(log);
  };
  zipf("--documents", z.documents, "Without a log: documents that are asked for.",
       CLI::Range(1, 1 << 20));
  zipf("--requests", z.requests, "Without a log: requests.", CLI::Range(1, 1000000));
  zipf("--exponent", z.exponent, "Without a log: document i is asked for like 1 / i^exponent.",
       CLI::Range(0.0, 4.0));
  zipf("--tokens", z.tokens, "Without a log: tokens of a document, about.",
       CLI::Range(512, 1 << 20));
  zipf("--requests-per-second", z.requests_per_second, "Without a log: how often they come.",
       CLI::PositiveNumber);
  app->callback([=] {
    *chosen = Runner<bench::CapacityPlan>("capacity", bench::PlanCapacity, bench::MeasureCapacity,
                                          bench::CapacityReport, common, o);
  });
}

}  // namespace

void DeclareBench(CLI::App* app, std::function<int()>* chosen) {
  CLI::App* bench = app->add_subcommand(
      "bench",
      "Does it pay here? Measures this machine's disk, memory and processor, and ends with a "
      "verdict. Needs no daemon and touches no store.");
  bench->require_subcommand(1);
  bench->footer("Example: prefixctl bench break-even --quick");
  DeclareBreakEven(bench, chosen);
  DeclareIo(bench, chosen);
  DeclareCapacity(bench, chosen);
}

}  // namespace prefixd::ctl
