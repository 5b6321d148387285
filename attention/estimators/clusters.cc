#include "attention/estimators/clusters.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <string>

#include "attention/estimators/byte_codec.h"
#include "attention/kernels/kernels.h"
#include "attention/rows/limits.h"
#include "attention/rows/padded_queries.h"
#include "attention/rows/row_blocks.h"

namespace prefixd {
namespace {

// Layout, little-endian: magic u32, version u16, contents u16, clusters u32, key_dim u32,
// value_dim u32, zero u32; then u32 counts; then float32 mean keys, spreads, mean values.
constexpr uint32_t kClustersMagic = 0x4c435850;  // "PXCL"
constexpr uint16_t kClustersVersion = 2;
constexpr size_t kClustersHeaderBytes = 24;
constexpr uint32_t kMaxClusters = 65536;
constexpr size_t kAssignRows = 64;  // rows scored against all centres at once

}  // namespace

Clustering::Clustering(uint32_t dim, std::vector<float> centres)
    : dim_(dim), centres_(std::move(centres)) {
  assert(dim_ > 0 && centres_.size() % dim_ == 0 && size() >= 1 && size() <= kMaxClusters);
  half_norms_.resize(size());
  for (uint32_t c = 0; c < size(); ++c) {
    for (float x : centre(c)) half_norms_[c] += 0.5 * double{x} * x;
  }
}

std::vector<uint16_t> Clustering::Assign(const RowsView& rows) const {
  assert(rows.count == 0 || rows.shape.key_dim == dim_);
  std::vector<uint16_t> out(rows.count);
  const std::vector<double> centres = PadQueries<double>(centres_, size(), dim_);
  std::vector<float> dots(size_t{size()} * kAssignRows);
  for (size_t begin = 0; begin < rows.count; begin += kAssignRows) {
    const size_t n = std::min(kAssignRows, rows.count - begin);
    const VectorBlock keys = KeyBlock(rows, begin, n);
    Kernels().score(centres.data(), PadUp(dim_), size(), keys, 1.0, dots.data(), kAssignRows);
    for (size_t i = 0; i < n; ++i) {
      // |k - c|^2 is least where k.c - |c|^2 / 2 is greatest.
      double best = -kInf;
      for (uint32_t c = 0; c < size(); ++c) {
        const double closeness = dots[c * kAssignRows + i] - half_norms_[c];
        if (closeness > best) {
          best = closeness;
          out[begin + i] = static_cast<uint16_t>(c);
        }
      }
    }
  }
  return out;
}

Clustering Clustering::Fit(const RowsView& rows, uint32_t n_clusters, int iterations) {
  assert(rows.count > 0 && n_clusters >= 1 && n_clusters <= kMaxClusters);
  const uint32_t dim = rows.shape.key_dim;
  const size_t n = std::min<size_t>(n_clusters, rows.count);
  std::vector<float> centres(n * dim), key(dim);
  for (size_t c = 0; c < n; ++c) {
    ToFloat(rows.shape.dtype, rows.key(c * rows.count / n),
            std::span(centres).subspan(c * dim, dim));
  }
  Clustering clustering(dim, std::move(centres));
  for (int step = 0; step < iterations; ++step) {
    const std::vector<uint16_t> clusters = clustering.Assign(rows);
    std::vector<double> sums(n * dim);
    std::vector<size_t> counts(n);
    for (size_t i = 0; i < rows.count; ++i) {
      ToFloat(rows.shape.dtype, rows.key(i), key);
      ++counts[clusters[i]];
      for (uint32_t j = 0; j < dim; ++j) sums[clusters[i] * size_t{dim} + j] += double{key[j]};
    }
    std::vector<float> moved = clustering.centres_;
    for (size_t c = 0; c < n; ++c) {
      for (uint32_t j = 0; j < dim && counts[c] > 0; ++j) {
        moved[c * dim + j] = static_cast<float>(sums[c * dim + j] / double(counts[c]));
      }
    }
    clustering = Clustering(dim, std::move(moved));
  }
  return clustering;
}

ClusterSummary::ClusterSummary(uint32_t n_clusters, uint32_t key_dim, uint32_t value_dim,
                               ClusterContents contents)
    : key_dim_(key_dim),
      value_dim_(value_dim),
      contents_(contents),
      counts_(n_clusters),
      mean_values_(size_t{n_clusters} * value_dim) {
  if (!has_keys()) return;
  mean_keys_.resize(size_t{n_clusters} * key_dim);
  spreads_.resize(n_clusters);
}

// Welford's update: means and centred sums move together.
void ClusterSummary::AddRow(uint32_t cluster, std::span<const float> key,
                            std::span<const float> value) {
  const double n = static_cast<double>(++counts_[cluster]);
  ++count_;
  double* mean_value = mean_values_.data() + size_t{cluster} * value_dim_;
  for (uint32_t l = 0; l < value_dim_; ++l) mean_value[l] += (value[l] - mean_value[l]) / n;
  if (!has_keys()) return;
  double* mean_key = mean_keys_.data() + size_t{cluster} * key_dim_;
  for (uint32_t j = 0; j < key_dim_; ++j) {
    const double before = key[j] - mean_key[j];
    mean_key[j] += before / n;
    spreads_[cluster] += before * (key[j] - mean_key[j]);
  }
}

void ClusterSummary::Add(const RowsView& rows, std::span<const uint16_t> clusters) {
  assert(rows.count == 0 || (rows.shape.key_dim == key_dim_ && rows.shape.value_dim == value_dim_));
  assert(clusters.size() == rows.count);
  std::vector<float> key(key_dim_), value(value_dim_);
  for (size_t i = 0; i < rows.count; ++i) {
    ToFloat(rows.shape.dtype, rows.key(i), key);
    ToFloat(rows.shape.dtype, rows.value(i), value);
    AddRow(clusters[i], key, value);
  }
}

void ClusterSummary::Merge(const ClusterSummary& other) {
  if (other.count_ == 0) return;
  if (count_ == 0) {
    *this = other;
    return;
  }
  assert(size() == other.size() && key_dim_ == other.key_dim_ && value_dim_ == other.value_dim_ &&
         contents_ == other.contents_);
  for (uint32_t c = 0; c < size(); ++c) MergeCluster(c, other, c);
}

void ClusterSummary::MergeCluster(uint32_t to, const ClusterSummary& other, uint32_t from) {
  if (other.counts_[from] == 0) return;
  const double n = static_cast<double>(counts_[to] + other.counts_[from]);
  const double share = static_cast<double>(other.counts_[from]) / n;
  const double w = static_cast<double>(counts_[to]) * share;
  for (uint32_t j = 0; j < key_dim_ && has_keys(); ++j) {
    double& mean = mean_keys_[size_t{to} * key_dim_ + j];
    const double d = other.mean_keys_[size_t{from} * key_dim_ + j] - mean;
    mean += share * d;
    spreads_[to] += w * d * d;
  }
  if (has_keys()) spreads_[to] += other.spreads_[from];
  for (uint32_t l = 0; l < value_dim_; ++l) {
    double& mean = mean_values_[size_t{to} * value_dim_ + l];
    mean += share * (other.mean_values_[size_t{from} * value_dim_ + l] - mean);
  }
  counts_[to] += other.counts_[from];
  count_ += other.counts_[from];
}

ClusterSummary ClusterSummary::Coarsened(std::span<const uint16_t> to, uint32_t n) const {
  assert(to.size() == size());
  ClusterSummary out(n, key_dim_, value_dim_, contents_);
  for (uint32_t c = 0; c < size(); ++c) {
    assert(to[c] < n);
    out.MergeCluster(to[c], *this, c);
  }
  return out;
}

ClusterSummary ClusterSummary::Reduced(ClusterContents contents) const {
  assert(contents <= contents_);
  ClusterSummary out(size(), key_dim_, value_dim_, contents);
  out.counts_ = counts_;
  out.count_ = count_;
  out.mean_values_ = mean_values_;
  if (!out.has_keys()) return out;
  out.mean_keys_ = mean_keys_;
  out.spreads_ = spreads_;
  return out;
}

size_t ClusterSummary::bytes() const {
  return counts_.size() * sizeof(uint32_t) +
         sizeof(float) * (mean_keys_.size() + spreads_.size() + mean_values_.size());
}

std::vector<std::byte> ClusterSummary::Serialize() const {
  ByteWriter out;
  out.Put(kClustersMagic);
  out.Put(kClustersVersion);
  out.Put(static_cast<uint16_t>(contents_));
  out.Put(size());
  out.Put(key_dim_);
  out.Put(value_dim_);
  out.Put(uint32_t{0});
  for (uint64_t n : counts_) out.Put(static_cast<uint32_t>(n));  // positions are 32 bits wide
  out.PutFloats(mean_keys());
  out.PutFloats(spreads());
  out.PutFloats(mean_values());
  return out.Take();
}

Result<ClusterSummary> ClusterSummary::Deserialize(std::span<const std::byte> bytes) {
  constexpr const char* kName = "cluster summary";
  const auto corrupt = [](const std::string& what) {
    return Error{Code::kCorrupt, std::string(kName) + ": " + what};
  };
  PREFIXD_ASSIGN(ByteReader in,
                 ReadHead(bytes, kClustersHeaderBytes, kClustersMagic, kClustersVersion, kName));
  const uint16_t contents = in.Get<uint16_t>();
  const uint32_t n = in.Get<uint32_t>(), key_dim = in.Get<uint32_t>();
  const uint32_t value_dim = in.Get<uint32_t>();
  if (contents < 1 || contents > 2 || in.Get<uint32_t>() != 0) return corrupt("unknown contents");
  if (n > kMaxClusters || key_dim > kMaxDim || value_dim > kMaxDim || (n == 0) != (key_dim == 0) ||
      (n == 0) != (value_dim == 0)) {
    return corrupt("dimensions out of range");
  }
  // The size is checked before anything of that size is allocated.
  const uint64_t keys = contents == 2 ? key_dim + 1 : 0;
  if (in.remaining() != uint64_t{n} * (sizeof(uint32_t) + sizeof(float) * (keys + value_dim))) {
    return corrupt("size does not fit its shape");
  }
  ClusterSummary summary(n, key_dim, value_dim, static_cast<ClusterContents>(contents));
  for (uint64_t& count : summary.counts_) summary.count_ += count = in.Get<uint32_t>();
  summary.mean_keys_ = in.GetFloats<double>(summary.mean_keys_.size());
  summary.spreads_ = in.GetFloats<double>(summary.spreads_.size());
  summary.mean_values_ = in.GetFloats<double>(summary.mean_values_.size());
  for (const auto* field : {&summary.mean_keys_, &summary.spreads_, &summary.mean_values_}) {
    if (!AllFinite<double>(*field)) return corrupt("holds NaN or infinity");
  }
  if (std::ranges::any_of(summary.spreads_, [](double v) { return v < 0; })) {
    return corrupt("a variance is negative");
  }
  return summary;
}

void SumScan(std::span<const float> scores, uint32_t group, std::span<const uint16_t> clusters,
             std::span<const Cut> cuts, uint32_t n_clusters, std::span<float> log_mass) {
  const size_t n = clusters.size();
  assert(scores.size() == group * n && log_mass.size() == size_t{group} * n_clusters);
  assert(cuts.empty() || cuts.size() == group);
  // Tokens that follow one another are often in one cluster, so consecutive tokens go to different
  // sums: no addition waits for the one before.
  constexpr size_t kSums = 4, kTile = 1024;
  std::vector<double> sums(kSums * n_clusters);
  std::array<float, kTile> weight;
  for (uint32_t g = 0; g < group; ++g) {
    const std::span<const float> row = scores.subspan(g * n, n);
    const float cap = cuts.empty() ? std::numeric_limits<float>::infinity() : cuts[g].score;
    float max = -std::numeric_limits<float>::infinity();
    Kernels().finite_max(row.data(), n, &max);
    const float shift = std::min(max, cap);
    std::ranges::fill(sums, 0.0);
    for (size_t at = 0; at < n && std::isfinite(shift); at += kTile) {
      const size_t some = std::min(kTile, n - at);
      for (size_t i = 0; i < some; ++i) weight[i] = std::min(row[at + i], cap);
      Kernels().exp_shifted(weight.data(), some, shift, weight.data());
      for (size_t i = 0; i < some; ++i) {
        sums[i % kSums * n_clusters + clusters[at + i]] += weight[i];
      }
    }
    for (uint32_t c = 0; c < n_clusters; ++c) {
      double mass = 0;
      for (size_t j = 0; j < kSums; ++j) mass += sums[j * n_clusters + c];
      log_mass[size_t{g} * n_clusters + c] = static_cast<float>(double{shift} + std::log(mass));
    }
  }
}

}  // namespace prefixd
