// Attends to the tokens that an engine holds itself, and joins them with the state over a stored
// prefix. Frameworks' attention does not return its normaliser, and their small operations each
// cost more than the arithmetic of one token.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>
#include <vector>

#include "attention/step/step.h"
#include "prefixd/merge.h"
#include "python/core/handles.h"

namespace prefixd::python {
namespace {

// The rows of all KV heads of a batch: [B][n_kv_heads][m][dim], each row in one piece.
using Rows = nb::ndarray<nb::ro, nb::ndim<4>, nb::device::cpu>;
using Seen = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

DType TypeOf(const char* name, const Rows& rows) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    const auto code =
        dtype == DType::kBf16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
    if (rows.dtype().code == static_cast<uint8_t>(code) && rows.dtype().lanes == 1 &&
        rows.dtype().bits == 8 * DTypeBytes(dtype)) {
      return dtype;
    }
  }
  throw Failure{InvalidArgument(std::string(name) + " must be float32, bfloat16 or float16")};
}

const std::byte* RowAt(const Rows& rows, DType dtype, size_t b, size_t head, size_t token) {
  const int64_t elements = static_cast<int64_t>(b) * rows.stride(0) +
                           static_cast<int64_t>(head) * rows.stride(1) +
                           static_cast<int64_t>(token) * rows.stride(2);
  return static_cast<const std::byte*>(rows.data()) +
         elements * static_cast<int64_t>(DTypeBytes(dtype));
}

struct Shapes {
  size_t batch, kv_heads, q_heads, tokens;
  RowShape row;
};

Shapes CheckShapes(const In& q, const Rows& k, const Rows& v, const Out& y, const Out& lse,
                   const std::optional<Seen>& seen) {
  Shapes s{k.shape(0), k.shape(1), 0, k.shape(2), {}};
  s.row = {static_cast<uint32_t>(k.shape(3)), static_cast<uint32_t>(v.shape(3)), TypeOf("k", k)};
  bool fits = TypeOf("v", v) == s.row.dtype && q.ndim() == 3 && y.ndim() == 3 && lse.ndim() == 2;
  for (size_t i = 0; i < 3; ++i) fits = fits && v.shape(i) == k.shape(i);
  if (fits) s.q_heads = q.shape(1);
  fits = fits && s.kv_heads > 0 && s.q_heads % s.kv_heads == 0 && q.shape(0) == s.batch &&
         q.shape(2) == s.row.key_dim && y.shape(0) == s.batch && y.shape(1) == s.q_heads &&
         y.shape(2) == s.row.value_dim && lse.shape(0) == s.batch && lse.shape(1) == s.q_heads &&
         (!seen || (seen->shape(0) == s.batch && seen->shape(1) == s.tokens));
  if (!fits) {
    throw Failure{InvalidArgument(
        "own tokens: q " + ShapeOf(q) + ", k " + ShapeOf(k) + ", v " + ShapeOf(v) + ", y " +
        ShapeOf(y) + ", lse " + ShapeOf(lse) +
        " do not fit together as [B][Hq][dh], [B][Hkv][m][dh], [B][Hkv][m][dv], [B][Hq][dv], "
        "[B][Hq], with k and v of one dtype")};
  }
  if (s.tokens > 0 && (k.stride(3) != 1 || v.stride(3) != 1)) {
    throw Failure{InvalidArgument("own tokens: the elements of a row must lie side by side")};
  }
  return s;
}

// Joins exact attention of q over the rows [B][..][m] that `seen` [B][m] does not hide into the
// states (y, lse); an empty state has lse -inf.
void MergeOwnTokens(const In& q, const Rows& k, const Rows& v, float scale, float softcap,
                    const std::optional<Seen>& seen, const Out& y, const Out& lse) {
  const Shapes s = CheckShapes(q, k, v, y, lse, seen);
  const auto queries = Floats("q", q);
  const auto out = Floats("y", y), out_lse = Floats("lse", lse);
  const uint8_t* shown = seen ? seen->data() : nullptr;
  nb::gil_scoped_release unlocked;
  const LayerGeometry layer{.scale = scale, .softcap = softcap};
  const size_t group = s.q_heads / s.kv_heads, dh = s.row.key_dim, dv = s.row.value_dim;
  std::vector<RowRef> rows;
  std::vector<float> own(group * dv), own_lse(group);
  for (size_t b = 0; b < s.batch; ++b) {
    for (size_t head = 0; head < s.kv_heads; ++head) {
      rows.clear();
      for (size_t t = 0; t < s.tokens; ++t) {
        if (shown != nullptr && shown[b * s.tokens + t] == 0) continue;
        rows.push_back({RowAt(k, s.row.dtype, b, head, t), RowAt(v, s.row.dtype, b, head, t)});
      }
      const size_t first = b * s.q_heads + head * group;
      Check(ExactAttention(queries.subspan(first * dh, group * dh), static_cast<uint32_t>(group),
                           layer, ScatteredRows(rows, s.row), own, own_lse));
      for (size_t g = 0; g < group; ++g) {
        MergeStates(out.subspan((first + g) * dv, dv), &out_lse[first + g],
                    std::span(own).subspan(g * dv, dv), own_lse[g]);
      }
    }
  }
}

}  // namespace

void BindOwnTokens(nb::module_& m) {
  m.def("merge_own_tokens", &MergeOwnTokens, nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("scale"), nb::arg("softcap"), nb::arg("seen").none(), nb::arg("y").noconvert(),
        nb::arg("lse").noconvert());
}

}  // namespace prefixd::python
