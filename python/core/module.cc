// The extension module prefixd._core: client_lib/client.h for Python. Specs, policies and reports
// cross as JSON text (client_lib/json_text.h), so that a new field of the C++ types needs no change
// here; tensors cross in place. Everything that may take time runs without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/step.h"
#include "client_lib/client.h"
#include "client_lib/json_text.h"
#include "python/core/arrays.h"

namespace prefixd::python {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// The caller's progress function, from a thread without the lock. An exception in it cancels and is
// raised again when the call is over.
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
      return go_on.is_none() || nb::cast<bool>(go_on);
    } catch (...) {
      raised_ = std::current_exception();
      return false;
    }
  }

  nb::object callback_;
  std::exception_ptr raised_;
};

struct PyPut {
  std::shared_ptr<Client> client;
  std::unique_ptr<PutStream> put;
  DType dtype;

  PutStream& open() const {
    if (put) return *put;
    throw Failure{{Code::kFailedPrecondition, "this put was committed or aborted already"}};
  }
};

// Lets go of its store when it is detached, so that an embedded one can be opened again.
struct PySession {
  std::shared_ptr<Client> client;
  std::shared_ptr<Session> session;

  // Call with the interpreter's lock: another thread may detach meanwhile.
  std::shared_ptr<Session> get() const {
    if (session) return session;
    throw Failure{{Code::kFailedPrecondition, "the session was detached; attach again"}};
  }
};

using PyClient = std::shared_ptr<Client>;
class ClientHandle {
 public:
  explicit ClientHandle(PyClient client) : client_(std::move(client)) {}

  PyClient get() const {
    std::lock_guard lock(*mutex_);
    if (client_) return client_;
    throw Failure{{Code::kFailedPrecondition, "this client is closed"}};
  }
  PyClient Take() {
    std::lock_guard lock(*mutex_);
    return std::exchange(client_, nullptr);
  }

 private:
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();  // movable
  PyClient client_;
};

DType StoredDType(Client& client, const std::string& model) {
  for (const ModelSpec& spec : Unwrap(client.Models())) {
    if (spec.name == model) return spec.geometry.dtype;
  }
  throw Failure{{Code::kNotFound, "no model named '" + model + "' is registered"}};
}

std::vector<uint32_t> Copy(const Tokens& tokens) {
  return {tokens.data(), tokens.data() + tokens.size()};
}

void BindClient(nb::module_& m) {
  nb::class_<ClientHandle>(m, "Client")
      .def("close",
           [](ClientHandle& c) {
             nb::gil_scoped_release unlocked;
             c.Take().reset();
           })
      .def(
          "register_model",
          [](const ClientHandle& c, const std::string& json) {
            Check(c.get()->RegisterModel(Unwrap(wire::FromText<ModelSpec>(json, "model"))));
          },
          nb::arg("json"), Unlocked())
      .def(
          "models", [](const ClientHandle& c) { return wire::ToText(Unwrap(c.get()->Models())); },
          Unlocked())
      .def(
          "begin_put",
          [](const ClientHandle& c, const std::string& json, const Tokens& tokens) {
            auto spec = Unwrap(wire::FromText<PutSpec>(json, "put"));
            spec.tokens = Copy(tokens);
            nb::gil_scoped_release unlocked;
            const DType dtype = StoredDType(*c.get(), spec.model);
            return PyPut{c.get(), Unwrap(c.get()->BeginPut(spec)), dtype};
          },
          nb::arg("json"), nb::arg("tokens"))
      .def(
          "match",
          [](const ClientHandle& c, const std::string& model, const std::string& tenant,
             const Tokens& tokens) {
            nb::gil_scoped_release unlocked;
            const auto match =
                Unwrap(c.get()->Match(model, tenant, {tokens.data(), tokens.size()}));
            return std::make_tuple(match.prefix, match.n_tokens, match.stored_tokens);
          },
          nb::arg("model"), nb::arg("tenant"), nb::arg("tokens"))
      .def(
          "attach",
          [](const ClientHandle& c, const std::string& json, const Tokens& tokens) {
            auto spec = Unwrap(wire::FromText<AttachSpec>(json, "attach"));
            spec.tokens = Copy(tokens);
            nb::gil_scoped_release unlocked;
            return PySession{c.get(), Unwrap(c.get()->Attach(spec))};
          },
          nb::arg("json"), nb::arg("tokens"))
      .def(
          "wait_ready",
          [](const ClientHandle& c, const std::string& prefix, nb::object progress) {
            Check(Progress(std::move(progress)).Run([&](const ProgressFn& report) {
              return c.get()->WaitReady(prefix, report);
            }));
          },
          nb::arg("prefix"), nb::arg("progress") = nb::none())
      .def(
          "verify",
          [](const ClientHandle& c, const std::string& prefix, nb::object progress) {
            return wire::ToText(
                Unwrap(Progress(std::move(progress)).Run([&](const ProgressFn& report) {
                  return c.get()->Verify(prefix, report);
                })));
          },
          nb::arg("prefix") = "", nb::arg("progress") = nb::none())
      .def(
          "prefixes",
          [](const ClientHandle& c) { return wire::ToText(Unwrap(c.get()->Prefixes())); },
          Unlocked())
      .def(
          "prefix",
          [](const ClientHandle& c, const std::string& id) {
            return wire::ToText(Unwrap(c.get()->Prefix(id)));
          },
          nb::arg("prefix"), Unlocked())
      .def(
          "remove",
          [](const ClientHandle& c, const std::string& id) { Check(c.get()->Remove(id)); },
          nb::arg("prefix"), Unlocked())
      .def(
          "set_retention",
          [](const ClientHandle& c, const std::string& id, const std::string& json) {
            Check(c.get()->SetRetention(id, Unwrap(wire::FromText<Retention>(json, "retention"))));
          },
          nb::arg("prefix"), nb::arg("json"), Unlocked())
      .def(
          "stats", [](const ClientHandle& c) { return wire::ToText(Unwrap(c.get()->Stats())); },
          Unlocked());

  m.def(
      "open",
      [](const std::string& json) {
        const auto options = Unwrap(wire::FromText<RuntimeOptions>(json, "options"));
        return ClientHandle(Unwrap(Client::OpenEmbedded(options)));
      },
      nb::arg("json"), Unlocked());
  m.def(
      "connect",
      [](const std::string& address, const std::string& tenant, const std::string& token,
         uint32_t connect_timeout_ms, uint32_t call_timeout_ms, bool shared_memory, bool admin) {
        ConnectOptions options;
        options.tenant = tenant;
        options.token = token;
        options.connect_timeout_ms = connect_timeout_ms;
        options.call_timeout_ms = call_timeout_ms;
        options.shared_memory = shared_memory;
        options.admin = admin;
        return ClientHandle(Unwrap(Client::Connect(address, options)));
      },
      nb::arg("address"), nb::arg("tenant"), nb::arg("token"), nb::arg("connect_timeout_ms"),
      nb::arg("call_timeout_ms"), nb::arg("shared_memory"), nb::arg("admin"), Unlocked());
}

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
            const auto client = std::move(p.client);  // outlives the put
            const auto put = std::move(p.put);
            return wire::ToText(Unwrap(put->Commit()));
          },
          Unlocked())
      .def(
          "abort",
          [](PyPut& p) {
            if (p.put) p.put->Abort();
            p.put.reset();
            p.client.reset();
          },
          Unlocked());
}

void BindSession(nb::module_& m) {
  nb::class_<PySession>(m, "Session")
      .def("info", [](const PySession& s) { return wire::ToText(s.get()->info()); })
      .def("policy", [](const PySession& s) { return wire::ToText(s.get()->policy()); })
      .def(
          "set_policy",
          [](const PySession& s, const std::string& json) {
            const auto policy = Unwrap(wire::FromText<StepPolicy>(json, "policy"));
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->SetPolicy(policy));
          },
          nb::arg("json"))
      .def(
          "step",
          [](const PySession& s, uint32_t layer, const In& q, const Out& y, const Out& lse) {
            const auto in = Floats("q", q);
            const auto out = Floats("y", y), out_lse = Floats("lse", lse);
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->Step(layer, in, out, out_lse, nullptr));
          },
          nb::arg("layer"), nb::arg("q"), nb::arg("y"), nb::arg("lse"))
      .def(
          "attend_exact",
          [](const PySession& s, uint32_t layer, const In& q, const Out& y, const Out& lse) {
            if (q.ndim() != 3) {
              throw Failure{
                  InvalidArgument("q must be [n][n_q_heads][key_dim], not " + ShapeOf(q))};
            }
            const auto in = Floats("q", q);
            const auto out = Floats("y", y), out_lse = Floats("lse", lse);
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->AttendExact(layer, uint32_t(q.shape(0)), in, out, out_lse));
          },
          nb::arg("layer"), nb::arg("q"), nb::arg("y"), nb::arg("lse"))
      .def(
          "read_rows",
          [](const PySession& s, uint32_t layer, uint32_t kv_head, const Tokens& ids,
             const Out& out) {
            const auto bytes = Stored("out", out, s.get()->info().geometry.dtype);
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->ReadRows(layer, kv_head, {ids.data(), ids.size()}, bytes));
          },
          nb::arg("layer"), nb::arg("kv_head"), nb::arg("ids"), nb::arg("out"))
      .def(
          "read_range",
          [](const PySession& s, uint32_t layer, uint32_t kv_head, uint32_t begin, uint32_t end,
             const Out& out) {
            const auto bytes = Stored("out", out, s.get()->info().geometry.dtype);
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->ReadRange(layer, kv_head, {begin, end}, bytes));
          },
          nb::arg("layer"), nb::arg("kv_head"), nb::arg("begin"), nb::arg("end"), nb::arg("out"))
      .def(
          "select",
          [](const PySession& s, uint32_t layer, uint32_t kv_head, const In& q, uint32_t k) {
            const auto in = Floats("q", q);
            const auto selection = [&, session = s.get()] {
              nb::gil_scoped_release unlocked;
              return Unwrap(session->Select(layer, kv_head, in, k));
            }();
            std::vector<std::tuple<float, int>> cuts;
            for (const Cut& cut : selection.cuts) {
              cuts.emplace_back(cut.score, static_cast<int>(cut.kind));
            }
            return std::make_tuple(selection.ids, cuts);
          },
          nb::arg("layer"), nb::arg("kv_head"), nb::arg("q"), nb::arg("k"))
      .def("report",
           [](const PySession& s) {
             const auto session = s.get();
             nb::gil_scoped_release unlocked;
             return wire::ToText(session->report());
           })
      .def("detach", [](PySession& s) {
        const auto session = s.get();
        auto client = std::exchange(s.client, nullptr);
        s.session.reset();
        nb::gil_scoped_release unlocked;
        std::string report = wire::ToText(Unwrap(session->Detach()));
        client.reset();
        return report;
      });

  // One layer step of each of several sessions of one client:
  //   q [B][n_q_heads][key_dim] -> y [B][n_q_heads][value_dim], lse [B][n_q_heads].
  m.def(
      "step_batch",
      [](const std::vector<const PySession*>& sessions, uint32_t layer, const In& q, const Out& y,
         const Out& lse) {
        const size_t n = sessions.size();
        const auto in = Floats("q", q);
        const auto out = Floats("y", y), out_lse = Floats("lse", lse);
        if (n == 0) return;
        if (in.size() % n || out.size() % n || out_lse.size() % n) {
          throw Failure{InvalidArgument("q, y and lse must have one entry for each of the " +
                                        std::to_string(n) + " sessions")};
        }
        std::vector<StepRequest> requests(n);
        std::vector<std::shared_ptr<Session>> held;
        for (size_t i = 0; i < n; ++i) {
          held.push_back(sessions[i]->get());
          if (sessions[i]->client != sessions[0]->client) {
            throw Failure{InvalidArgument("the sessions of a batch must be of one client")};
          }
          const auto part = [&](auto span) {
            return span.subspan(i * (span.size() / n), span.size() / n);
          };
          requests[i].session = held[i].get();
          requests[i].layer = layer;
          requests[i].q = part(in);
          requests[i].y = part(out);
          requests[i].lse = part(out_lse);
        }
        const PyClient client = sessions[0]->client;
        nb::gil_scoped_release unlocked;
        client->StepBatch(requests);
        for (const StepRequest& request : requests) Check(request.status);
      },
      nb::arg("sessions"), nb::arg("layer"), nb::arg("q"), nb::arg("y"), nb::arg("lse"));
}

// y_a, lse_a <- merged with y_b, lse_b; y [n][value_dim], lse [n].
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

// prefixd.errors makes the exception for a code.
void Raise(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    const nb::object error =
        nb::module_::import_("prefixd.errors")
            .attr("make")(std::string(CodeName(failure.error.code)), failure.error.message);
    PyErr_SetObject(error.type().ptr(), error.ptr());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  nb::register_exception_translator(Raise);
  m.attr("__version__") = PREFIXD_VERSION;
  BindClient(m);
  BindPut(m);
  BindSession(m);
  m.def("merge_states", &Merge, nb::arg("y_a"), nb::arg("lse_a"), nb::arg("y_b"), nb::arg("lse_b"));
}

}  // namespace prefixd::python
