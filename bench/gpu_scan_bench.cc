// Measures the scans on CUDA: exhaustive Top-K over keys and over compact codes, and exact
// attention of a block of suffix queries. The data is one layer of an 8B model with rows on the
// device. Each figure has its roofline: the bytes it must read over the bandwidth measured in the
// same run.
//
// Without a device it prints that and measures nothing (exit status 3).
#include <algorithm>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "attention/rows/rows.h"
#include "bench/gpu/gpu_layer.h"
#include "bench/gpu/gpu_main.h"
#include "bench/gpu/gpu_timing.h"
#include "bench/support/figures.h"
#include "gpu/device/host_image.h"
#include "gpu/device/launch_memory.h"
#include "gpu/device/upload.h"
#include "index/codes/block_codes.h"
#include "prefixd/gpu/exact.h"
#include "prefixd/gpu/topk.h"

namespace prefixd::bench {
namespace {

using gpu::internal::HostImage;

std::vector<float> Queries(size_t rows) {
  std::mt19937_64 rng(3);
  std::normal_distribution<float> normal;
  std::vector<float> q(rows * kDim);
  for (float& x : q) x = normal(rng);
  return q;
}

struct Run {
  gpu::DeviceInfo device;
  gpu::Stream stream;
  int rounds;
  CopySpeeds speeds;
  Figures& figures;

  void Report(const std::string& name, double bytes, Spread time) const {
    const double roofline = bytes / speeds.device.median;
    figures.Add(name, "us", 1e-6, time, "roofline " + std::to_string(roofline * 1e6) + " us");
    figures.AddRatio(name + "_bandwidth_fraction", roofline / time.median);
  }

  // Holds codes in blocks, as they are stored. Their content does not change the time, so all heads
  // have the same in different memory; the book is along the axes with one digit a dimension.
  struct Codes {
    gpu::DeviceBuffer memory;
    BlockLayout layout{kDim, 0};

    static Result<Codes> Make(size_t n_tokens, gpu::Stream stream) {
      Codes codes;
      codes.layout = BlockLayout(kDim, n_tokens);
      PREFIXD_ASSIGN(codes.memory, gpu::DeviceBuffer::Allocate(kKvHeads * codes.layout.end));
      std::vector<std::byte> arrays(codes.layout.end, std::byte{0x1b});
      auto* tokens = reinterpret_cast<uint16_t*>(arrays.data() + codes.layout.tokens);
      for (size_t i = 0; i < codes.layout.n_blocks * kCodeBlockKeys; ++i) {
        // Neighbours in a block may be any keys of the window.
        tokens[i] = i < n_tokens ? static_cast<uint16_t>(i * 389 % kWindowKeys) : kNoKey;
      }
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        PREFIXD_TRY(gpu::CopyToDevice(codes.memory.data() + h * codes.layout.end, arrays.data(),
                                      arrays.size(), stream));
      }
      PREFIXD_TRY(gpu::Synchronize(stream));
      return codes;
    }
    gpu::DeviceBlockCodes Head(uint32_t h, const gpu::DeviceCodeBook* book) const {
      const std::byte* at = memory.data() + h * layout.end;
      return {book, at, at + layout.means, reinterpret_cast<const uint16_t*>(at + layout.tokens),
              static_cast<uint32_t>(layout.n_keys)};
    }
    // Returns the bytes that a scan reads per head.
    size_t bytes() const { return layout.end; }
  };

  Status TopK(const LayerRows& rows, bool codes) const {
    gpu::TopKShape shape;
    shape.n_groups = kKvHeads;
    shape.group = kGroup;
    shape.key_dim = kDim;
    shape.layer = kLayer;
    shape.codes = codes;
    shape.max_keys = rows.n_tokens;
    shape.max_k = std::min(rows.n_tokens / 100, gpu::kMaxTopK);
    PREFIXD_ASSIGN(const gpu::TopKPlan plan, gpu::PlanTopK(shape));
    PREFIXD_ASSIGN(const Codes of_keys, Codes::Make(codes ? rows.n_tokens : 0, stream));
    gpu::TopKArgs args;
    const auto pack = [&](HostImage& image) {
      args.queries = image.Add<float>(Queries(kKvHeads * kGroup));
      std::vector<uint16_t> directions(size_t{kDim} * kDim);
      for (uint32_t i = 0; i < kDim; ++i) directions[size_t{i} * kDim + i] = FloatToBf16(1);
      const std::vector<uint8_t> one_digit(kDim, 1);
      const gpu::DeviceCodeBook book{kDim,
                                     image.Add<float>(std::vector<float>(kDim)),
                                     image.Add<uint8_t>(one_digit),
                                     image.Add<uint8_t>(one_digit),
                                     image.Add<float>(std::vector<float>(kDim, 2.0f)),
                                     image.Add<uint16_t>(directions)};
      const gpu::DeviceCodeBook* packed = image.Add(std::span(&book, 1));
      std::vector<gpu::TopKSource> sources(kKvHeads);
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        sources[h].keys = rows.Head(h);
        sources[h].key_stride = kRow.bytes();
        if (codes) sources[h].codes = of_keys.Head(h, packed);
        sources[h].count = rows.n_tokens;
        sources[h].k = shape.max_k;
      }
      args.sources = image.Add<gpu::TopKSource>(sources);
    };
    PREFIXD_ASSIGN(const auto input, gpu::internal::UploadImage(pack, stream));
    PREFIXD_ASSIGN(const auto memory, gpu::internal::AllocateFor(plan, args));
    PREFIXD_ASSIGN(const Spread time, TimeGraph(stream, rounds, 1, [&] {
                     return gpu::LaunchTopK(plan, args, stream);
                   }));
    // Keys lie in rows; the scan skips the rows' values.
    const double bytes = codes ? static_cast<double>(kKvHeads * of_keys.bytes())
                               : static_cast<double>(kKvHeads) * rows.n_tokens * kRow.key_bytes();
    Report(std::string(codes ? "topk_codes_" : "topk_keys_") +
               std::to_string(rows.n_tokens / 1024) + "k",
           bytes, time);
    return {};
  }

  Status Suffix(const LayerRows& rows, uint32_t tokens) const {
    gpu::ExactShape shape;
    shape.n_groups = kKvHeads;
    shape.row = kRow;
    shape.layer = kLayer;
    shape.max_queries = tokens * kGroup;
    shape.max_rows = rows.n_tokens;
    PREFIXD_ASSIGN(const gpu::ExactPlan plan, gpu::PlanExact(shape, device));
    gpu::ExactArgs args;
    const auto pack = [&](HostImage& image) {
      const std::vector<float> queries = Queries(size_t{kKvHeads} * shape.max_queries);
      const float* packed = image.Add<float>(queries);
      std::vector<gpu::ExactSource> sources(kKvHeads);
      for (uint32_t h = 0; h < kKvHeads; ++h) {
        sources[h].queries = packed + size_t{h} * shape.max_queries * kDim;
        sources[h].n_queries = shape.max_queries;
        sources[h].count = rows.n_tokens;
        sources[h].rows = rows.Head(h);
        sources[h].row_stride = kRow.bytes();
      }
      args.sources = image.Add<gpu::ExactSource>(sources);
    };
    PREFIXD_ASSIGN(const auto input, gpu::internal::UploadImage(pack, stream));
    PREFIXD_ASSIGN(const auto memory, gpu::internal::AllocateFor(plan, args));
    PREFIXD_ASSIGN(const Spread time, TimeGraph(stream, rounds, 1, [&] {
                     return gpu::LaunchExact(plan, args, stream);
                   }));
    const std::string name = "suffix_" + std::to_string(tokens) + "_tokens_" +
                             std::to_string(rows.n_tokens / 1024) + "k";
    Report(name, static_cast<double>(kKvHeads) * rows.n_tokens * kRow.bytes(), time);
    const double flops = 4.0 * kKvHeads * shape.max_queries * rows.n_tokens * kDim;
    figures.AddRatio(name + "_tflops", flops / time.median * 1e-12);
    return {};
  }
};

Status Measure(const GpuBenchOptions& options, const gpu::DeviceInfo& device, Figures& figures) {
  PREFIXD_TRY(gpu::UseDevice(device.ordinal));
  PREFIXD_ASSIGN(gpu::OwnedStream stream, gpu::OwnedStream::Create());
  PREFIXD_ASSIGN(const CopySpeeds speeds, MeasureCopies(stream.get(), options.rounds));
  figures.Add("device_memory", "GB/s", 1e9, speeds.device);
  const Run run{device, stream.get(), options.rounds, speeds, figures};
  for (const uint32_t n_tokens : {16384u, 131072u, 1048576u}) {
    if (n_tokens > options.max_tokens) continue;
    PREFIXD_ASSIGN(LayerRows rows, LayerRows::Make(n_tokens, Where::kDevice, stream.get()));
    PREFIXD_TRY(run.TopK(rows, false));
    PREFIXD_TRY(run.TopK(rows, true));
    if (n_tokens > 131072) continue;
    for (const uint32_t tokens : {16u, 64u, 256u}) PREFIXD_TRY(run.Suffix(rows, tokens));
  }
  return {};
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  return prefixd::bench::GpuBenchMain(argc, argv, "gpu_scan", prefixd::bench::Measure);
}
