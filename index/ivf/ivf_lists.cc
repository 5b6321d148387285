#include "index/ivf/ivf_lists.h"

#include <faiss/IndexFlat.h>
#include <faiss/IndexScalarQuantizer.h>
#include <faiss/impl/io.h>
#include <faiss/index_io.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "index/ivf/faiss_reader.h"
#include "index/ivf/one_omp_thread.h"

namespace prefixd::index {

namespace {

using FaissIvf = faiss::IndexIVFScalarQuantizer;

// Few rounds over a sample are enough for lists that are probed by the hundred, and keep a build
// within seconds per head at 128k tokens.
constexpr int kTrainRounds = 8;
constexpr int kTrainPointsPerList = 64;

Error CorruptLists(const std::string& what) {
  return {Code::kCorrupt, "stored index: " + what + "; rebuild it"};
}

// Every row number once, ascending within its list: what Build makes and the scan relies on.
bool IdsArePermutation(const faiss::InvertedLists& lists, size_t n) {
  std::vector<bool> seen(n, false);
  size_t count = 0;
  for (size_t l = 0; l < lists.nlist; ++l) {
    const faiss::InvertedLists::ScopedIds ids(&lists, l);
    for (size_t j = 0; j < lists.list_size(l); ++j) {
      const int64_t id = ids[j];
      if (id < 0 || static_cast<size_t>(id) >= n || seen[id]) return false;
      if (j != 0 && ids[j - 1] >= id) return false;
      seen[id] = true;
      ++count;
    }
  }
  return count == n;
}

// Empty: it is what Build makes.
std::string Mismatch(const FaissIvf& ivf, size_t n, uint32_t dim, uint32_t n_lists) {
  if (ivf.d != static_cast<int>(dim) || ivf.ntotal != static_cast<int64_t>(n) ||
      ivf.nlist != n_lists) {
    return "shape differs from its envelope";
  }
  if (ivf.metric_type != faiss::METRIC_INNER_PRODUCT || ivf.by_residual ||
      ivf.sq.qtype != faiss::ScalarQuantizer::QT_fp16 || ivf.code_size != size_t{dim} * 2) {
    return "codes of an unexpected kind";
  }
  const auto* flat = dynamic_cast<const faiss::IndexFlat*>(ivf.quantizer);
  if (flat == nullptr || flat->d != static_cast<int>(dim) ||
      flat->ntotal != static_cast<int64_t>(n_lists) ||
      flat->codes.size() != size_t{n_lists} * dim * sizeof(float)) {
    return "centroids of an unexpected shape";
  }
  const auto* lists = dynamic_cast<const faiss::ArrayInvertedLists*>(ivf.invlists);
  if (lists == nullptr || lists->nlist != n_lists || lists->code_size != ivf.code_size) {
    return "lists of an unexpected kind";
  }
  for (size_t l = 0; l < lists->nlist; ++l) {
    if (lists->codes[l].size() != lists->ids[l].size() * lists->code_size) {
      return "list with more ids than codes";
    }
  }
  if (!IdsArePermutation(*lists, n)) return "lists do not hold every token once";
  return {};
}

}  // namespace

struct IvfLists::Impl {
  std::unique_ptr<FaissIvf> ivf;  // owns quantizer and lists
};

IvfLists::IvfLists(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
IvfLists::IvfLists(IvfLists&&) noexcept = default;
IvfLists& IvfLists::operator=(IvfLists&&) noexcept = default;
IvfLists::~IvfLists() = default;

Result<IvfLists> IvfLists::Build(std::span<const float> vectors, uint32_t dim, uint32_t n_lists,
                                 uint32_t seed) {
  const size_t n = dim == 0 ? 0 : vectors.size() / dim;
  if (n_lists == 0 || n < 2 * size_t{n_lists}) {
    return InvalidArgument("an inverted file of " + std::to_string(n_lists) +
                           " lists needs at least twice as many keys, not " + std::to_string(n));
  }
  try {
    const OneOmpThread one_thread;
    // Lists are formed by distance (k-means by inner product would give everything to the
    // longest centroids) and probed by inner product.
    auto quantizer = std::make_unique<faiss::IndexFlatL2>(dim);
    auto ivf =
        std::make_unique<FaissIvf>(quantizer.get(), dim, n_lists, faiss::ScalarQuantizer::QT_fp16,
                                   faiss::METRIC_INNER_PRODUCT, /*encode_residual=*/false);
    (void)quantizer.release();  // own_fields hands it to the index
    ivf->own_fields = true;
    ivf->cp.seed = static_cast<int>(seed & 0x7fffffff);
    ivf->cp.niter = kTrainRounds;
    ivf->cp.min_points_per_centroid = 1;  // fewer only makes FAISS print a warning
    ivf->cp.max_points_per_centroid = kTrainPointsPerList;
    ivf->train(static_cast<int64_t>(n), vectors.data());
    ivf->add(static_cast<int64_t>(n), vectors.data());
    if (const std::string wrong = Mismatch(*ivf, n, dim, n_lists); !wrong.empty()) {
      return Error{Code::kInternal, "building an inverted file: " + wrong};
    }
    return IvfLists(std::make_unique<Impl>(Impl{std::move(ivf)}));
  } catch (const std::bad_alloc&) {
    return Error{Code::kResourceExhausted, "not enough memory to build an inverted file"};
  } catch (const std::exception& e) {
    return Error{Code::kInternal, std::string("building an inverted file: ") + e.what()};
  }
}

Result<IvfLists> IvfLists::Load(std::span<const std::byte> bytes, size_t n, uint32_t dim,
                                uint32_t n_lists) {
  try {
    FaissReader reader(bytes);
    std::unique_ptr<faiss::Index> index(faiss::read_index(&reader));
    auto* ivf = dynamic_cast<FaissIvf*>(index.get());
    if (ivf == nullptr) return CorruptLists("not an inverted file with 16-bit codes");
    if (!reader.at_end()) return CorruptLists("bytes left over");
    if (const std::string wrong = Mismatch(*ivf, n, dim, n_lists); !wrong.empty()) {
      return CorruptLists(wrong);
    }
    (void)index.release();  // `ivf` is the same object
    return IvfLists(std::make_unique<Impl>(Impl{std::unique_ptr<FaissIvf>(ivf)}));
  } catch (const std::exception& e) {
    return CorruptLists(e.what());
  }
}

Result<std::vector<std::byte>> IvfLists::Serialize() const {
  try {
    faiss::VectorIOWriter writer;
    faiss::write_index(impl_->ivf.get(), &writer);
    std::vector<std::byte> bytes(writer.data.size());
    std::memcpy(bytes.data(), writer.data.data(), bytes.size());
    return bytes;
  } catch (const std::exception& e) {
    return Error{Code::kInternal, std::string("serialising an inverted file: ") + e.what()};
  }
}

uint32_t IvfLists::n_lists() const { return static_cast<uint32_t>(impl_->ivf->nlist); }

RowsView IvfLists::centroids() const {
  const auto& flat = static_cast<const faiss::IndexFlat&>(*impl_->ivf->quantizer);
  const RowShape shape{static_cast<uint32_t>(flat.d), 0, DType::kF32};
  return {reinterpret_cast<const std::byte*>(flat.codes.data()), static_cast<size_t>(flat.ntotal),
          shape.bytes(), shape};
}

ListView IvfLists::list(uint32_t l) const {
  const auto& lists = static_cast<const faiss::ArrayInvertedLists&>(*impl_->ivf->invlists);
  const RowShape shape{static_cast<uint32_t>(impl_->ivf->d), 0, DType::kF16};
  return {{lists.ids[l].data(), lists.ids[l].size()},
          {reinterpret_cast<const std::byte*>(lists.codes[l].data()), lists.ids[l].size(),
           lists.code_size, shape}};
}

}  // namespace prefixd::index
