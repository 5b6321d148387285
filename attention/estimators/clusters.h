// Implements estimators that keep the mid region by clusters of keys (docs/mathematics.md):
// centroids with their values, and the values alone for a selector that scores every key itself.
//
// A Clustering is fixed when a prefix is ingested, and all its summaries share it, so that they
// merge. A step either receives the cluster of each retrieved row or finds it again from the row's
// key.
//
// Thread-safety: plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd {

// A partition of key space by nearest centre.
class Clustering {
 public:
  Clustering() = default;
  // centres: [n][dim], finite; 1 <= n <= 65536.
  Clustering(uint32_t dim, std::vector<float> centres);
  // Runs Lloyd's algorithm from evenly spaced rows: a training-free default where no index offers
  // its own lists. Returns fewer than n_clusters where there are fewer rows.
  static Clustering Fit(const RowsView& rows, uint32_t n_clusters, int iterations = 8);

  uint32_t dim() const { return dim_; }
  uint32_t size() const { return dim_ ? static_cast<uint32_t>(centres_.size() / dim_) : 0; }
  size_t memory_bytes() const {
    return centres_.size() * sizeof(float) + half_norms_.size() * sizeof(double);
  }
  std::span<const float> centre(uint32_t c) const {
    return std::span(centres_).subspan(size_t{c} * dim_, dim_);
  }
  // Returns the cluster of each row's key; ties go to the lowest.
  std::vector<uint16_t> Assign(const RowsView& rows) const;

 private:
  uint32_t dim_ = 0;
  std::vector<float> centres_;
  std::vector<double> half_norms_;
};

// Names what a summary keeps of each cluster; the second includes the first.
enum class ClusterContents : uint8_t {
  kValues = 1,     // count and mean value: dv elements
  kCentroids = 2,  // and mean key, and the keys' spread as one number: dk + 1 more
};

// Sums clusters of a token set, in float64; stored in float32. A new summary is all zero.
class ClusterSummary {
 public:
  ClusterSummary() = default;
  ClusterSummary(uint32_t n_clusters, uint32_t key_dim, uint32_t value_dim,
                 ClusterContents contents);

  // clusters: one per row, as Clustering::Assign returns them.
  void Add(const RowsView& rows, std::span<const uint16_t> clusters);
  // Adds the summary of a disjoint token set, with equal clustering and shape; `other` may be
  // empty.
  void Merge(const ClusterSummary& other);

  // Returns a copy that keeps less of each cluster. REQUIRES: contents <= contents().
  ClusterSummary Reduced(ClusterContents contents) const;
  // Joins whole clusters: cluster c becomes part of to[c], one of `n`. The result is exact: the new
  // clusters hold the tokens of the old ones.
  ClusterSummary Coarsened(std::span<const uint16_t> to, uint32_t n) const;

  uint64_t count() const { return count_; }
  uint32_t size() const { return static_cast<uint32_t>(counts_.size()); }
  uint32_t key_dim() const { return key_dim_; }
  uint32_t value_dim() const { return value_dim_; }
  ClusterContents contents() const { return contents_; }
  bool has_keys() const { return contents_ >= ClusterContents::kCentroids; }
  std::span<const uint64_t> counts() const { return counts_; }      // [n]
  std::span<const double> mean_keys() const { return mean_keys_; }  // [n][key_dim]
  // [n], sum over a cluster's keys of their squared distance from its mean
  std::span<const double> spreads() const { return spreads_; }
  std::span<const double> mean_values() const { return mean_values_; }  // [n][value_dim]

  size_t bytes() const;  // serialised payload, which budgets charge
  std::vector<std::byte> Serialize() const;
  static Result<ClusterSummary> Deserialize(std::span<const std::byte> bytes);

 private:
  void AddRow(uint32_t cluster, std::span<const float> key, std::span<const float> value);
  // Merges cluster `from` of `other` into cluster `to`, by Chan's formula.
  void MergeCluster(uint32_t to, const ClusterSummary& other, uint32_t from);

  uint32_t key_dim_ = 0, value_dim_ = 0;
  ClusterContents contents_ = ClusterContents::kValues;
  uint64_t count_ = 0;
  std::vector<uint64_t> counts_;
  std::vector<double> mean_keys_, spreads_, mean_values_;
};

// Sums of scores per cluster from a selector that scored every key of the mid region (by compact
// codes). Borrowed. Only a complete scan may be used: keys in pruned lists have no scores.
struct ScanMasses {
  std::span<const float> log_mass;          // [G][n_clusters] log sum exp(min(score, cut))
  std::span<const float> retrieved_scores;  // [G][K] the scan's own scores of the retrieved rows
  bool complete = false;
};

// Sums the scan's scores [G][n] by cluster into log_mass [G][n_clusters], -inf where there is none.
// cuts: [G], or empty for none.
void SumScan(std::span<const float> scores, uint32_t group, std::span<const uint16_t> clusters,
             std::span<const Cut> cuts, uint32_t n_clusters, std::span<float> log_mass);

}  // namespace prefixd
