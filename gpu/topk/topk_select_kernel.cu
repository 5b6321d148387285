// Turns scores into a selection: ranks, radix selection of the k-th, and the ids in order.
#include "gpu/topk/topk_group.cuh"

namespace prefixd::gpu::internal {
namespace {

// A ScoreReader reads a stored score: float32, or a whole number of the codes.
struct ScoreReader {
  const uint32_t* score;
  CodeNumbers of = {};
  float softcap;
  bool codes;

  __device__ ScoreReader(const TopKParams& p, const TopKLayout& layout, uint32_t group,
                         uint32_t head)
      : score(Workspace(p) + layout.score_at(group, head)),
        softcap(p.shape.layer.softcap),
        codes(p.shape.codes) {
    if (!codes) return;
    of = *reinterpret_cast<const CodeNumbers*>(Workspace(p) + layout.code_at(group, head));
  }
  __device__ float operator()(uint32_t i) const {
    if (!codes) return __uint_as_float(score[i]);
    return CodeScore(of, softcap, reinterpret_cast<const int16_t*>(score)[i]);
  }
};

// Computes L of each head over the group's chunks into log_sum [kMaxGroup] in shared memory, one
// warp to a head; 0 where no score is finite. On return all threads see them.
__device__ void LogSums(const TopKParams& p, const TopKLayout& layout, uint32_t group,
                        const TopKGroup& of, float* log_sum) {
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t g = threadIdx.x / kWarp; g < p.shape.group; g += kWarps) {
    LogSum part;
#pragma unroll 4
    for (uint32_t c = of.first / kChunk + lane; c * kChunk < of.end; c += kWarp) {
      const uint32_t* at = Workspace(p) + layout.part_at(group, c, g);
      part.Merge(__uint_as_float(at[0]), __uint_as_float(at[1]));
    }
    const float max = WarpMax(part.max);
    const double sum =
        WarpSum(part.max == -INFINITY ? 0.0 : double{part.sum} * exp(double{part.max} - max));
    if (lane == 0) log_sum[g] = max == -INFINITY ? 0.0f : static_cast<float>(max + log(sum));
  }
  __syncthreads();
}

// A DigitCounter adds the digits of this thread's calls to a histogram in shared memory.
struct DigitCounter {
  uint32_t* bins;
  uint32_t digit;

  __device__ void Clear() const {
    for (uint32_t b = threadIdx.x; b < DigitBins(digit); b += kThreads) bins[b] = 0;
    __syncthreads();
  }
  __device__ void Add(uint32_t rank) const {
    atomicAdd(&bins[rank >> DigitShift(digit) & (DigitBins(digit) - 1)], 1u);
  }
  __device__ void AddTo(uint32_t* histogram) const {
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < DigitBins(digit); b += kThreads) {
      if (bins[b] > 0) atomicAdd(&histogram[b], bins[b]);
    }
  }
};

// Computes rank = max_g (s_g - L_g) of each key, as ordered bits, and the histogram of its first
// digit. A key whose score is not a number, or too large, ranks first. Grid: x = chunk, y = group.
__global__ void __launch_bounds__(kThreads) RankKernel(const __grid_constant__ TopKParams p) {
  __shared__ uint32_t bins[kBins];
  __shared__ float log_sum[kMaxGroup];
  const uint32_t group = blockIdx.y, G = p.shape.group;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  const auto [begin, end] = ChunkOf(of);
  if (begin >= end) return;  // the same for all threads of the block, here and below
  LogSums(p, layout, group, of, log_sum);
  const DigitCounter counter{bins, 0};
  counter.Clear();
  uint32_t* rank = Workspace(p) + layout.rank_at(group);
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
    float best = -INFINITY;
    for (uint32_t g = 0; g < G; ++g) {
      const float normalised = ScoreReader(p, layout, group, g)(i) - log_sum[g];
      best = normalised > best ? normalised : best;
      if (normalised != normalised) best = INFINITY;
    }
    rank[i] = OrderedBits(best);
    counter.Add(rank[i]);
  }
  counter.AddTo(Workspace(p) + layout.histogram_at(group, 0));
}

// Kth is the k-th largest rank as far as its digits are known: its first bits, and how many of the
// ranks that begin so are selected.
struct Kth {
  uint32_t bits = 0, wanted = 0;
};

// Finds the next digit of `kth`, by all threads: the bin that holds the wanted-th largest.
__device__ Kth NextDigit(const uint32_t* histogram, uint32_t digit, Kth kth) {
  __shared__ uint32_t found_bits, found_wanted;
  constexpr uint32_t kMost = kBins / kThreads;
  const uint32_t bins = DigitBins(digit), each = bins / kThreads;
  // Thread t has the t-th run of bins from the top.
  const uint32_t top = bins - threadIdx.x * each;
  uint32_t bin[kMost], own = 0;
#pragma unroll
  for (uint32_t i = 0; i < kMost; ++i) {
    bin[i] = i < each ? histogram[top - 1 - i] : 0;
    own += bin[i];
  }
  uint32_t above = SumBefore(own);
  if (above < kth.wanted && kth.wanted <= above + own) {  // one thread
    bool found = false;
#pragma unroll
    for (uint32_t i = 0; i < kMost; ++i) {
      if (!found && above + bin[i] >= kth.wanted) {
        found = true;
        found_bits = kth.bits | (top - 1 - i) << DigitShift(digit);
        found_wanted = kth.wanted - above;
      }
      above += bin[i];
    }
  }
  __syncthreads();
  return {found_bits, found_wanted};
}

// Returns the first `digits` digits of the k-th largest rank. REQUIRES 0 < k < size.
__device__ Kth KthOf(const TopKParams& p, const TopKLayout& layout, uint32_t group,
                     const TopKGroup& of, uint32_t digits) {
  Kth kth{0, of.k};
  for (uint32_t d = 0; d < digits; ++d) {
    kth = NextDigit(Workspace(p) + layout.histogram_at(group, d), d, kth);
  }
  return kth;
}

// Counts the histogram of digit kDigit among the ranks that begin like the k-th. Grid: x = chunk, y
// = group.
template <uint32_t kDigit>
__global__ void __launch_bounds__(kThreads) RefineKernel(const __grid_constant__ TopKParams p) {
  __shared__ uint32_t bins[kBins];
  const uint32_t group = blockIdx.y;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  const auto [begin, end] = ChunkOf(of);
  if (begin >= end || of.k == 0 || of.k == of.size()) return;
  const Kth kth = KthOf(p, layout, group, of, kDigit);
  const DigitCounter counter{bins, kDigit};
  counter.Clear();
  const uint32_t* rank = Workspace(p) + layout.rank_at(group);
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
    if ((rank[i] ^ kth.bits) >> DigitShift(kDigit - 1) == 0) counter.Add(rank[i]);
  }
  counter.AddTo(Workspace(p) + layout.histogram_at(group, kDigit));
}

// A Threshold selects every rank above `bits`, and the first `ties` keys whose rank is `bits`.
struct Threshold {
  uint32_t bits, ties;
};
__device__ Threshold ThresholdOf(const TopKParams& p, const TopKLayout& layout, uint32_t group,
                                 const TopKGroup& of) {
  if (of.k == of.size()) return {0, 0};
  if (of.k == 0) return {0xffffffffu, 0};
  const Kth kth = KthOf(p, layout, group, of, kDigits);
  return {kth.bits, kth.wanted};
}

// Counts how many keys of each chunk lie above the threshold and on it, and finds the largest rank
// below it. Grid: x = chunk, y = group.
__global__ void __launch_bounds__(kThreads) CountKernel(const __grid_constant__ TopKParams p) {
  const uint32_t group = blockIdx.y;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  const auto [begin, end] = ChunkOf(of);
  if (begin >= end) return;
  const Threshold threshold = ThresholdOf(p, layout, group, of);
  const uint32_t* rank = Workspace(p) + layout.rank_at(group);
  uint32_t above = 0, on = 0, below = 0;
  for (uint32_t i = begin + threadIdx.x; i < end; i += kThreads) {
    above += rank[i] > threshold.bits;
    on += rank[i] == threshold.bits;
    if (rank[i] < threshold.bits) below = max(below, rank[i]);
  }
  // Counts of up to kChunk are exact in float32.
  const float above_sum = BlockSum(static_cast<float>(above));
  const float on_sum = BlockSum(static_cast<float>(on));
  if (below > 0) atomicMax(Workspace(p) + layout.left_out_at(group), below);
  if (threadIdx.x == 0) {
    uint32_t* taken = Workspace(p) + layout.taken_at(group, blockIdx.x);
    taken[0] = static_cast<uint32_t>(above_sum);
    taken[1] = static_cast<uint32_t>(on_sum);
  }
}

// Before counts the keys above the threshold, and on it, in the chunks before this one.
struct Before {
  uint32_t above, on;
};
__device__ Before CountBefore(const TopKParams& p, const TopKLayout& layout, uint32_t group,
                              const TopKGroup& of) {
  double above = 0, on = 0;
  for (uint32_t c = of.first / kChunk + threadIdx.x; c < blockIdx.x; c += kThreads) {
    const uint32_t* taken = Workspace(p) + layout.taken_at(group, c);
    above += taken[0];
    on += taken[1];
  }
  above = BlockSum(above);
  on = BlockSum(on);
  return {static_cast<uint32_t>(above), static_cast<uint32_t>(on)};
}

// Votes counts the threads before this one, and all threads, whose condition holds.
struct Votes {
  uint32_t before, all;
};
__device__ Votes CountVotes(bool vote) {
  __shared__ uint32_t of_warp[kWarps];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned votes = __ballot_sync(kFullMask, vote);
  __syncthreads();  // the counts have been read since their previous use
  if (lane == 0) of_warp[warp] = static_cast<uint32_t>(__popc(votes));
  __syncthreads();
  Votes out{static_cast<uint32_t>(__popc(votes & ((1u << lane) - 1))), 0};
  for (uint32_t w = 0; w < kWarps; ++w) {
    if (w < warp) out.before += of_warp[w];
    out.all += of_warp[w];
  }
  return out;
}

// Returns L + theta, rounded up by more than the scores' own rounding, so that no key left out
// scores above its cut.
__device__ float CutAbove(float log_sum, float theta) {
  if (!Finite(theta)) return theta;
  const double slack = 1e-6 * (1 + fabs(double{log_sum}) + fabs(double{theta}));
  return static_cast<float>(double{log_sum} + theta + slack);
}

// Writes the count and cuts of a group. All threads of one block call it.
__device__ void WriteCuts(const TopKParams& p, const TopKLayout& layout, uint32_t group,
                          const TopKGroup& of, const Threshold& threshold) {
  const uint32_t G = p.shape.group;
  if (threadIdx.x == 0) p.args.counts[group] = of.k;
  float theta = -INFINITY;
  if (of.k < of.size()) {
    const uint32_t below = Workspace(p)[layout.left_out_at(group)];
    uint32_t left_out = below;
    if (of.k > 0 &&
        Workspace(p)[layout.histogram_at(group, kDigits - 1) +
                     (threshold.bits & (DigitBins(kDigits - 1) - 1))] > threshold.ties) {
      left_out = threshold.bits;  // the threshold holds more keys than there was room for
    }
    theta = FromOrderedBits(left_out);
  }
  __shared__ float log_sum[kMaxGroup];
  const bool everything = of.k == of.size();
  if (!everything) LogSums(p, layout, group, of, log_sum);
  const uint32_t g = threadIdx.x;
  if (g >= G) return;
  const CutKind kind = p.shape.codes && !everything ? CutKind::kApproximate : CutKind::kExact;
  p.args.cuts[size_t{group} * G + g] = {everything ? -INFINITY : CutAbove(log_sum[g], theta), kind};
}

// Writes the ids. Grid: x = chunk, y = group; the first chunk also writes the count and the cuts.
__global__ void __launch_bounds__(kThreads) WriteKernel(const __grid_constant__ TopKParams p) {
  const uint32_t group = blockIdx.y;
  const TopKLayout layout(p.shape);
  const TopKGroup of = GroupOf(p, group);
  const auto [begin, end] = ChunkOf(of);
  if (begin >= end && blockIdx.x > 0) return;
  const Threshold threshold = ThresholdOf(p, layout, group, of);
  if (blockIdx.x == 0) WriteCuts(p, layout, group, of, threshold);
  if (begin >= end) return;
  const Before before = CountBefore(p, layout, group, of);
  const uint32_t* rank = Workspace(p) + layout.rank_at(group);
  uint32_t* ids = p.args.ids + size_t{group} * p.shape.max_k;
  const uint32_t first_id = p.args.sources[group].first_id;
  uint32_t ties = before.on;  // ties taken so far
  uint32_t at = before.above + min(before.on, threshold.ties);
  for (uint32_t first = begin; first < end; first += kThreads) {
    const uint32_t i = first + threadIdx.x;
    const bool on = i < end && rank[i] == threshold.bits;
    const Votes tied = CountVotes(on);
    const bool taken =
        i < end && (rank[i] > threshold.bits || (on && ties + tied.before < threshold.ties));
    const Votes votes = CountVotes(taken);
    if (taken && at + votes.before < p.shape.max_k) ids[at + votes.before] = first_id + i;
    ties += tied.all;
    at += votes.all;
  }
}

}  // namespace

int LaunchSelectKernels(const TopKParams& params, Stream stream) {
  const dim3 grid(TopKLayout(params.shape).chunks, params.shape.n_groups);
  const auto launch = [&](auto* kernel) { return Launch(kernel, grid, 0, 0, params, stream); };
  if (const int error = launch(RankKernel)) return error;
  if (const int error = launch(RefineKernel<1>)) return error;
  if (const int error = launch(RefineKernel<2>)) return error;
  if (const int error = launch(CountKernel)) return error;
  return launch(WriteKernel);
}

}  // namespace prefixd::gpu::internal
