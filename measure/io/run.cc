#include "measure/io/run.h"

#include <algorithm>
#include <cmath>

#include "measure/disk/fio.h"
#include "measure/disk/memory_left.h"
#include "measure/disk/scratch.h"
#include "measure/disk/try_small.h"
#include "measure/page/text.h"
#include "measure/prompts/bench_prompt.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

}  // namespace

Result<IoPlan> PlanIo(const IoOptions& options, const fs::path& dir, const IoProgress& progress) {
  IoPlan plan;
  plan.dir = dir;
  PREFIXD_ASSIGN(plan.model, ModelShapeOf(options.model));
  if (options.layers > plan.model.n_layers) {
    return Error{Code::kInvalidArgument, plan.model.name + " has " +
                                             std::to_string(plan.model.n_layers) +
                                             " layers; --layers asks for more"};
  }
  plan.tokens = options.tokens > 0 ? options.tokens : options.quick ? 2048 : 16384;
  plan.pairs = options.pairs > 0 ? options.pairs : options.quick ? 2 : 7;
  const auto fio = FioVersion();
  if (fio.ok()) {
    plan.fio = *fio;
  } else {
    plan.skipped.push_back("fio beside put, restore and rows: " + fio.error().message);
  }
  if (progress) progress("trying a small prompt, to know how long the rest takes");
  PREFIXD_ASSIGN(const RowSeconds costs, TrySmallPrompt(plan.model, 2048, dir));
  const double layer = double(plan.model.Geometry(1).token_bytes()) * plan.tokens;
  // Rows in memory, the same interleaved, the host tier, and a source for memcpy.
  const double memory = double(AvailableMemory()) * 0.7 / 4.5;
  // The store's file, fio's, and one more that is being replaced.
  const double room = std::max(0.0, double(FreeBytes(dir)) - double(512 << 20)) / 4;
  const double fit = std::floor(std::min(memory, room) / layer);
  if (fit < 1) {
    return Error{Code::kResourceExhausted,
                 "one layer of " + Tokens(plan.tokens) + " is " + GigaBytes(layer) +
                     "; there must be four times as much on the disk and in memory: take fewer "
                     "--tokens"};
  }
  const double most =
      options.layers > 0 ? options.layers : std::min(double(plan.model.n_layers), 2e9 / layer);
  plan.layers = static_cast<uint32_t>(std::max(1.0, std::floor(std::min(fit, most))));
  if (options.layers > plan.layers) {
    return Error{Code::kResourceExhausted,
                 "only " + std::to_string(plan.layers) + " layers fit; --layers asks for more"};
  }
  plan.attach_layers = std::min(plan.layers, options.quick ? 1u : 2u);
  const double bytes = layer * plan.layers, rounds = plan.pairs + 1;
  const double one = costs.putting * (plan.fio.empty() ? 1.0 : 2.0);
  plan.plan.seconds = bytes * (costs.making + one * (rounds * 2.5 + 4)) +
                      layer * plan.attach_layers * costs.attaching;
  plan.plan.bytes =
      bytes * (rounds * (plan.fio.empty() ? 1 : 2) + 3) + layer * plan.attach_layers * 1.5;
  plan.plan.sentences = {"Measures put, restore, rows and attach of a prompt of " +
                         Tokens(plan.tokens) + " of " + plan.model.name + ": " +
                         std::to_string(plan.layers) + " of " +
                         std::to_string(plan.model.n_layers) + " layers, " + GigaBytes(bytes) +
                         " of rows, " + std::to_string(plan.pairs) + " times each" +
                         (plan.fio.empty() ? "" : ", in turns with " + plan.fio) + "."};
  return plan;
}

Result<IoOutcome> MeasureIo(const IoPlan& plan, const IoProgress& progress) {
  IoOutcome out;
  out.what = plan;
  SpeedOptions speed;
  speed.dir = plan.dir;
  speed.parts = {"put", "restore", "rows", "host", "host_rows", "reclustered"};
  speed.pairs = plan.pairs;
  speed.fio = !plan.fio.empty();
  speed.progress = progress;
  {
    if (progress) progress("making keys and values");
    const Prompt prompt = SyntheticPrompt(plan.model.Geometry(plan.layers), plan.tokens, false);
    PREFIXD_ASSIGN(out.speed, MeasureSpeed(prompt, speed));
  }
  if (progress) progress("attach: making summaries and indexes");
  const Prompt prompt =
      SyntheticPrompt(plan.model.Geometry(plan.attach_layers), plan.tokens, false);
  PREFIXD_ASSIGN(out.attach, MeasureAttach(prompt, plan.dir / "attach", false, plan.pairs));
  out.stored_per_row_byte = out.attach.stored_bytes / double(prompt.row_bytes());
  return out;
}

}  // namespace prefixd::bench
