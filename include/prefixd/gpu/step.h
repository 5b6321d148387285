// Computes the retrieval-completion step of one layer on CUDA, batched over groups
// (docs/mathematics.md).
//
// A *group* is one (session, KV head) with its G query heads. The contract is that of GroupStep in
// attention/step/step.h, with every estimator of attention/estimators/estimator.h; only the memory
// differs: everything here is device memory, laid out by the caller, and the host knows sizes
// alone. A launch allocates nothing, does not wait for the device, and reads nothing back, so it
// can be captured in a CUDA graph and replayed with new contents.
//
//   Result<StepPlan> plan = PlanStep(shape, device);       // once per shape, host only
//   ... workspace of plan->workspace_bytes ...
//   LaunchStep(*plan, args, stream);                       // three or four kernels on `stream`
//   ... later: errors[] copied back, GroupError(...) for each word that is not kGroupOk
//
// Sums are float32; scores, which must not suffer from terms that cancel, and the few scalars of
// the estimators are float64. phi_k of retrieved rows is computed on tensor cores in three bf16
// products; prefixd/gpu/phi_pack.h has its error bound. All logs are natural.
//
// Thread-safety: functions may be called from any thread; a workspace and the outputs belong to one
// launch at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "prefixd/estimator_variant.h"
#include "prefixd/feature_format.h"
#include "prefixd/gpu/device.h"
#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd::gpu {

inline constexpr uint32_t kMaxGroup = 16;       // G
inline constexpr uint32_t kMaxDim = 256;        // key_dim, value_dim, d_phi
inline constexpr uint32_t kMaxEmbedding = 512;  // d_emb
inline constexpr uint32_t kMaxRows = 1u << 20;  // exact rows of one group
inline constexpr uint32_t kMaxClusters = 1024;

// One head's map of queries in device memory. Weights are float32 and *transposed* with respect to
// attention/estimators/feature_map.h: [in][out], so that neighbouring threads read neighbouring
// outputs.
struct DeviceQueryMap {
  uint32_t in_dim = 0, d_emb = 0, d_phi = 0;
  float alpha = 0;
  const float *w_in = nullptr, *b_in = nullptr;    // [in_dim][d_emb], [d_emb]
  const float *w1 = nullptr, *b1 = nullptr;        // [d_emb][d_emb], [d_emb]
  const float *w2 = nullptr, *b2 = nullptr;        // [d_emb][d_emb], [d_emb]
  const float *w_out = nullptr, *b_out = nullptr;  // [d_emb][d_phi], [d_phi]
};

// One head's map of keys: weights in the layout of PackWeights (prefixd/gpu/phi_pack.h), 16-byte
// aligned.
struct DeviceKeyMap {
  uint32_t in_dim = 0, d_emb = 0, d_phi = 0;
  float alpha = 0;
  const uint32_t *w_in = nullptr, *w1 = nullptr, *w2 = nullptr, *w_out = nullptr;
  const float *b_in = nullptr, *b1 = nullptr, *b2 = nullptr, *b_out = nullptr;
};

// The summary of one group's mid region M, in device memory; members that `estimator` does not use
// may be null.
struct DeviceSummary {
  EstimatorKind estimator = EstimatorKind::kNone;  // kAuto is resolved by the caller
  PhiForm phi_form = PhiForm::kSigned;
  uint32_t mid_count = 0;  // |M|, retrieved tokens included
  // False: y and lse cover only what was read, and rho_z is the share of the dropped remainder.
  bool merge_estimate = true;

  // kPhi (attention/estimators/phi_cache.h). All maps and caches of a launch have the d_phi of
  // StepShape.
  const float *phi_m = nullptr, *phi_u = nullptr;  // [d_phi] each
  const float* phi_t = nullptr;                    // [d_phi][value_dim]
  const DeviceQueryMap* phi_q = nullptr;           // [G], or one where it is shared
  bool phi_q_shared = false;                       // symmetric: one map for all heads
  // Features of retrieved rows are recomputed with phi_k or, where it is null, read from
  // BatchStepArgs::features (attention/estimators/stored_features.h).
  const DeviceKeyMap* phi_k = nullptr;
  FeatureFormat feature_format;
  const float* feature_m = nullptr;  // [feature_chunks][d_phi]
  uint32_t feature_chunks = 0;

  // kMoment (attention/estimators/moments.h). Other estimators may use mean_key alone: it gives the
  // lower side of the bracket on Z_R.
  const float *mean_key = nullptr, *key_m2 = nullptr;  // [key_dim] each; m2: sum, centred
  const float* mean_value = nullptr;                   // [value_dim]
  const float* covariance = nullptr;  // [key_dim]^2, sum, centred; null: the diagonal, key_m2
  // The first-order term, whole or as a factor; all null: none.
  const float* cross = nullptr;         // [key_dim][value_dim], sum, centred
  const float* key_factor = nullptr;    // [key_dim][cross_rank]
  const float* value_factor = nullptr;  // [cross_rank][value_dim]
  uint32_t cross_rank = 0;

  // kCentroid, kScan (attention/estimators/clusters.h); kScan uses counts and mean values alone.
  uint32_t n_clusters = 0;
  const uint32_t* cluster_counts = nullptr;      // [n_clusters]
  const float* cluster_keys = nullptr;           // [n_clusters][key_dim], means
  const float* cluster_spreads = nullptr;        // [n_clusters], sums
  const float* cluster_values = nullptr;         // [n_clusters][value_dim], means
  const float* scan_log_mass = nullptr;          // kScan: [G][n_clusters], from a complete scan
  const float* scan_retrieved_scores = nullptr;  // kScan: [G][K]
};

// The host's bounds of a launch. A launch reads less where the device-side counts are smaller.
struct StepShape {
  uint32_t n_groups = 0;
  uint32_t group = 0;  // G
  RowShape row;
  LayerGeometry layer;    // scale and softcap; with a softcap every estimator must be kNone
  uint32_t max_rows = 0;  // largest number of exact rows of any group
  // Largest widths of the feature maps in use; both 0 when no group uses kPhi.
  uint32_t d_phi = 0, d_emb = 0;
  uint32_t max_clusters = 0;  // largest n_clusters in use; 0 when no group uses clusters
};

// Tells how a shape is run. Plain value; host arithmetic only.
struct StepPlan {
  StepShape shape;
  uint32_t n_splits = 1;       // blocks that share one group's rows
  size_t workspace_bytes = 0;  // device memory, 16-byte aligned, no initial contents needed
  size_t shared_bytes = 0;     // dynamic shared memory of the largest kernel
  size_t shared_limit = 0;     // the most that the device gives a block
};

// kInvalidArgument, naming the size: it is outside the limits above, or needs more shared memory
// than the device has.
Result<StepPlan> PlanStep(const StepShape& shape, const DeviceInfo& device);

// One exact row: its key and its value may lie anywhere, each aligned to its element size (16-byte
// loads where both are aligned to 16 bytes), in device memory, or in pinned host memory at the
// address that kernels see.
struct DeviceRow {
  const void* key = nullptr;
  const void* value = nullptr;
};

// Device pointers, unless stated otherwise. Rows may lie in device memory or in pinned host memory:
// the kernel gathers straight from their addresses, each row once.
struct BatchStepArgs {
  const float* queries = nullptr;  // [n_groups][G][key_dim]
  // The exact rows of all groups, group after group, anchors before retrieved: either addresses
  // of rows, or (row_addresses null) rows at a stride, the value behind the key.
  const DeviceRow* row_addresses = nullptr;  // [row_offsets[n_groups]]
  const void* rows = nullptr;
  size_t row_stride = 0;                     // bytes, a multiple of the element size
  const uint32_t* row_offsets = nullptr;     // [n_groups + 1], ascending from 0
  const uint32_t* anchor_counts = nullptr;   // [n_groups] each group's anchor rows
  const DeviceSummary* summaries = nullptr;  // [n_groups]
  const Cut* cuts = nullptr;                 // [n_groups][G]; null: CutKind::kNone for all
  // Indexed like row_addresses; entries of anchors are not read. Null where no group needs them.
  const uint16_t* row_clusters = nullptr;   // the cluster of each retrieved row
  const void* const* features = nullptr;    // its stored features, aligned to a code
  const uint32_t* feature_chunk = nullptr;  // the chunk whose m they refer to; null: all the first

  float* y = nullptr;          // [n_groups][G][value_dim]
  float* lse = nullptr;        // [n_groups][G], natural; -inf (and y = 0) for an empty prefix
  float* rho_z = nullptr;      // [n_groups][G] missing mass: Z_R / (Z_E + Z_R)
  uint32_t* errors = nullptr;  // [n_groups]: kGroupOk or a word for GroupError

  void* workspace = nullptr;  // plan.workspace_bytes
  size_t workspace_bytes = 0;
};

inline constexpr uint32_t kGroupOk = 0xffffffffu;

// Enqueues the step. kInvalidArgument before anything is enqueued: a pointer is missing or
// misaligned, or the workspace is too small. Otherwise CUDA's error for the launch. Errors in the
// contents (NaN, counts beyond the shape) are per group, in args.errors: such a group's outputs
// mean nothing, and other groups are not affected.
Status LaunchStep(const StepPlan& plan, const BatchStepArgs& args, Stream stream);

// Explains an error word; `word` as read back from args.errors, `anchors` that group's
// anchor_counts. Ok for kGroupOk.
Status GroupError(uint32_t word, uint32_t anchors);

}  // namespace prefixd::gpu
