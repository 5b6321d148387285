#include "index/ivf/hnsw_graph.h"

#include <faiss/IndexFlat.h>
#include <faiss/IndexHNSW.h>
#include <faiss/impl/AuxIndexStructures.h>
#include <faiss/impl/DistanceComputer.h>
#include <faiss/impl/io.h>
#include <faiss/index_io.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <string>

#include "index/ivf/faiss_reader.h"
#include "index/ivf/one_omp_thread.h"

namespace prefixd::index {
namespace {

using FaissHnsw = faiss::IndexHNSWFlat;
using idx_t = faiss::Index::idx_t;

// Of the graph's construction: FAISS's own default builds graphs that miss attention's outliers.
constexpr int kBuildEffort = 80;

// Inner products as distances, and how many were taken.
class CountingDistances final : public faiss::DistanceComputer {
 public:
  CountingDistances(const faiss::Index& storage, const float* query)
      : products_(storage.get_distance_computer()) {
    products_->set_query(query);
  }
  void set_query(const float* query) override { products_->set_query(query); }
  float operator()(idx_t i) override {
    ++count_;
    return -(*products_)(i);
  }
  float symmetric_dis(idx_t i, idx_t j) override { return -products_->symmetric_dis(i, j); }
  uint64_t count() const { return count_; }

 private:
  const std::unique_ptr<faiss::DistanceComputer> products_;
  uint64_t count_ = 0;
};

// Empty: it is what Build makes, and no search leaves its vectors.
std::string Mismatch(const FaissHnsw& index, size_t n, uint32_t dim) {
  const faiss::HNSW& graph = index.hnsw;
  if (index.d != static_cast<int>(dim) || index.ntotal != static_cast<idx_t>(n) ||
      index.metric_type != faiss::METRIC_INNER_PRODUCT) {
    return "shape differs from its envelope";
  }
  const auto* flat = dynamic_cast<const faiss::IndexFlat*>(index.storage);
  if (flat == nullptr || flat->d != index.d || flat->ntotal != index.ntotal ||
      flat->metric_type != index.metric_type || flat->codes.size() != n * dim * sizeof(float)) {
    return "vectors of an unexpected kind";
  }
  const float* vectors = flat->get_xb();
  for (size_t i = 0; i < n * dim; ++i) {
    if (!std::isfinite(vectors[i])) return "a vector that is not finite";
  }
  const auto& per_level = graph.cum_nneighbor_per_level;
  if (graph.levels.size() != n || graph.offsets.size() != n + 1 || graph.offsets[0] != 0 ||
      graph.offsets[n] != graph.neighbors.size() || graph.entry_point < 0 ||
      static_cast<size_t>(graph.entry_point) >= n || graph.max_level < 0 || per_level.empty() ||
      per_level[0] != 0) {
    return "a graph of an unexpected shape";
  }
  for (size_t l = 1; l < per_level.size(); ++l) {
    if (per_level[l] < per_level[l - 1]) return "layers that shrink";
  }
  for (size_t i = 0; i < n; ++i) {
    const int levels = graph.levels[i];
    if (levels < 1 || static_cast<size_t>(levels) >= per_level.size() ||
        levels > graph.max_level + 1 ||
        graph.offsets[i + 1] - graph.offsets[i] != static_cast<size_t>(per_level[levels])) {
      return "a vector in layers that there are not";
    }
    for (int level = 0; level < levels; ++level) {
      for (int j = per_level[level]; j < per_level[level + 1]; ++j) {
        const int to = graph.neighbors[graph.offsets[i] + static_cast<size_t>(j)];
        if (to >= 0 && (static_cast<size_t>(to) >= n || graph.levels[to] <= level)) {
          return "a link to where nothing is";
        }
      }
    }
  }
  if (graph.levels[graph.entry_point] != graph.max_level + 1) return "an entry below the top";
  return {};
}

Error Corrupt(const std::string& what) {
  return {Code::kCorrupt, "stored index: " + what + "; rebuild it"};
}

}  // namespace

struct HnswGraph::Impl {
  std::unique_ptr<FaissHnsw> index;  // owns the vectors
};

HnswGraph::HnswGraph(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HnswGraph::HnswGraph(HnswGraph&&) noexcept = default;
HnswGraph& HnswGraph::operator=(HnswGraph&&) noexcept = default;
HnswGraph::~HnswGraph() = default;

Result<HnswGraph> HnswGraph::Build(std::span<const float> vectors, uint32_t dim, uint32_t links) {
  const size_t n = dim == 0 ? 0 : vectors.size() / dim;
  if (n < 2 || links < 2) {
    return InvalidArgument("a graph needs at least two keys and two links of each");
  }
  try {
    const OneOmpThread one_thread;
    auto index = std::make_unique<FaissHnsw>(static_cast<int>(dim), static_cast<int>(links),
                                             faiss::METRIC_INNER_PRODUCT);
    index->hnsw.efConstruction = kBuildEffort;
    index->add(static_cast<idx_t>(n), vectors.data());
    if (const std::string wrong = Mismatch(*index, n, dim); !wrong.empty()) {
      return Error{Code::kInternal, "building a graph: " + wrong};
    }
    return HnswGraph(std::make_unique<Impl>(Impl{std::move(index)}));
  } catch (const std::bad_alloc&) {
    return Error{Code::kResourceExhausted, "not enough memory to build a graph"};
  } catch (const std::exception& e) {
    return Error{Code::kInternal, std::string("building a graph: ") + e.what()};
  }
}

Result<HnswGraph> HnswGraph::Load(std::span<const std::byte> bytes, size_t n, uint32_t dim) {
  try {
    FaissReader reader(bytes);
    std::unique_ptr<faiss::Index> index(faiss::read_index(&reader));
    auto* graph = dynamic_cast<FaissHnsw*>(index.get());
    if (graph == nullptr) return Corrupt("not a graph over vectors");
    if (!reader.at_end()) return Corrupt("bytes left over");
    if (const std::string wrong = Mismatch(*graph, n, dim); !wrong.empty()) return Corrupt(wrong);
    index.release();
    return HnswGraph(std::make_unique<Impl>(Impl{std::unique_ptr<FaissHnsw>(graph)}));
  } catch (const std::exception& e) {
    return Corrupt(e.what());
  }
}

Result<std::vector<std::byte>> HnswGraph::Serialize() const {
  try {
    faiss::VectorIOWriter writer;
    faiss::write_index(impl_->index.get(), &writer);
    std::vector<std::byte> bytes(writer.data.size());
    std::memcpy(bytes.data(), writer.data.data(), bytes.size());
    return bytes;
  } catch (const std::exception& e) {
    return Error{Code::kInternal, std::string("serialising a graph: ") + e.what()};
  }
}

Result<std::vector<uint32_t>> HnswGraph::Search(std::span<const float> query, uint32_t wanted,
                                                uint64_t* visited) const {
  try {
    const FaissHnsw& index = *impl_->index;
    const size_t n = std::min<size_t>(wanted, static_cast<size_t>(index.ntotal));
    std::vector<idx_t> ids(n, -1);
    std::vector<float> distances(n, std::numeric_limits<float>::infinity());
    CountingDistances products(*index.storage, query.data());
    faiss::VisitedTable seen(static_cast<int>(index.ntotal));
    faiss::SearchParametersHNSW params;
    params.efSearch = static_cast<int>(n);
    index.hnsw.search(products, static_cast<int>(n), ids.data(), distances.data(), seen, &params);
    *visited += products.count();
    std::vector<uint32_t> found;
    for (const idx_t id : ids) {
      if (id >= 0) found.push_back(static_cast<uint32_t>(id));
    }
    return found;
  } catch (const std::bad_alloc&) {
    return Error{Code::kResourceExhausted, "not enough memory to search a graph"};
  } catch (const std::exception& e) {
    return Error{Code::kInternal, std::string("searching a graph: ") + e.what()};
  }
}

}  // namespace prefixd::index
