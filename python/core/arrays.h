// Takes arrays from NumPy, PyTorch or anything else with DLPack or the buffer protocol, without a
// copy, and explains what is wrong with arrays of another dtype, shape or layout.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <span>
#include <string>

#include "prefixd/kv_shape.h"

namespace prefixd::python {

namespace nb = nanobind;

// Carries a C++ Error until it becomes an exception of prefixd.errors.
struct Failure {
  Error error;
};

inline void Check(const Status& status) {
  if (!status.ok()) throw Failure{status.error()};
}
template <typename T>
T Unwrap(Result<T> result) {
  if (!result.ok()) throw Failure{result.error()};
  return std::move(result).value();
}

using In = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
// Bound as nb::arg(...).noconvert(): nanobind would else take a copy of what is not contiguous or
// lies on a device, and what is written there would be lost.
using Out = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename Array>
std::string ShapeOf(const Array& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i) {
    text += (i ? ", " : "") + std::to_string(array.shape(i));
  }
  return text + "]";
}

template <typename Array>
void CheckFloat32(const char* name, const Array& array) {
  if (array.dtype() != nb::dtype<float>()) {
    throw Failure{InvalidArgument(std::string(name) + " must be float32")};
  }
}

inline std::span<const float> Floats(const char* name, const In& array) {
  CheckFloat32(name, array);
  return {static_cast<const float*>(array.data()), array.size()};
}
inline std::span<float> Floats(const char* name, const Out& array) {
  CheckFloat32(name, array);
  return {static_cast<float*>(array.data()), array.size()};
}

// Accepts the storage dtype, or unsigned integers of its width as its bits (NumPy has no bf16).
template <typename Array>
void CheckStored(const char* name, const Array& array, DType dtype) {
  const auto given = array.dtype();
  const auto code = [&](nb::dlpack::dtype_code c) { return given.code == static_cast<uint8_t>(c); };
  const bool width = given.bits == 8 * DTypeBytes(dtype) && given.lanes == 1;
  const bool own =
      code(dtype == DType::kBf16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float);
  if (width && (own || code(nb::dlpack::dtype_code::UInt))) return;
  throw Failure{InvalidArgument(std::string(name) + " is not " + std::string(DTypeName(dtype)) +
                                ", in which this model is stored (nor its bits as unsigned "
                                "integers)")};
}

inline std::span<const std::byte> Stored(const char* name, const In& array, DType dtype) {
  CheckStored(name, array, dtype);
  return {static_cast<const std::byte*>(array.data()), array.nbytes()};
}
inline std::span<std::byte> Stored(const char* name, const Out& array, DType dtype) {
  CheckStored(name, array, dtype);
  return {static_cast<std::byte*>(array.data()), array.nbytes()};
}

}  // namespace prefixd::python
