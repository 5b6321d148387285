// Defines the extension module prefixd._core: prefixd/client.h for Python. Specs, policies and
// reports cross as JSON text (protocol/json_text.h), so that a new field of the C++ types needs no
// change here; tensors cross in place. Everything that may take time runs without the interpreter's
// lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <exception>
#include <string>

#include "prefixd/merge.h"
#include "prefixd/version.h"
#include "python/core/handles.h"

namespace prefixd::python {
namespace {

// Merges y_b, lse_b into y_a, lse_a; y [n][value_dim], lse [n].
void Merge(const Out& y_a, const Out& lse_a, const In& y_b, const In& lse_b) {
  const auto a = Floats("y_a", y_a), la = Floats("lse_a", lse_a);
  const auto b = Floats("y_b", y_b), lb = Floats("lse_b", lse_b);
  const size_t n = la.size();
  if (lb.size() != n || a.size() != b.size() || (n > 0 && a.size() % n)) {
    throw Failure{InvalidArgument("states to merge must have the same shapes")};
  }
  nb::gil_scoped_release unlocked;
  for (size_t i = 0; i < n; ++i) {
    const size_t dim = a.size() / n;
    MergeStates(a.subspan(i * dim, dim), &la[i], b.subspan(i * dim, dim), lb[i]);
  }
}

// Raises the exception that prefixd.errors makes for the code.
void Raise(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    const nb::object error = nb::module_::import_("prefixd.errors")
                                 .attr("make")(std::string(CodeName(failure.error.code)),
                                               failure.error.message, failure.error.retry_after_ms);
    PyErr_SetObject(error.type().ptr(), error.ptr());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  nb::register_exception_translator(Raise);
  m.attr("__version__") = PREFIXD_VERSION;
  BindDeadline(m);
  BindStore(m);
  BindPaged(m);  // before those that take its class
  BindPut(m);
  BindSession(m);
  BindRestore(m);
  BindOwnTokens(m);
  BindAttached(m);
  m.def("merge_states", &Merge, nb::arg("y_a").noconvert(), nb::arg("lse_a").noconvert(),
        nb::arg("y_b"), nb::arg("lse_b"));
}

}  // namespace prefixd::python
