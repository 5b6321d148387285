// Measures the CUDA step of gpu/: completion's cost with rows in pinned host memory, the share of
// the link's bandwidth that the gather reaches, and the speedup of a step over exact attention with
// rows on the device. The layer is one of an 8B model (32 query heads, 8 KV heads, dh 128, bf16).
// Retrieved sets rotate, so that rows come from memory and not from a cache; launches are replayed
// from a graph.
//
// Without a device it prints that and measures nothing (exit status 3).
#include <cstdio>
#include <iterator>
#include <string>

#include "bench/gpu/gpu_layer.h"
#include "bench/gpu/gpu_main.h"
#include "bench/gpu/gpu_timing.h"
#include "bench/support/figures.h"
#include "gpu/device/launch_memory.h"
#include "prefixd/gpu/exact.h"

namespace prefixd::bench {
namespace {

constexpr Completion kAll[] = {Completion::kNone,      Completion::kMean,
                               Completion::kRank8,     Completion::kFullCross,
                               Completion::kPhiStored, Completion::kPhiRecompute};
constexpr const char* kNames[] = {"selection_only", "moment_mean", "moment_rank8",
                                  "moment_full",    "phi_stored8", "phi_recompute"};

struct Run {
  gpu::DeviceInfo device;
  gpu::Stream stream;
  int rounds;
  CopySpeeds speeds;
  Figures& figures;

  Result<Spread> Step(LayerStep& step, Completion completion) const {
    PREFIXD_ASSIGN(const Spread time, TimeGraph(stream, rounds, step.sets(), [&]() -> Status {
                     for (uint32_t set = 0; set < step.sets(); ++set) {
                       PREFIXD_TRY(step.Launch(completion, set, stream));
                     }
                     return {};
                   }));
    PREFIXD_TRY(step.Errors(stream));
    return time;
  }

  // Measures steps whose rows stay in pinned host memory, where the kernel gathers them.
  Status HostRows() const {
    PREFIXD_ASSIGN(LayerRows rows, LayerRows::Make(131072, Where::kHost, stream));
    for (const uint32_t k : {1311u, 4096u}) {
      PREFIXD_ASSIGN(LayerStep step, LayerStep::Make(rows, k, 16, device, stream));
      Spread alone;
      for (size_t i = 0; i < std::size(kAll); ++i) {
        PREFIXD_ASSIGN(const Spread time, Step(step, kAll[i]));
        if (i == 0) alone = time;
        const std::string name = "host_rows_k" + std::to_string(k) + "_" + std::string(kNames[i]);
        figures.Add(name, "us", 1e-6, time);
        if (i > 0) figures.AddRatio(name + "_overhead", time.median / alone.median - 1);
      }
      const double bytes = static_cast<double>(step.row_bytes());
      figures.AddRatio("gather_link_fraction_k" + std::to_string(k),
                       bytes / alone.median / speeds.link.median);
    }
    return {};
  }

  // Times exact attention of one token's queries over all rows, which lie on the device.
  Result<Spread> Exact(const LayerRows& rows, const float* queries) const {
    gpu::ExactShape shape;
    shape.n_groups = kKvHeads;
    shape.row = kRow;
    shape.layer = kLayer;
    shape.max_queries = kGroup;
    shape.max_rows = rows.n_tokens;
    PREFIXD_ASSIGN(const gpu::ExactPlan plan, gpu::PlanExact(shape, device));
    std::vector<gpu::ExactSource> sources(kKvHeads);
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      sources[h].queries = queries + size_t{h} * kGroup * kDim;
      sources[h].n_queries = kGroup;
      sources[h].count = rows.n_tokens;
      sources[h].rows = rows.Head(h);
      sources[h].row_stride = kRow.bytes();
    }
    const size_t source_bytes = sources.size() * sizeof(sources[0]);
    PREFIXD_ASSIGN(gpu::DeviceBuffer packed, gpu::DeviceBuffer::Allocate(source_bytes));
    PREFIXD_TRY(gpu::CopyToDevice(packed.data(), sources.data(), source_bytes, stream));
    PREFIXD_TRY(gpu::Synchronize(stream));
    gpu::ExactArgs args;
    args.sources = packed.as<const gpu::ExactSource>();
    PREFIXD_ASSIGN(const auto memory, gpu::internal::AllocateFor(plan, args));
    return TimeGraph(stream, rounds, 1, [&] { return gpu::LaunchExact(plan, args, stream); });
  }

  Status DeviceRows(uint32_t n_tokens, double* fixed_k) const {
    PREFIXD_ASSIGN(LayerRows rows, LayerRows::Make(n_tokens, Where::kDevice, stream));
    const std::string at = "_" + std::to_string(n_tokens / 1024) + "k";
    PREFIXD_ASSIGN(LayerStep fixed, LayerStep::Make(rows, 1024, 32, device, stream));
    PREFIXD_ASSIGN(LayerStep percent, LayerStep::Make(rows, n_tokens / 100, 16, device, stream));
    PREFIXD_ASSIGN(const Spread fixed_time, Step(fixed, Completion::kRank8));
    PREFIXD_ASSIGN(const Spread percent_time, Step(percent, Completion::kRank8));
    PREFIXD_ASSIGN(const Spread exact, Exact(rows, percent.queries()));
    *fixed_k = fixed_time.median;
    const double bytes = static_cast<double>(kKvHeads) * n_tokens * kRow.bytes();
    const double roofline = bytes / speeds.device.median;
    figures.Add("device_rows_step_k1024" + at, "us", 1e-6, fixed_time);
    figures.Add("device_rows_step_1pct" + at, "us", 1e-6, percent_time);
    figures.Add("device_rows_exact" + at, "us", 1e-6, exact,
                "roofline " + std::to_string(roofline * 1e6) + " us");
    figures.AddRatio("given_set_speedup" + at + "_own_pass", exact.median / percent_time.median);
    figures.AddRatio("given_set_speedup" + at, roofline / percent_time.median);
    figures.AddRatio("exact_bandwidth_fraction" + at, roofline / exact.median);
    return {};
  }
};

Status Measure(const GpuBenchOptions& options, const gpu::DeviceInfo& device, Figures& figures) {
  PREFIXD_TRY(gpu::UseDevice(device.ordinal));
  PREFIXD_ASSIGN(gpu::OwnedStream stream, gpu::OwnedStream::Create());
  PREFIXD_ASSIGN(const CopySpeeds speeds, MeasureCopies(stream.get(), options.rounds));
  figures.Add("link_host_to_device", "GB/s", 1e9, speeds.link);
  figures.Add("device_memory", "GB/s", 1e9, speeds.device);
  const Run run{device, stream.get(), options.rounds, speeds, figures};
  PREFIXD_TRY(run.HostRows());
  double at_16k = 0, at_1m = 0;
  for (const uint32_t n_tokens : {16384u, 131072u, 1048576u}) {
    if (n_tokens > options.max_tokens) continue;
    double fixed = 0;
    const Status measured = run.DeviceRows(n_tokens, &fixed);
    if (!measured.ok() && measured.error().code == Code::kResourceExhausted) {
      figures.Skip(std::to_string(n_tokens) + " tokens: " + measured.error().message);
      continue;
    }
    PREFIXD_TRY(measured);
    if (n_tokens == 16384) at_16k = fixed;
    if (n_tokens == 1048576) at_1m = fixed;
  }
  if (at_16k > 0 && at_1m > 0) figures.AddRatio("given_set_growth_16k_1m", at_1m / at_16k);
  return {};
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  return prefixd::bench::GpuBenchMain(argc, argv, "gpu_step", prefixd::bench::Measure);
}
