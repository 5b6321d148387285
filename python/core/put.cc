#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>
#include <utility>

#include "protocol/json_text.h"
#include "python/core/handles.h"
#include "python/core/paged.h"

namespace prefixd::python {

void BindPut(nb::module_& m) {
  nb::class_<PyPut>(m, "Put")
      .def_prop_ro("missing",
                   [](const PyPut& p) {
                     const TokenRange missing = p.open().missing();
                     return std::make_tuple(missing.begin, missing.end);
                   })
      .def(
          "write",
          [](const PyPut& p, uint32_t layer, uint32_t first, const In& k, const In& v) {
            if (k.ndim() != 3 || v.ndim() != 3 || k.shape(0) != v.shape(0)) {
              throw Failure{
                  InvalidArgument("k and v must be [n][n_kv_heads][dim] with the same n, "
                                  "not " +
                                  ShapeOf(k) + " and " + ShapeOf(v))};
            }
            const auto keys = Stored("k", k, p.dtype), values = Stored("v", v, p.dtype);
            nb::gil_scoped_release unlocked;
            Check(p.open().Write(layer, first, uint32_t(k.shape(0)), keys, values));
          },
          nb::arg("layer"), nb::arg("first"), nb::arg("k"), nb::arg("v"))
      // Writes rows out of the blocks of an engine's cache.
      .def(
          "write_blocks",
          [](const PyPut& p, uint32_t layer, uint32_t first, uint32_t n, const PagedRows& rows,
             const In& cache, const Blocks& blocks) {
            const auto places = Stored("the cache", cache, p.dtype);
            const auto table = Span(blocks);
            nb::gil_scoped_release unlocked;
            WriteBlocks(p.open(), layer, first, n, rows, places, table);
          },
          nb::arg("layer"), nb::arg("first"), nb::arg("n"), nb::arg("rows"), nb::arg("cache"),
          nb::arg("blocks"))
      .def(
          "write_queries",
          [](const PyPut& p, uint32_t layer, uint32_t first, const In& q) {
            if (q.ndim() != 3) {
              throw Failure{
                  InvalidArgument("q must be [n][n_q_heads][key_dim], not " + ShapeOf(q))};
            }
            const auto queries = Floats("q", q);
            nb::gil_scoped_release unlocked;
            Check(p.open().WriteQueries(layer, first, uint32_t(q.shape(0)), queries));
          },
          nb::arg("layer"), nb::arg("first"), nb::arg("q"))
      .def(
          "commit",
          [](PyPut& p) {
            p.open();
            const auto store = std::move(p.store);  // must outlive the put
            const auto put = std::move(p.put);
            return wire::ToText(Unwrap(put->Commit()));
          },
          Unlocked())
      .def(
          "abort",
          [](PyPut& p) {
            if (p.put) p.put->Abort();
            p.put.reset();
            p.store.reset();
          },
          Unlocked());
}

}  // namespace prefixd::python
