#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "protocol/json_text.h"
#include "python/core/handles.h"

namespace prefixd::python {
namespace {

using Heads = std::tuple<uint32_t, uint32_t>;  // KV heads: the first, and how many
HeadRange RangeOf(const Heads& heads) { return {std::get<0>(heads), std::get<1>(heads)}; }

}  // namespace

void BindSession(nb::module_& m) {
  nb::class_<PySession>(m, "Session")
      .def("info", [](const PySession& s) { return wire::ToText(s.get()->info()); })
      .def("policy", [](const PySession& s) { return wire::ToText(s.get()->policy()); })
      .def("cancel", [](const PySession& s) { s.get()->Cancel(); })
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
          [](const PySession& s, uint32_t layer, const In& q, const Out& y, const Out& lse,
             const Heads& heads) {
            const auto in = Floats("q", q);
            const auto out = Floats("y", y), out_lse = Floats("lse", lse);
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->Step(layer, RangeOf(heads), in, out, out_lse, nullptr));
          },
          nb::arg("layer"), nb::arg("q"), nb::arg("y").noconvert(), nb::arg("lse").noconvert(),
          nb::arg("heads"))
      .def(
          "attend_exact",
          [](const PySession& s, uint32_t layer, const In& q, const Out& y, const Out& lse,
             const Heads& heads) {
            if (q.ndim() != 3) {
              throw Failure{
                  InvalidArgument("q must be [n][n_q_heads][key_dim], not " + ShapeOf(q))};
            }
            const auto in = Floats("q", q);
            const auto out = Floats("y", y), out_lse = Floats("lse", lse);
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->AttendExact(layer, RangeOf(heads), uint32_t(q.shape(0)), in, out,
                                       out_lse));
          },
          nb::arg("layer"), nb::arg("q"), nb::arg("y").noconvert(), nb::arg("lse").noconvert(),
          nb::arg("heads"))
      .def(
          "append",
          [](const PySession& s, uint32_t layer, const In& k, const In& v, const Heads& heads) {
            if (k.ndim() != 3 || v.ndim() != 3 || k.shape(0) != v.shape(0)) {
              throw Failure{
                  InvalidArgument("k and v must be [n][n_kv_heads][dim] with the same n, not " +
                                  ShapeOf(k) + " and " + ShapeOf(v))};
            }
            const auto session = s.get();
            const DType dtype = session->info().geometry.dtype;
            const auto keys = Stored("k", k, dtype), values = Stored("v", v, dtype);
            nb::gil_scoped_release unlocked;
            Check(session->Append(layer, RangeOf(heads), uint32_t(k.shape(0)), keys, values));
          },
          nb::arg("layer"), nb::arg("k"), nb::arg("v"), nb::arg("heads"))
      .def(
          "step_append",
          [](const PySession& s, uint32_t layer, const In& q, const In& k, const In& v,
             const Out& y, const Out& lse, const Heads& heads) {
            const auto session = s.get();
            const DType dtype = session->info().geometry.dtype;
            const auto in = Floats("q", q);
            const auto keys = Stored("k", k, dtype), values = Stored("v", v, dtype);
            const auto out = Floats("y", y), out_lse = Floats("lse", lse);
            nb::gil_scoped_release unlocked;
            Check(session->StepAppend(layer, RangeOf(heads), in, keys, values, out, out_lse,
                                      nullptr));
          },
          nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("y").noconvert(),
          nb::arg("lse").noconvert(), nb::arg("heads"))
      .def(
          "truncate",
          [](const PySession& s, uint32_t n) {
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->Truncate(n));
          },
          nb::arg("n"))
      .def("fork",
           [](const PySession& s) {
             const auto session = s.get();
             PySession fork{s.store, nullptr};
             nb::gil_scoped_release unlocked;
             fork.session = Unwrap(session->Fork());
             return fork;
           })
      .def(
          "persist",
          [](const PySession& s, const std::string& json, const Tokens& tokens) {
            const auto spec = Unwrap(wire::FromText<PersistSpec>(json, "persist"));
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            return wire::ToText(
                Unwrap(session->Persist(std::span(tokens.data(), tokens.size()), spec)));
          },
          nb::arg("json"), nb::arg("tokens"))
      .def(
          "fork_persisted",
          [](const PySession& s, uint32_t window) {
            const auto session = s.get();
            PySession next{s.store, nullptr};
            nb::gil_scoped_release unlocked;
            next.session = Unwrap(session->ForkPersisted(window));
            return next;
          },
          nb::arg("window"))
      .def(
          "read_rows",
          [](const PySession& s, uint32_t layer, uint32_t kv_head, const Tokens& ids,
             const Out& out) {
            const auto bytes = Stored("out", out, s.get()->info().geometry.dtype);
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->ReadRows(layer, kv_head, {ids.data(), ids.size()}, bytes));
          },
          nb::arg("layer"), nb::arg("kv_head"), nb::arg("ids"), nb::arg("out").noconvert())
      .def(
          "read_range",
          [](const PySession& s, uint32_t layer, uint32_t kv_head, uint32_t begin, uint32_t end,
             const Out& out) {
            const auto bytes = Stored("out", out, s.get()->info().geometry.dtype);
            const auto session = s.get();
            nb::gil_scoped_release unlocked;
            Check(session->ReadRange(layer, kv_head, {begin, end}, bytes));
          },
          nb::arg("layer"), nb::arg("kv_head"), nb::arg("begin"), nb::arg("end"),
          nb::arg("out").noconvert())
      // Reads rows [begin, end) of all heads of layers to where they shall be: (layer, k, v) of
      // each.
      .def(
          "read_layers",
          [](const PySession& s, uint32_t begin, uint32_t end,
             const std::vector<std::tuple<uint32_t, Out, Out>>& layers) {
            const auto session = s.get();
            const DType dtype = session->info().geometry.dtype;
            std::vector<LayerRead> reads;
            for (const auto& [layer, k, v] : layers) {
              reads.push_back({{.layer = layer, .tokens = {begin, end}, .heads = {}},
                               Stored("k", k, dtype),
                               Stored("v", v, dtype)});
            }
            Status read;
            {
              nb::gil_scoped_release unlocked;
              read = session->ReadLayers(reads, [](size_t) {
                const nb::gil_scoped_acquire locked;
                return PyErr_CheckSignals() == 0;  // Ctrl-C, where this is the main thread
              });
            }
            if (PyErr_Occurred() != nullptr) throw nb::python_error();
            Check(read);
          },
          nb::arg("begin"), nb::arg("end"), nb::arg("layers").noconvert())
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
             return wire::ToText(Unwrap(session->report()));
           })
      .def("detach", [](PySession& s) {
        const Ending<std::shared_ptr<Session>> session(s.get());
        auto store = std::exchange(s.store, nullptr);
        s.session.reset();
        nb::gil_scoped_release unlocked;
        std::string report = wire::ToText(Unwrap(session->Detach()));
        store.reset();
        return report;
      });

  // Runs one layer step of each of several sessions of one store, for the query heads of `heads`:
  //   q [B][h][key_dim] -> y [B][h][value_dim], lse [B][h].
  m.def(
      "step_batch",
      [](const std::vector<const PySession*>& sessions, uint32_t layer, const In& q, const Out& y,
         const Out& lse, const Heads& heads, const std::optional<In>& k,
         const std::optional<In>& v) {
        const size_t n = sessions.size();
        const auto in = Floats("q", q);
        const auto out = Floats("y", y), out_lse = Floats("lse", lse);
        if (n == 0) return;
        if (in.size() % n || out.size() % n || out_lse.size() % n) {
          throw Failure{InvalidArgument("q, y and lse must have one entry for each of the " +
                                        std::to_string(n) + " sessions")};
        }
        if (k.has_value() != v.has_value()) {
          throw Failure{InvalidArgument("a batch that appends has both k and v")};
        }
        std::span<const std::byte> keys, values;
        if (k) {
          const DType dtype = sessions[0]->get()->info().geometry.dtype;
          keys = Stored("k", *k, dtype), values = Stored("v", *v, dtype);
          if (keys.size() % n || values.size() % n) {
            throw Failure{InvalidArgument("k and v must have one entry for each of the " +
                                          std::to_string(n) + " sessions")};
          }
        }
        std::vector<StepRequest> requests(n);
        std::vector<std::shared_ptr<Session>> held;
        for (size_t i = 0; i < n; ++i) {
          held.push_back(sessions[i]->get());
          if (sessions[i]->store.get() != sessions[0]->store.get()) {
            throw Failure{InvalidArgument("the sessions of a batch must be of one store")};
          }
          const auto part = [&](auto span) {
            return span.subspan(i * (span.size() / n), span.size() / n);
          };
          requests[i].session = held[i].get();
          requests[i].layer = layer;
          requests[i].q = part(in);
          requests[i].y = part(out);
          requests[i].lse = part(out_lse);
          requests[i].heads = RangeOf(heads);
          requests[i].append = k.has_value();
          requests[i].k = part(keys);
          requests[i].v = part(values);
        }
        const Ending<PyStore> store(sessions[0]->store);
        nb::gil_scoped_release unlocked;
        store->StepBatch(requests);
        for (const StepRequest& request : requests) Check(request.status);
      },
      nb::arg("sessions"), nb::arg("layer"), nb::arg("q"), nb::arg("y").noconvert(),
      nb::arg("lse").noconvert(), nb::arg("heads"), nb::arg("k").none(), nb::arg("v").none());
}

}  // namespace prefixd::python
