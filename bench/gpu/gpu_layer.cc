#include "bench/gpu/gpu_layer.h"

#include <cmath>
#include <random>
#include <utility>

#include "attention/rows/rows.h"
#include "gpu/device/host_image.h"
#include "gpu/device/upload.h"
#include "prefixd/gpu/phi_pack.h"

namespace prefixd::bench {
namespace {

using gpu::internal::HostImage;

std::vector<float> Normals(std::mt19937_64& rng, size_t n, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> x(n);
  for (float& v : x) v = normal(rng);
  return x;
}

void FillRows(std::byte* out, size_t bytes) {
  std::mt19937_64 rng(1);
  std::vector<uint16_t> table(1 << 16);
  for (uint16_t& x : table) x = FloatToBf16(std::normal_distribution<float>()(rng));
  uint64_t state = 1;
  for (size_t i = 0; i < bytes; i += 2) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(out + i, &table[state >> 48], 2);
  }
}

const uint32_t* Packed(std::mt19937_64& rng, HostImage& image) {
  const std::vector<float> w = Normals(rng, size_t{kDim} * kDim, 0.05f);
  return image.AddMade<uint32_t>(gpu::PackedWords(kDim, kDim), [&](std::span<uint32_t> out) {
    gpu::PackWeights(w, kDim, kDim, out);
  });
}

// Makes a summary of each kind for one KV head; contents are random, because only the time matters.
std::vector<gpu::DeviceSummary> Summaries(std::mt19937_64& rng, uint32_t mid_count,
                                          HostImage& image) {
  const auto floats = [&](size_t n, float scale, float mean = 0) {
    std::vector<float> x = Normals(rng, n, scale);
    for (float& v : x) v += mean;
    return image.Add<float>(x);
  };
  gpu::DeviceSummary none;
  none.mid_count = mid_count;
  gpu::DeviceSummary mean = none;
  mean.estimator = EstimatorKind::kMoment;
  mean.mean_key = floats(kDim, 0.1f);
  mean.key_m2 = floats(kDim, 0, static_cast<float>(mid_count));
  mean.mean_value = floats(kDim, 0.1f);
  gpu::DeviceSummary rank8 = mean;
  rank8.cross_rank = 8;
  rank8.key_factor = floats(size_t{kDim} * 8, 1);
  rank8.value_factor = floats(size_t{8} * kDim, 1);
  gpu::DeviceSummary cross = mean;
  cross.cross = floats(size_t{kDim} * kDim, 1);

  gpu::DeviceSummary phi = none;
  phi.estimator = EstimatorKind::kPhi;
  phi.phi_m = floats(kPhiDim, 0.1f, 2);
  phi.phi_u = floats(kPhiDim, 0, static_cast<float>(mid_count));
  phi.phi_t = floats(size_t{kPhiDim} * kDim, 1);
  std::vector<gpu::DeviceQueryMap> phi_q(kGroup);
  for (gpu::DeviceQueryMap& map : phi_q) {
    map = {kDim, kDim, kPhiDim, 0.5f};
    for (const float** w : {&map.w_in, &map.w1, &map.w2, &map.w_out}) {
      *w = floats(size_t{kDim} * kDim, 0.05f);
    }
    for (const float** b : {&map.b_in, &map.b1, &map.b2, &map.b_out}) *b = floats(kDim, 0.05f);
  }
  phi.phi_q = image.Add<gpu::DeviceQueryMap>(phi_q);
  gpu::DeviceSummary stored = phi;
  stored.feature_m = phi.phi_m;
  stored.feature_chunks = 1;
  gpu::DeviceKeyMap phi_k{kDim, kDim, kPhiDim, 0.5f};
  for (const uint32_t** w : {&phi_k.w_in, &phi_k.w1, &phi_k.w2, &phi_k.w_out}) {
    *w = Packed(rng, image);
  }
  for (const float** b : {&phi_k.b_in, &phi_k.b1, &phi_k.b2, &phi_k.b_out}) {
    *b = floats(kDim, 0.05f);
  }
  phi.phi_k = image.Add(std::span<const gpu::DeviceKeyMap>(&phi_k, 1));
  return {none, mean, rank8, cross, stored, phi};
}

struct Image {
  gpu::BatchStepArgs args;
  std::vector<const gpu::DeviceRow*> addresses;
  std::vector<const void* const*> feature_addresses;
  std::vector<const gpu::DeviceSummary*> summaries;
};

Image Pack(const LayerRows& rows, uint32_t k, uint32_t sets, const std::byte* features,
           HostImage& image) {
  std::mt19937_64 rng(2);
  Image out;
  out.args.queries = image.Add<float>(Normals(rng, size_t{kKvHeads} * kGroup * kDim, 1));
  const uint32_t n = k + kAnchors, mid = rows.n_tokens - kAnchors;
  std::vector<uint32_t> offsets, anchors(kKvHeads, kAnchors);
  for (uint32_t h = 0; h <= kKvHeads; ++h) offsets.push_back(h * n);
  out.args.row_offsets = image.Add<uint32_t>(offsets);
  out.args.anchor_counts = image.Add<uint32_t>(anchors);
  for (uint32_t set = 0; set < sets; ++set) {
    std::vector<gpu::DeviceRow> addresses;
    std::vector<const void*> codes;
    for (uint32_t h = 0; h < kKvHeads; ++h) {
      for (uint32_t i = 0; i < n; ++i) {
        const uint32_t token = i < 4          ? i
                               : i < kAnchors ? rows.n_tokens - kAnchors + i
                                              : 4 + static_cast<uint32_t>(rng() % mid);
        const std::byte* row = rows.Row(h, token);
        addresses.push_back({row, row + kRow.key_bytes()});
        codes.push_back(features + (size_t{h} * rows.n_tokens + token) * kPhiDim);
      }
    }
    out.addresses.push_back(image.Add<gpu::DeviceRow>(addresses));
    out.feature_addresses.push_back(image.Add<const void*>(codes));
  }
  std::vector<std::vector<gpu::DeviceSummary>> of_head;
  for (uint32_t h = 0; h < kKvHeads; ++h) of_head.push_back(Summaries(rng, mid, image));
  for (size_t kind = 0; kind < of_head[0].size(); ++kind) {
    std::vector<gpu::DeviceSummary> all;
    for (const auto& head : of_head) all.push_back(head[kind]);
    out.summaries.push_back(image.Add<gpu::DeviceSummary>(all));
  }
  return out;
}

}  // namespace

Result<LayerRows> LayerRows::Make(uint32_t n_tokens, Where where, gpu::Stream stream) {
  LayerRows rows;
  rows.n_tokens = n_tokens;
  const size_t bytes = size_t{kKvHeads} * n_tokens * kRow.bytes();
  PREFIXD_ASSIGN(rows.host, gpu::PinnedBuffer::Allocate(bytes));
  FillRows(rows.host.data(), bytes);
  if (where == Where::kHost) return rows;
  PREFIXD_ASSIGN(rows.device, gpu::DeviceBuffer::Allocate(bytes));
  PREFIXD_TRY(gpu::CopyToDevice(rows.device.data(), rows.host.data(), bytes, stream));
  PREFIXD_TRY(gpu::Synchronize(stream));
  rows.host = gpu::PinnedBuffer();
  return rows;
}

Result<LayerStep> LayerStep::Make(const LayerRows& rows, uint32_t k, uint32_t sets,
                                  const gpu::DeviceInfo& device, gpu::Stream stream) {
  LayerStep step;
  step.k_ = k;
  gpu::StepShape shape;
  shape.n_groups = kKvHeads;
  shape.group = kGroup;
  shape.row = kRow;
  shape.layer = kLayer;
  shape.max_rows = k + kAnchors;
  PREFIXD_ASSIGN(step.plan_, gpu::PlanStep(shape, device));
  shape.d_phi = kPhiDim;
  shape.d_emb = kDim;
  PREFIXD_ASSIGN(step.phi_plan_, gpu::PlanStep(shape, device));

  const size_t feature_bytes = size_t{kKvHeads} * rows.n_tokens * kPhiDim;
  PREFIXD_ASSIGN(step.features_, gpu::PinnedBuffer::Allocate(feature_bytes));
  FillRows(step.features_.data(), feature_bytes);
  Image packed;
  PREFIXD_ASSIGN(auto input, gpu::internal::UploadImage(
                                 [&](HostImage& image) {
                                   packed = Pack(rows, k, sets, step.features_.data(), image);
                                 },
                                 stream));
  step.memory_ = std::move(input.memory);
  PREFIXD_TRY(gpu::Synchronize(stream));
  step.args_ = packed.args;
  step.addresses_ = std::move(packed.addresses);
  step.feature_addresses_ = std::move(packed.feature_addresses);
  step.summaries_ = std::move(packed.summaries);

  const size_t heads = size_t{kKvHeads} * kGroup;
  PREFIXD_ASSIGN(step.output_,
                 gpu::DeviceBuffer::Allocate((heads * (kDim + 2) + kKvHeads) * sizeof(float)));
  PREFIXD_ASSIGN(step.workspace_, gpu::DeviceBuffer::Allocate(step.phi_plan_.workspace_bytes));
  step.args_.y = step.output_.as<float>();
  step.args_.lse = step.args_.y + heads * kDim;
  step.args_.rho_z = step.args_.lse + heads;
  step.args_.errors = reinterpret_cast<uint32_t*>(step.args_.rho_z + heads);
  step.args_.workspace = step.workspace_.data();
  step.args_.workspace_bytes = step.workspace_.bytes();
  return step;
}

Status LayerStep::Launch(Completion completion, uint32_t set, gpu::Stream stream) {
  const bool phi = completion == Completion::kPhiStored || completion == Completion::kPhiRecompute;
  args_.row_addresses = addresses_[set];
  args_.features = feature_addresses_[set];
  args_.summaries = summaries_[static_cast<size_t>(completion)];
  return gpu::LaunchStep(phi ? phi_plan_ : plan_, args_, stream);
}

Status LayerStep::Errors(gpu::Stream stream) const {
  std::vector<uint32_t> words(kKvHeads);
  PREFIXD_TRY(gpu::CopyToHost(words.data(), reinterpret_cast<const std::byte*>(args_.errors),
                              words.size() * sizeof(uint32_t), stream));
  PREFIXD_TRY(gpu::Synchronize(stream));
  for (const uint32_t word : words) PREFIXD_TRY(gpu::GroupError(word, kAnchors));
  return {};
}

}  // namespace prefixd::bench
