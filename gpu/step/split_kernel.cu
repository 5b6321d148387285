// Runs kernel 2 of a step: one flash-decoding pass over the exact rows, split over blocks. A block
// stages kTile rows at a time in shared memory, once for all G heads and during the computation on
// the tile before, and keeps for its split the running softmax of E and the sums over retrieved
// rows that correct the remainder (StepLayout's Partial).
#include "gpu/step/phi_tile.cuh"
#include "gpu/step/row_tile.cuh"

namespace prefixd::gpu::internal {
namespace {

// The value stage divides the accumulators so: a thread owns one value column for kHeads heads.
__host__ __device__ constexpr uint32_t ColumnLanes(uint32_t value_dim) {
  return value_dim <= 64 ? 64 : value_dim <= 128 ? 128 : 256;
}
__host__ __device__ constexpr uint32_t HeadsPerThread(uint32_t group, uint32_t value_dim) {
  const uint32_t slices = kThreads / ColumnLanes(value_dim);
  return (group + slices - 1) / slices;
}

// Running is the running softmax of one head: the maximum is known to all kTile threads that serve
// it, the sums are over the thread's own rows.
struct Running {
  float m = -INFINITY;   // largest score so far
  float z = 0;           // sum exp(s - m)
  float b0 = 0, b2 = 0;  // sum b, sum b^2
};

__device__ float HalfWarpSum(float x) {
  for (int offset = kTile / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kFullMask, x, offset, kTile);
  }
  return x;
}
__device__ float HalfWarpMax(float x) {
  for (int offset = kTile / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullMask, x, offset, kTile));
  }
  return x;
}

struct Block {
  const StepParams& p;
  const DeviceSummary& summary;
  const SplitShared at;
  float* shared;
  uint32_t group;
  GroupRows rows;

  __device__ float* k() const { return shared + at.k; }
  __device__ float* v() const { return shared + at.v; }
  __device__ double* q() const { return reinterpret_cast<double*>(shared + at.q); }
  __device__ float* weight() const { return shared + at.weight; }
  __device__ float* second() const { return shared + at.second; }
  __device__ RowTiles tiles() const {
    return {p,
            rows,
            group,
            reinterpret_cast<DeviceRow*>(shared + at.address),
            reinterpret_cast<std::byte*>(shared + at.raw),
            k(),
            v()};
  }
};

// Stages the queries and the estimator's part of the summary. Ends without a barrier.
__device__ void StageGroup(const Block& b, const StepLayout& layout) {
  const StepParams& p = b.p;
  const uint32_t dh = p.shape.row.key_dim, dv = p.shape.row.value_dim, G = p.shape.group;
  const bool phi = b.summary.estimator == EstimatorKind::kPhi;
  const bool moment = b.summary.estimator == EstimatorKind::kMoment;
  for (uint32_t i = threadIdx.x; i < G * dh; i += kThreads) {
    b.q()[i / dh * Pad4(dh) + i % dh] = p.args.queries[size_t{b.group} * G * dh + i];
  }
  for (uint32_t j = threadIdx.x; j < dh; j += kThreads) {
    b.shared[b.at.mean_key + j] = HasMeanKey(b.summary) ? b.summary.mean_key[j] : 0.0f;
  }
  for (uint32_t d = threadIdx.x; d < dv; d += kThreads) {
    b.shared[b.at.value_centre + d] = moment ? b.summary.mean_value[d] : 0.0f;
  }
  if (!phi) return;
  const uint32_t n = p.shape.d_phi;
  const float* workspace = static_cast<const float*>(p.args.workspace);
  for (uint32_t i = threadIdx.x; i < G * n; i += kThreads) {
    b.shared[b.at.p + i / n * Pad4(n) + i % n] =
        workspace[layout.head_at(b.group, i / n) + layout.p_at() + i % n];
  }
  for (uint32_t f = threadIdx.x; f < n; f += kThreads) {
    b.shared[b.at.m + f] = b.summary.phi_m[f];
  }
}

// Checks rows [begin, begin + n): a row whose cluster the summary does not have would be left in
// the remainder.
__device__ void CheckClusters(const Block& b, uint32_t begin, uint32_t n) {
  const uint32_t row = begin + threadIdx.x;
  if (threadIdx.x >= n || row < b.rows.anchors) return;
  if (b.p.args.row_clusters[b.rows.first + row] >= b.summary.n_clusters) {
    Fault(b.p.args.errors, b.group, GroupFault::kCluster, row);
  }
}

// Decodes a stored feature to exp(log phi - m of its chunk)
// (attention/estimators/stored_features.h).
__device__ float DecodeFeature(const FeatureFormat& format, const void* codes, uint32_t f) {
  const bool wide = format.bits == 16;
  const uint32_t code =
      wide ? static_cast<const uint16_t*>(codes)[f] : static_cast<const uint8_t*>(codes)[f];
  const float steps = wide ? 65535.0f : 255.0f;
  if (format.scale == FeatureScale::kLinear) return static_cast<float>(code) * (1.0f / steps);
  const float nats = (wide ? 64.0f : 16.0f) / (steps - 1.0f);
  return code == 0 ? 0.0f : expf((static_cast<float>(code) - steps) * nats);
}

// Computes feature[r][f] = exp(log phi_k(k_r)[f] - m[f]) of the tile's retrieved rows from the
// stored features; 0 for other rows.
__device__ void ReadFeatures(const Block& b, uint32_t begin, uint32_t n) {
  const BatchStepArgs& args = b.p.args;
  const uint32_t d_phi = b.p.shape.d_phi;
  for (uint32_t i = threadIdx.x; i < n * d_phi; i += kThreads) {
    const uint32_t r = i / d_phi, f = i % d_phi;
    const size_t row = b.rows.first + begin + r;
    float feature = 0;
    if (begin + r >= b.rows.anchors) {
      const void* codes = args.features[row];
      const uint32_t chunk = args.feature_chunk ? args.feature_chunk[row] : 0;
      const bool readable =
          codes && reinterpret_cast<uintptr_t>(codes) % (b.summary.feature_format.bits / 8) == 0 &&
          chunk < b.summary.feature_chunks;
      if (readable) {
        const float m = b.shared[b.at.m + f];
        const float base = b.summary.feature_m[size_t{chunk} * d_phi + f];
        // A chunk without the feature has no weight in it, whatever its base.
        if (m != -INFINITY && base != -INFINITY) {
          feature = DecodeFeature(b.summary.feature_format, codes, f) * expf(base - m);
        }
      } else if (f == 0) {
        Fault(args.errors, b.group, GroupFault::kAddress, begin + r);
      }
    }
    b.shared[b.at.feature + r * Pad4(d_phi) + f] = feature;
  }
}

// Recomputes the same features from the keys.
__device__ void RecomputeFeatures(const Block& b, uint32_t n) {
  const uint32_t d_phi = b.p.shape.d_phi;
  const size_t ld = Pad4(d_phi);
  float* feature = b.shared + b.at.feature;
  const PhiScratch scratch{b.shared + b.at.first, b.shared + b.at.next, b.shared + b.at.embed};
  LogPhiTile(*b.summary.phi_k, b.k(), Pad4(b.p.shape.row.key_dim), scratch, feature, ld);
  for (uint32_t i = threadIdx.x; i < n * d_phi; i += kThreads) {
    const uint32_t r = i / d_phi, f = i % d_phi;
    const float m = b.shared[b.at.m + f];
    feature[r * ld + f] = m == -INFINITY ? 0.0f : expf(feature[r * ld + f] - m);
  }
}

// Computes second[g][r] = z~_r = sum_f p_g[f] exp(log phi_k(k_r)[f] - m[f]), for all rows of the
// tile. Returns the sum over its retrieved rows of feature threadIdx.x, where the form needs it.
__device__ float PhiWeights(const Block& b, uint32_t begin, uint32_t n) {
  if (b.summary.phi_k) {
    RecomputeFeatures(b, n);
  } else {
    ReadFeatures(b, begin, n);
  }
  __syncthreads();
  const uint32_t d_phi = b.p.shape.d_phi;
  const size_t ld = Pad4(d_phi);
  const float* feature = b.shared + b.at.feature;
  DotTile(b.shared + b.at.p, ld, b.p.shape.group, feature, ld, d_phi, 1.0f, b.second());
  float sum = 0;
  if (b.summary.phi_form == PhiForm::kPerFeature && threadIdx.x < d_phi) {
    const uint32_t first = begin >= b.rows.anchors ? 0 : b.rows.anchors - begin;
    for (uint32_t r = first; r < n; ++r) sum += feature[r * ld + threadIdx.x];
  }
  return sum;
}

// Turns scores (in weight) into exp(s - m) with the running maximum m, and second into b. One
// thread per (head, row).
__device__ void SoftmaxTile(const Block& b, uint32_t begin, uint32_t n, float mean_score,
                            Running& run) {
  const uint32_t g = threadIdx.x / kTile, r = threadIdx.x % kTile;
  if (g / (kWarp / kTile) * (kWarp / kTile) >= b.p.shape.group) return;  // the same for a warp
  const bool valid = g < b.p.shape.group && r < n;
  const LayerGeometry& layer = b.p.shape.layer;
  float s = -INFINITY;
  if (valid) {
    s = b.weight()[threadIdx.x];
    if (layer.softcap > 0) s = layer.softcap * tanhf(s / layer.softcap);
  }
  float second = 0;
  if (valid && begin + r >= b.rows.anchors) {
    if (b.summary.estimator == EstimatorKind::kPhi) second = b.second()[threadIdx.x];
    if (b.summary.estimator == EstimatorKind::kMoment) second = s - mean_score;
  }
  const float m = fmaxf(run.m, HalfWarpMax(s));
  const float weight = valid ? expf(s - m) : 0.0f;
  const float rescale = run.m == -INFINITY ? 0.0f : expf(run.m - m);
  run.z = fmaf(run.z, rescale, weight);
  run.b0 += second;
  run.b2 = fmaf(second, second, run.b2);
  run.m = m;
  if (valid && !Finite(s)) Fault(b.p.args.errors, b.group, GroupFault::kOverflow, g);
  b.weight()[threadIdx.x] = weight;
  b.second()[threadIdx.x] = second;
  if (r == 0) b.shared[b.at.rescale + g] = rescale;
}

// Returns sum + sum_r weight[r] (v[r] - centre).
__device__ float WeightedSum(const float* weight, const float (&v)[kTile], float centre,
                             float sum) {
  const auto* fours = reinterpret_cast<const float4*>(weight);
#pragma unroll
  for (uint32_t r = 0; r < kTile; r += 4) {
    const float4 four = fours[r / 4];
    sum = fmaf(four.x, v[r] - centre, sum);
    sum = fmaf(four.y, v[r + 1] - centre, sum);
    sum = fmaf(four.z, v[r + 2] - centre, sum);
    sum = fmaf(four.w, v[r + 3] - centre, sum);
  }
  return sum;
}

// Grid: x = group, y = split.
template <uint32_t kHeads>
__global__ void __launch_bounds__(kThreads, 2) SplitKernel(const __grid_constant__ StepParams p) {
  const uint32_t group = blockIdx.x;
  const DeviceSummary& summary = p.args.summaries[group];
  const Block b{p, summary, SplitShared(p.shape), DynamicShared(), group, RowsOf(p, group)};
  const uint32_t G = p.shape.group, dh = p.shape.row.key_dim, dv = p.shape.row.value_dim;
  // Both returns are the same for all threads of the block. The query kernel reported a summary
  // that does not fit, for whichever head; here the kernel must only not follow its pointers.
  if (!b.rows.fits) {
    if (threadIdx.x == 0) Fault(p.args.errors, group, GroupFault::kShape, 0);
    return;
  }
  if (p.args.errors[group] >> kFaultShift == static_cast<uint32_t>(GroupFault::kSummary)) return;
  const RowSplit range = SplitRows(b.rows.count, p.n_splits, blockIdx.y, kTile);
  if (range.begin == range.end) return;  // the merge kernel skips this split too

  const bool phi = summary.estimator == EstimatorKind::kPhi;
  const bool moment = summary.estimator == EstimatorKind::kMoment;
  const bool centred = HasMeanKey(summary), keeps = UsesClusters(summary.estimator);
  const bool estimated = summary.estimator != EstimatorKind::kNone;
  const StepLayout layout(p.shape, p.n_splits);
  float* workspace = static_cast<float*>(p.args.workspace);
  const uint32_t column = threadIdx.x % ColumnLanes(dv);
  const uint32_t head0 = threadIdx.x / ColumnLanes(dv) * kHeads;
  const float mean_score =
      moment && threadIdx.x / kTile < G ? workspace[layout.head_at(group, threadIdx.x / kTile)] : 0;
  float sum_n[kHeads] = {}, sum_b1[kHeads] = {};  // for this thread's column and heads
  float key1 = 0, key2 = 0, value1 = 0;           // for column threadIdx.x
  float feature = 0;                              // for feature threadIdx.x
  Running run;                                    // for head threadIdx.x / kTile

  const RowTiles tiles = b.tiles();
  const auto rows_at = [&](uint32_t at) { return at < range.end ? min(kTile, range.end - at) : 0; };
  DeviceRow ahead = tiles.LookUp(range.begin, rows_at(range.begin));
  StageGroup(b, layout);
  tiles.Check(ahead, range.begin, rows_at(range.begin));
  ahead = tiles.LookUp(range.begin + kTile, rows_at(range.begin + kTile));
  __syncthreads();
  tiles.Fetch(rows_at(range.begin));
  for (uint32_t begin = range.begin; begin < range.end; begin += kTile) {
    const uint32_t n = rows_at(begin), next = begin + kTile;
    WaitForCopies();
    __syncthreads();  // the former tile has been read, and its addresses are free
    tiles.Check(ahead, next, rows_at(next));
    ahead = tiles.LookUp(next + kTile, rows_at(next + kTile));
    if (keeps) CheckClusters(b, begin, n);
    tiles.Decode(begin, n, keeps ? workspace + layout.kept_at(group, begin) : nullptr);
    __syncthreads();
    tiles.Fetch(rows_at(next));  // continues while this tile is computed
    DotTile(b.q(), Pad4(dh), G, b.k(), Pad4(dh), dh, double{p.shape.layer.scale}, b.weight());
    if (phi && begin + n > b.rows.anchors) feature += PhiWeights(b, begin, n);
    __syncthreads();
    SoftmaxTile(b, begin, n, mean_score, run);
    __syncthreads();

    const uint32_t first = begin >= b.rows.anchors ? 0 : min(n, b.rows.anchors - begin);
    if (column < dv) {
      float v[kTile];
#pragma unroll
      for (uint32_t r = 0; r < kTile; ++r) v[r] = b.v()[r * Pad4(dv) + column];
      const float centre = b.shared[b.at.value_centre + column];
      if (centred && head0 == 0) {
#pragma unroll
        for (uint32_t r = 0; r < kTile; ++r) value1 += r >= first && r < n ? v[r] - centre : 0.0f;
      }
#pragma unroll
      for (uint32_t h = 0; h < kHeads; ++h) {
        const uint32_t head = head0 + h;
        if (head >= G) break;
        sum_n[h] =
            WeightedSum(b.weight() + head * kTile, v, 0, sum_n[h] * b.shared[b.at.rescale + head]);
        if (estimated) sum_b1[h] = WeightedSum(b.second() + head * kTile, v, centre, sum_b1[h]);
      }
    }
    if (centred && threadIdx.x < dh) {
      const float centre = b.shared[b.at.mean_key + threadIdx.x];
#pragma unroll
      for (uint32_t r = 0; r < kTile; ++r) {
        const float k = b.k()[r * Pad4(dh) + threadIdx.x];
        const float d = r >= first && r < n ? k - centre : 0.0f;
        key1 += d;
        key2 = fmaf(d, d, key2);
      }
    }
  }

  float* out = workspace + layout.partial_at(group, blockIdx.y);
  const uint32_t g = threadIdx.x / kTile;
  const float z = HalfWarpSum(run.z), b0 = HalfWarpSum(run.b0), b2 = HalfWarpSum(run.b2);
  if (threadIdx.x % kTile == 0 && g < G) {
    out[layout.m_at() + g] = run.m;
    out[layout.z_at() + g] = z;
    out[layout.b0_at() + g] = b0;
    out[layout.b2_at() + g] = b2;
  }
#pragma unroll
  for (uint32_t h = 0; h < kHeads; ++h) {
    if (column < dv && head0 + h < G) {
      out[layout.n_at() + size_t{head0 + h} * dv + column] = sum_n[h];
      out[layout.b1_at() + size_t{head0 + h} * dv + column] = sum_b1[h];
    }
  }
  if (centred) {
    if (threadIdx.x < dh) {
      out[layout.key1_at() + threadIdx.x] = key1;
      out[layout.key2_at() + threadIdx.x] = key2;
    }
    if (threadIdx.x < dv) out[layout.value1_at() + threadIdx.x] = value1;
  }
  if (phi && threadIdx.x < p.shape.d_phi) out[layout.feature_at() + threadIdx.x] = feature;
}

}  // namespace

int LaunchSplitKernel(const StepParams& params, const StepPlan& plan, Stream stream) {
  const uint32_t heads = HeadsPerThread(params.shape.group, params.shape.row.value_dim);
  const dim3 grid(params.shape.n_groups, params.n_splits);
  const auto launch = [&](auto* kernel) {
    return Launch(kernel, grid, plan.shared_bytes, plan.shared_limit, params, stream);
  };
  if (heads <= 1) return launch(SplitKernel<1>);
  if (heads <= 2) return launch(SplitKernel<2>);
  if (heads <= 4) return launch(SplitKernel<4>);
  if (heads <= 8) return launch(SplitKernel<8>);
  return launch(SplitKernel<16>);
}

}  // namespace prefixd::gpu::internal
