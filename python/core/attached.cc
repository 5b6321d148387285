// Binds what an engine's attention calls for requests whose stored prefix is attached instead of
// loaded: one call a layer attends to the engine's own tokens and over the prefixes of a whole
// batch, and merges.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "prefixd/merge.h"
#include "protocol/json_text.h"
#include "python/core/handles.h"
#include "python/core/paged.h"
#include "python/core/paged_attention.h"

namespace prefixd::python {
namespace {

struct Sequence {
  Ending<PyStore> store;
  Ending<std::shared_ptr<Session>>
      session;  // null: the prefix is not to be had, and its part is left out
  uint32_t first_row, rows, own_tokens;
  // The session has the first own tokens: so many before this step, so many with it. The others are
  // in the engine's blocks.
  uint32_t had, handed;
  std::vector<int64_t> blocks;
  bool exact;                   // question tokens attend exactly, generated ones by the policy
  bool failed;                  // its later layers are left out, too
  std::vector<std::byte> k, v;  // of the last token that is handed over
};

// (sequence, code, message)
using Failed = std::tuple<size_t, std::string, std::string>;

struct LayerShapes {
  size_t rows, q_heads, key_dim, value_dim;
};

// The requests of one step of an engine, in the order in which they were added.
class AttachedBatch {
 public:
  void Add(const PySession* session, uint32_t first_row, uint32_t rows, uint32_t own_tokens,
           const Blocks& blocks, bool exact, uint32_t had, uint32_t handed) {
    const bool steps = !exact && rows == 1 && had < handed && handed < own_tokens;
    if (handed != 0 && !steps) {
      throw Failure{InvalidArgument("own tokens are handed over with steps, from each one on")};
    }
    Sequence one{.store = nullptr,
                 .session = nullptr,
                 .first_row = first_row,
                 .rows = rows,
                 .own_tokens = own_tokens,
                 .had = had,
                 .handed = handed,
                 .blocks = {},
                 .exact = exact,
                 .failed = false,
                 .k = {},
                 .v = {}};
    one.blocks.assign(blocks.data(), blocks.data() + blocks.size());
    if (session != nullptr) {
      one.session = session->get();
      one.store = session->store;
      if (store_ && one.store.get() != store_.get()) {
        throw Failure{InvalidArgument("the sessions of a batch must be of one store")};
      }
      store_ = one.store;
    }
    one.failed = !one.session;
    sequences_.push_back(std::move(one));
  }

  std::vector<Failed> Attend(uint32_t layer, const PagedRows& rows, const In& cache, DType dtype,
                             const LayerGeometry& geometry, HeadRange heads, uint32_t threads,
                             const In& q, const Out& y) {
    const LayerShapes shapes = CheckShapes(rows, q, y);
    const float* queries = Floats("q", q).data();
    float* out = Floats("y", y).data();
    const auto from = Stored("the cache", cache, dtype);
    nb::gil_scoped_release unlocked;
    lse_.resize(shapes.rows * shapes.q_heads);
    AttendOwn(rows, from, dtype, geometry, threads, shapes, queries, out);
    std::vector<Failed> failed;
    AttendPrefixes(layer, heads, shapes, rows, from, queries, &failed);
    for (const Sequence& one : sequences_) {
      if (!one.failed) Merge(one, shapes, out);
    }
    return failed;
  }

 private:
  LayerShapes CheckShapes(const PagedRows& rows, const In& q, const Out& y) const {
    LayerShapes s{0, 0, rows.key_dim(), rows.value_dim()};
    bool fits = q.ndim() == 3 && y.ndim() == 3;
    if (fits) s.rows = q.shape(0), s.q_heads = q.shape(1);
    fits = fits && q.shape(2) == s.key_dim && y.shape(0) == s.rows && y.shape(1) == s.q_heads &&
           y.shape(2) == s.value_dim;
    for (const Sequence& one : sequences_) {
      fits = fits && uint64_t{one.first_row} + one.rows <= s.rows;
    }
    if (fits) return s;
    throw Failure{InvalidArgument("attached rows: q " + ShapeOf(q) + " and y " + ShapeOf(y) +
                                  " do not fit the cache and the batch")};
  }

  void AttendOwn(const PagedRows& rows, std::span<const std::byte> cache, DType dtype,
                 const LayerGeometry& geometry, uint32_t threads, const LayerShapes& s,
                 const float* q, float* y) {
    std::vector<PagedQueries> own;
    for (const Sequence& one : sequences_) {
      const size_t row = one.first_row * s.q_heads;
      own.push_back({one.handed, one.own_tokens, one.rows, one.blocks, q + row * s.key_dim,
                     y + row * s.value_dim, lse_.data() + row});
    }
    const auto attention = Unwrap(PagedAttention::Create(rows, dtype));
    Check(attention.Attend(cache, geometry, static_cast<uint32_t>(s.q_heads), own, threads));
  }

  // Fills prefix_y_ and prefix_lse_; the generated tokens of all sequences go in one message.
  void AttendPrefixes(uint32_t layer, HeadRange heads, const LayerShapes& s, const PagedRows& rows,
                      std::span<const std::byte> cache, const float* q,
                      std::vector<Failed>* failed) {
    prefix_y_.resize(s.rows * s.q_heads * s.value_dim);
    prefix_lse_.resize(s.rows * s.q_heads);
    std::vector<StepRequest> steps;
    std::vector<size_t> stepping;
    std::optional<Error> away;  // the daemon does not answer, and nobody waits for it again
    for (size_t i = 0; i < sequences_.size(); ++i) {
      Sequence& one = sequences_[i];
      if (one.failed) continue;
      const size_t row = one.first_row * s.q_heads, n = one.rows * s.q_heads;
      const std::span in(q + row * s.key_dim, n * s.key_dim);
      const std::span y(prefix_y_.data() + row * s.value_dim, n * s.value_dim);
      const std::span lse(prefix_lse_.data() + row, n);
      if (!one.exact) {
        StepRequest step;
        step.session = one.session.get().get();
        step.layer = layer;
        step.q = in;
        step.y = y;
        step.lse = lse;
        step.heads = heads;
        if (one.handed > 0) {
          const Status handed =
              away ? Status(*away) : HandOver(layer, heads, rows, cache, &one, &step);
          Note(i, handed, &away, failed);
          if (!handed.ok()) continue;
        }
        steps.push_back(std::move(step));
        stepping.push_back(i);
        continue;
      }
      Note(i, away ? Status(*away) : AttendQuestion(one, layer, heads, s, in, y, lse), &away,
           failed);
    }
    if (steps.empty()) return;
    if (away) {
      for (const size_t i : stepping) Note(i, Status(*away), &away, failed);
      return;
    }
    store_->StepBatch(steps);
    for (size_t i = 0; i < steps.size(); ++i) Note(stepping[i], steps[i].status, &away, failed);
  }

  // Gives the session the tokens that leave the engine's blocks, the last one with the step.
  static Status HandOver(uint32_t layer, HeadRange heads, const PagedRows& rows,
                         std::span<const std::byte> cache, Sequence* one, StepRequest* step) {
    const uint32_t last = one->handed - 1;
    PREFIXD_TRY(AppendBlocks(*one->session.get(), layer, heads, one->had, last - one->had, rows,
                             cache, one->blocks));
    PREFIXD_TRY(rows.Check(cache.size(), one->blocks, last, 1));
    one->k.resize(rows.n_heads() * rows.key_bytes());
    one->v.resize(rows.n_heads() * rows.value_bytes());
    rows.Gather(cache, one->blocks, last, 1, one->k.data(), one->v.data());
    step->append = true;
    step->k = one->k;
    step->v = one->v;
    return {};
  }

  // In runs, each with a call's bound of its own: a question of thousands of tokens over a long
  // prefix takes long, and that says nothing of the daemon.
  static Status AttendQuestion(const Sequence& one, uint32_t layer, HeadRange heads,
                               const LayerShapes& s, std::span<const float> q, std::span<float> y,
                               std::span<float> lse) {
    constexpr uint32_t kRun = 256;
    for (uint32_t done = 0; done < one.rows; done += kRun) {
      const uint32_t n = std::min(kRun, one.rows - done);
      const size_t at = done * s.q_heads, rows = n * s.q_heads;
      PREFIXD_TRY(one.session->AttendExact(
          layer, heads, n, q.subspan(at * s.key_dim, rows * s.key_dim),
          y.subspan(at * s.value_dim, rows * s.value_dim), lse.subspan(at, rows)));
    }
    return {};
  }

  void Note(size_t sequence, const Status& status, std::optional<Error>* away,
            std::vector<Failed>* failed) {
    if (status.ok()) return;
    const Error& error = status.error();
    sequences_[sequence].failed = true;
    failed->emplace_back(sequence, std::string(CodeName(error.code)), error.message);
    if (error.code == Code::kDeadlineExceeded || error.code == Code::kUnavailable) *away = error;
  }

  void Merge(const Sequence& one, const LayerShapes& s, float* y) {
    const size_t begin = one.first_row * s.q_heads, end = begin + one.rows * s.q_heads;
    for (size_t row = begin; row < end; ++row) {
      MergeStates({y + row * s.value_dim, s.value_dim}, &lse_[row],
                  std::span<const float>(prefix_y_).subspan(row * s.value_dim, s.value_dim),
                  prefix_lse_[row]);
    }
  }

  Ending<PyStore> store_;
  std::vector<Sequence> sequences_;
  std::vector<float> lse_, prefix_y_, prefix_lse_;
};

using Heads = std::tuple<uint32_t, uint32_t>;  // KV heads: the first, and how many

}  // namespace

void BindAttached(nb::module_& m) {
  nb::class_<AttachedBatch>(m, "AttachedBatch")
      .def(nb::init<>())
      .def("add", &AttachedBatch::Add, nb::arg("session").none(), nb::arg("first_row"),
           nb::arg("rows"), nb::arg("own_tokens"), nb::arg("blocks"), nb::arg("exact"),
           nb::arg("had") = 0, nb::arg("handed") = 0)
      .def(
          "attend",
          [](AttachedBatch& batch, uint32_t layer, const PagedRows& rows, const In& cache,
             const std::string& dtype, float scale, float softcap, const Heads& heads,
             uint32_t threads, const In& q, const Out& y) {
            const LayerGeometry geometry{.scale = scale, .softcap = softcap};
            return batch.Attend(layer, rows, cache, Unwrap(DTypeFromName(dtype)), geometry,
                                {std::get<0>(heads), std::get<1>(heads)}, threads, q, y);
          },
          nb::arg("layer"), nb::arg("rows"), nb::arg("cache"), nb::arg("dtype"), nb::arg("scale"),
          nb::arg("softcap"), nb::arg("heads"), nb::arg("threads"), nb::arg("q"),
          nb::arg("y").noconvert());

  // Attends to tokens [first, tokens) in the engine's blocks, with the last q.shape(0) of them.
  m.def(
      "attend_paged",
      [](const PagedRows& rows, const In& cache, const std::string& dtype, const Blocks& blocks,
         uint32_t tokens, float scale, float softcap, uint32_t threads, const In& q, const Out& y,
         const Out& lse, uint32_t first) {
        const auto in = Floats("q", q);
        const auto out = Floats("y", y), out_lse = Floats("lse", lse);
        const bool fits = q.ndim() == 3 && y.ndim() == 3 && lse.ndim() == 2 &&
                          q.shape(2) == rows.key_dim() && y.shape(0) == q.shape(0) &&
                          y.shape(1) == q.shape(1) && y.shape(2) == rows.value_dim() &&
                          lse.shape(0) == q.shape(0) && lse.shape(1) == q.shape(1);
        if (!fits) {
          throw Failure{InvalidArgument("q " + ShapeOf(q) + ", y " + ShapeOf(y) + ", lse " +
                                        ShapeOf(lse) + " do not fit together")};
        }
        const DType type = Unwrap(DTypeFromName(dtype));
        const auto from = Stored("the cache", cache, type);
        const PagedQueries one{first,         tokens,    static_cast<uint32_t>(q.shape(0)),
                               Span(blocks),  in.data(), out.data(),
                               out_lse.data()};
        nb::gil_scoped_release unlocked;
        const auto attention = Unwrap(PagedAttention::Create(rows, type));
        Check(attention.Attend(from, {.scale = scale, .softcap = softcap},
                               static_cast<uint32_t>(q.shape(1)), {&one, 1}, threads));
      },
      nb::arg("rows"), nb::arg("cache"), nb::arg("dtype"), nb::arg("blocks"), nb::arg("tokens"),
      nb::arg("scale"), nb::arg("softcap"), nb::arg("threads"), nb::arg("q"),
      nb::arg("y").noconvert(), nb::arg("lse").noconvert(), nb::arg("first") = 0);

  // Reads a policy and returns it with every field; the error says what is wrong with it.
  m.def(
      "read_policy",
      [](const std::string& json) {
        return wire::ToText(Unwrap(wire::FromText<StepPolicy>(json, "policy")));
      },
      nb::arg("json"), Unlocked());
}

}  // namespace prefixd::python
