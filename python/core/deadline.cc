// Binds Deadline: the calls of the thread that has entered it end by then.
#include <nanobind/nanobind.h>

#include <optional>

#include "base/call_scope.h"
#include "python/core/handles.h"

namespace prefixd::python {
namespace {

// Is entered and left by one thread, the last one entered first.
class Deadline {
 public:
  explicit Deadline(uint32_t timeout_ms) : timeout_ms_(timeout_ms) {}
  void Enter() { scope_.emplace(CallLimits::Of(timeout_ms_, nullptr)); }
  void Leave() { scope_.reset(); }

 private:
  const uint32_t timeout_ms_;
  std::optional<CallScope> scope_;
};

}  // namespace

void BindDeadline(nb::module_& m) {
  nb::class_<Deadline>(m, "Deadline")
      .def(nb::init<uint32_t>(), nb::arg("timeout_ms"))
      .def("enter", &Deadline::Enter)
      .def("leave", &Deadline::Leave);
}

}  // namespace prefixd::python
