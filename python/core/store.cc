#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "protocol/json_text.h"
#include "python/core/handles.h"

namespace prefixd::python {
namespace {

// Calls the caller's progress function from a thread without the interpreter's lock. An exception
// in it cancels the call and is raised again when the call is over.
class Progress {
 public:
  explicit Progress(nb::object callback) : callback_(std::move(callback)) {}

  template <typename F>
  auto Run(F&& call) {
    auto result = [&] {
      nb::gil_scoped_release unlocked;
      return call([this](uint64_t done, uint64_t total, std::string_view unit) {
        return Report(done, total, unit);
      });
    }();
    if (raised_) std::rethrow_exception(raised_);
    return result;
  }

 private:
  bool Report(uint64_t done, uint64_t total, std::string_view unit) {
    nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) {  // Ctrl-C
      raised_ = std::make_exception_ptr(nb::python_error());
      return false;
    }
    if (callback_.is_none()) return true;
    try {
      const nb::object go_on = callback_(done, total, std::string(unit));
      return go_on.ptr() != Py_False;  // whatever else it returns: print and lists return something
    } catch (...) {
      raised_ = std::current_exception();
      return false;
    }
  }

  nb::object callback_;
  std::exception_ptr raised_;
};

DType StoredDType(Store& store, const std::string& model) {
  return Unwrap(store.Model(model)).geometry.dtype;
}

std::vector<uint32_t> Copy(const Tokens& tokens) {
  return {tokens.data(), tokens.data() + tokens.size()};
}

}  // namespace

void BindStore(nb::module_& m) {
  nb::class_<PyPendingMatch>(m, "PendingMatch")
      .def(
          "ready", [](const PyPendingMatch& p) { return p.match->ready(); }, Unlocked())
      .def("get", [](const PyPendingMatch& p) {
        nb::gil_scoped_release unlocked;
        return wire::ToText(Unwrap(p.match->Get()));
      });
  nb::class_<StoreHandle>(m, "Store")
      .def("close",
           [](StoreHandle& s) {
             nb::gil_scoped_release unlocked;
             s.Take().reset();
           })
      .def(
          "register_model",
          [](const StoreHandle& s, const std::string& json) {
            Check(s.get()->RegisterModel(Unwrap(wire::FromText<ModelSpec>(json, "model"))));
          },
          nb::arg("json"), Unlocked())
      .def(
          "model",
          [](const StoreHandle& s, const std::string& name) {
            return wire::ToText(Unwrap(s.get()->Model(name)));
          },
          nb::arg("name"), Unlocked())
      .def(
          "list_models",
          [](const StoreHandle& s, const std::string& json) {
            const auto spec = Unwrap(wire::FromText<ListSpec>(json, "list"));
            return wire::ToText(Unwrap(s.get()->ListModels(spec)));
          },
          nb::arg("json"), Unlocked())
      .def(
          "remove_model",
          [](const StoreHandle& s, const std::string& name) { Check(s.get()->RemoveModel(name)); },
          nb::arg("name"), Unlocked())
      .def(
          "begin_put",
          [](const StoreHandle& s, const std::string& json, const Tokens& tokens) {
            auto spec = Unwrap(wire::FromText<PutSpec>(json, "put"));
            spec.tokens = Copy(tokens);
            nb::gil_scoped_release unlocked;
            const DType dtype = StoredDType(*s.get(), spec.model);
            return PyPut{s.get(), Unwrap(s.get()->BeginPut(spec)), dtype};
          },
          nb::arg("json"), nb::arg("tokens"))
      .def(
          "match",
          [](const StoreHandle& s, const std::string& json, const Tokens& tokens) {
            auto spec = Unwrap(wire::FromText<MatchSpec>(json, "match"));
            spec.tokens = Copy(tokens);
            nb::gil_scoped_release unlocked;
            return wire::ToText(Unwrap(s.get()->Match(spec)));
          },
          nb::arg("json"), nb::arg("tokens"))
      .def(
          "match_async",
          [](const StoreHandle& s, const std::string& json, const Tokens& tokens,
             uint64_t deadline_ms) {
            auto spec = Unwrap(wire::FromText<MatchSpec>(json, "match"));
            spec.tokens = Copy(tokens);
            nb::gil_scoped_release unlocked;
            const auto deadline = std::chrono::milliseconds(
                std::min(deadline_ms, uint64_t{kMaxMatchDeadline.count()}));
            return PyPendingMatch{Unwrap(s.get()->MatchAsync(spec, deadline))};
          },
          nb::arg("json"), nb::arg("tokens"), nb::arg("deadline_ms"))
      .def(
          "attach",
          [](const StoreHandle& s, const std::string& json, const Tokens& tokens) {
            auto spec = Unwrap(wire::FromText<AttachSpec>(json, "attach"));
            spec.tokens = Copy(tokens);
            nb::gil_scoped_release unlocked;
            return PySession{s.get(), Unwrap(s.get()->Attach(spec))};
          },
          nb::arg("json"), nb::arg("tokens"))
      .def(
          "explain",
          [](const StoreHandle& s, const std::string& json, const Tokens& tokens) {
            auto spec = Unwrap(wire::FromText<ExplainSpec>(json, "explain"));
            spec.match.tokens = Copy(tokens);
            nb::gil_scoped_release unlocked;
            return wire::ToText(Unwrap(s.get()->Explain(spec)));
          },
          nb::arg("json"), nb::arg("tokens"))
      .def(
          "rewrite",
          [](const StoreHandle& s, const std::string& prefix, const std::string& kind,
             nb::object progress) {
            const RewriteKind how = Unwrap(RewriteKindFromName(kind));
            return wire::ToText(
                Unwrap(Progress(std::move(progress)).Run([&](const ProgressFn& report) {
                  return s.get()->Rewrite(prefix, how, report);
                })));
          },
          nb::arg("prefix"), nb::arg("kind"), nb::arg("progress") = nb::none())
      .def(
          "compress",
          [](const StoreHandle& s, const std::string& prefix, const std::string& json,
             nb::object progress) {
            const auto spec = Unwrap(wire::FromText<CompressSpec>(json, "compress"));
            return wire::ToText(
                Unwrap(Progress(std::move(progress)).Run([&](const ProgressFn& report) {
                  return s.get()->Compress(prefix, spec, report);
                })));
          },
          nb::arg("prefix"), nb::arg("json"), nb::arg("progress") = nb::none())
      .def(
          "wait_ready",
          [](const StoreHandle& s, const std::string& prefix, nb::object progress) {
            Check(Progress(std::move(progress)).Run([&](const ProgressFn& report) {
              return s.get()->WaitReady(prefix, report);
            }));
          },
          nb::arg("prefix"), nb::arg("progress") = nb::none())
      .def(
          "verify",
          [](const StoreHandle& s, const std::string& prefix, nb::object progress) {
            return wire::ToText(
                Unwrap(Progress(std::move(progress)).Run([&](const ProgressFn& report) {
                  return s.get()->Verify(prefix, report);
                })));
          },
          nb::arg("prefix") = "", nb::arg("progress") = nb::none())
      .def(
          "verify_tenant",
          [](const StoreHandle& s, const std::string& tenant, nb::object progress) {
            return wire::ToText(
                Unwrap(Progress(std::move(progress)).Run([&](const ProgressFn& report) {
                  return s.get()->VerifyTenant(tenant, report);
                })));
          },
          nb::arg("tenant"), nb::arg("progress") = nb::none())
      .def(
          "list_prefixes",
          [](const StoreHandle& s, const std::string& json) {
            const auto spec = Unwrap(wire::FromText<ListSpec>(json, "list"));
            return wire::ToText(Unwrap(s.get()->ListPrefixes(spec)));
          },
          nb::arg("json"), Unlocked())
      .def(
          "prefix",
          [](const StoreHandle& s, const std::string& id) {
            return wire::ToText(Unwrap(s.get()->Prefix(id)));
          },
          nb::arg("prefix"), Unlocked())
      .def(
          "remove", [](const StoreHandle& s, const std::string& id) { Check(s.get()->Remove(id)); },
          nb::arg("prefix"), Unlocked())
      .def(
          "set_lifetime",
          [](const StoreHandle& s, const std::string& id, const std::string& json) {
            Check(s.get()->SetLifetime(id, Unwrap(wire::FromText<Lifetime>(json, "lifetime"))));
          },
          nb::arg("prefix"), nb::arg("json"), Unlocked())
      .def(
          "stats", [](const StoreHandle& s) { return wire::ToText(Unwrap(s.get()->Stats())); },
          Unlocked());

  m.def(
      "open",
      [](const std::string& json) {
        const auto options = Unwrap(wire::FromText<RuntimeOptions>(json, "options"));
        return StoreHandle(Unwrap(Open(options)));
      },
      nb::arg("json"), Unlocked());
  m.def(
      "connect",
      [](const std::string& address, const std::string& tenant, const std::string& token,
         uint32_t connect_timeout_ms, uint32_t call_timeout_ms, uint32_t reconnect_ms,
         bool shared_memory, bool admin, uint32_t spin_us, const std::string& tls_ca,
         const std::string& tls_certificate, const std::string& tls_key) {
        ConnectOptions options;
        options.tenant = tenant;
        options.token = token;
        options.connect_timeout_ms = connect_timeout_ms;
        options.call_timeout_ms = call_timeout_ms;
        options.reconnect_ms = reconnect_ms;
        options.shared_memory = shared_memory;
        options.admin = admin;
        options.spin_us = spin_us;
        options.tls_ca = tls_ca;
        options.tls_certificate = tls_certificate;
        options.tls_key = tls_key;
        return StoreHandle(Unwrap(Connect(address, options)));
      },
      nb::arg("address"), nb::arg("tenant"), nb::arg("token"), nb::arg("connect_timeout_ms"),
      nb::arg("call_timeout_ms"), nb::arg("reconnect_ms"), nb::arg("shared_memory"),
      nb::arg("admin"), nb::arg("spin_us"), nb::arg("tls_ca"), nb::arg("tls_certificate"),
      nb::arg("tls_key"), Unlocked());
}

}  // namespace prefixd::python
