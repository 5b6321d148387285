// A navigable graph over vectors: built, searched and serialised by FAISS. Internal to index/;
// hnsw_graph.cc and ivf_lists.cc alone see FAISS.
//
// Thread-safety: immutable once made; Search may be called concurrently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::index {

class HnswGraph {
 public:
  // vectors: [n][dim], finite; kept as they are. links: of each vector, twice as many in the lowest
  // layer. kInvalidArgument for fewer than 2 vectors.
  static Result<HnswGraph> Build(std::span<const float> vectors, uint32_t dim, uint32_t links);
  // What Serialize returned, for the same n and dim; kCorrupt otherwise. FAISS does not defend
  // itself against hostile bytes: verify them first.
  static Result<HnswGraph> Load(std::span<const std::byte> bytes, size_t n, uint32_t dim);
  HnswGraph(HnswGraph&&) noexcept;
  HnswGraph& operator=(HnswGraph&&) noexcept;
  ~HnswGraph();

  Result<std::vector<std::byte>> Serialize() const;

  // The rows that look best for `query` by inner product, at most `wanted`, in no order. `visited`
  // gets the vectors that were compared.
  Result<std::vector<uint32_t>> Search(std::span<const float> query, uint32_t wanted,
                                       uint64_t* visited) const;

 private:
  struct Impl;
  explicit HnswGraph(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace prefixd::index
