#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "python/core/handles.h"
#include "python/core/paged.h"

namespace prefixd::python {

void BindRestore(nb::module_& m) {
  nb::class_<PyRestore>(m, "Restore")
      .def(
          "__init__",
          [](PyRestore* self, const PySession& s, uint32_t begin, uint32_t end,
             uint32_t first_layer, uint32_t end_layer, bool head_major, uint64_t buffer_bytes) {
            RestoreOptions options;
            options.tokens = {begin, end};
            options.first_layer = first_layer;
            options.end_layer = end_layer;
            options.order = head_major ? KvOrder::kHeadMajor : KvOrder::kTokenMajor;
            options.buffer_bytes = buffer_bytes;
            const auto session = s.get();
            auto begun = Unwrap(Restore::Begin(session, options));
            new (self) PyRestore{s.store, std::move(begun), session->info().geometry.dtype,
                                 options.order, end == 0 ? session->info().n_tokens : end};
          },
          nb::arg("session"), nb::arg("begin"), nb::arg("end"), nb::arg("first_layer"),
          nb::arg("end_layer"), nb::arg("head_major"), nb::arg("buffer_bytes"))
      // Returns (layer, begin, end) of the next run; None after the last one.
      .def(
          "next",
          [](PyRestore& r) -> std::optional<std::tuple<uint32_t, uint32_t, uint32_t>> {
            const auto next = Unwrap(r.restore->Next());
            if (!next) return std::nullopt;
            r.run = *next;
            return std::make_tuple(next->layer, next->tokens.begin, next->tokens.end);
          },
          Unlocked())
      // Copies the rows of that run.
      .def(
          "copy",
          [](const PyRestore& r, const Out& k, const Out& v) {
            const auto k_out = Stored("k", k, r.dtype), v_out = Stored("v", v, r.dtype);
            if (k_out.size() != r.run.k.size() || v_out.size() != r.run.v.size()) {
              throw Failure{InvalidArgument("k and v must have the size of the run")};
            }
            nb::gil_scoped_release unlocked;
            std::memcpy(k_out.data(), r.run.k.data(), k_out.size());
            std::memcpy(v_out.data(), r.run.v.data(), v_out.size());
          },
          nb::arg("k").noconvert(), nb::arg("v").noconvert())
      // Takes all runs of the next layer into the blocks of an engine's cache.
      .def(
          "fill_layer",
          [](PyRestore& r, uint32_t layer, const PagedRows& rows, const Out& cache,
             const Blocks& blocks, uint32_t row_heads, uint32_t first_head) {
            const auto places = Stored("the cache", cache, r.dtype);
            const auto table = Span(blocks);
            nb::gil_scoped_release unlocked;
            FillLayer(r, layer, rows, places, table, row_heads, first_head);
          },
          nb::arg("layer"), nb::arg("rows"), nb::arg("cache").noconvert(), nb::arg("blocks"),
          nb::arg("row_heads"), nb::arg("first_head"))
      .def("cancel", [](PyRestore& r) { r.restore->Cancel(); });
}

}  // namespace prefixd::python
