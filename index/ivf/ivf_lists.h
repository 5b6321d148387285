// An inverted file of vectors: clustered, trained and serialised by FAISS, scanned by us (Debian's
// FAISS has no AVX, and its searches start OpenMP threads). Internal to index/; only
// ivf_lists.cc sees FAISS.
//
// Thread-safety: immutable once made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/result.h"

namespace prefixd::index {

struct ListView {
  std::span<const int64_t> ids;  // row numbers of the vectors, ascending
  RowsView codes;                // the vectors themselves: f16, no values; row j is ids[j]
};

class IvfLists {
 public:
  // vectors: [n][dim], finite, at most 65504 in size. kInvalidArgument for n < 2 n_lists.
  static Result<IvfLists> Build(std::span<const float> vectors, uint32_t dim, uint32_t n_lists,
                                uint32_t seed);
  // What Serialize returned, for the same n, dim and n_lists; kCorrupt otherwise. FAISS does not
  // defend itself against hostile bytes: verify them first.
  static Result<IvfLists> Load(std::span<const std::byte> bytes, size_t n, uint32_t dim,
                               uint32_t n_lists);
  IvfLists(IvfLists&&) noexcept;
  IvfLists& operator=(IvfLists&&) noexcept;
  ~IvfLists();

  Result<std::vector<std::byte>> Serialize() const;

  uint32_t n_lists() const;
  RowsView centroids() const;  // f32, no values; row l is the mean vector of list l
  ListView list(uint32_t l) const;

 private:
  struct Impl;
  explicit IvfLists(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace prefixd::index
