#include "index/codes/key_codes.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>

#include "attention/kernels/kernels.h"
#include "attention/rows/padded_queries.h"
#include "attention/rows/rows.h"
#include "index/codes/code_weights.h"

namespace prefixd {

std::vector<float> ProjectOnDirections(const CodeBook& book, std::span<const float> queries,
                                       uint32_t heads) {
  std::vector<float> out(heads * book.components());
  if (out.empty()) return out;
  const std::vector<double> padded = PadQueries<double>(queries, heads, book.key_dim);
  Kernels().score(padded.data(), PadUp(book.key_dim), heads,
                  {reinterpret_cast<const std::byte*>(book.directions.data()),
                   book.key_dim * sizeof(uint16_t), book.components(), book.key_dim, DType::kBf16},
                  1, out.data(), book.components());
  return out;
}

Status CodeBook::Validate() const {
  const auto corrupt = [](const char* what) {
    return Status(Error{Code::kCorrupt, std::string("codebook: ") + what});
  };
  if (key_dim == 0 || centre.size() != key_dim || components() > key_dim ||
      directions.size() != components() * key_dim) {
    return corrupt("shapes disagree");
  }
  if (!std::all_of(digits.begin(), digits.end(), [](uint8_t d) { return d <= kMaxCodeDigits; }) ||
      std::accumulate(digits.begin(), digits.end(), 0u) > CodeFields(key_dim)) {
    return corrupt("more digits than there is room for");
  }
  if (!std::all_of(centre.begin(), centre.end(), [](float x) { return std::isfinite(x); }) ||
      !std::all_of(directions.begin(), directions.end(),
                   [](uint16_t x) { return std::isfinite(Bf16ToFloat(x)); })) {
    return corrupt("a value is not finite");
  }
  return {};
}

void PackCode(const CodeBook& book, std::span<const uint8_t> coordinates, size_t key,
              std::span<std::byte> codes) {
  assert(coordinates.size() == book.components());
  uint32_t field = 0;
  for (size_t i = 0; i < coordinates.size(); ++i) {
    uint32_t rest = coordinates[i];
    for (uint8_t j = 0; j < book.digits[i]; ++j, ++field, rest /= 4) {
      const CodePlace place = PlaceOfCode(book.key_dim, key, field);
      codes[place.byte] |= std::byte((rest % 4) << place.shift);
    }
  }
}

void DecodeKey(const CodeBook& book, std::span<const std::byte> codes, size_t key,
               std::span<float> out) {
  std::copy(book.centre.begin(), book.centre.end(), out.begin());
  uint32_t field = 0;
  for (size_t i = 0; i < book.components(); ++i) {
    uint32_t coordinate = 0;
    for (uint8_t j = 0; j < book.digits[i]; ++j, ++field) {
      const CodePlace place = PlaceOfCode(book.key_dim, key, field);
      coordinate |= (std::to_integer<uint32_t>(codes[place.byte]) >> place.shift & 3) << 2 * j;
    }
    const uint16_t* direction = book.directions.data() + i * book.key_dim;
    for (uint32_t d = 0; d < book.key_dim; ++d) {
      out[d] += float(coordinate) * Bf16ToFloat(direction[d]);
    }
  }
}

CodeQueries QuantiseQueries(std::span<const float> along_all, std::span<const uint8_t> digits,
                            uint32_t heads, uint32_t fields, float scale,
                            std::span<const double> reserved) {
  assert(along_all.size() == heads * digits.size());
  assert(reserved.empty() || reserved.size() == heads);
  CodeQueries out{heads, fields, {}, {}, {}, {}};
  out.weights.assign(size_t{heads} * out.fields, 0);
  const double sign = scale < 0 ? -1 : 1;
  for (uint32_t g = 0; g < heads; ++g) {
    const float* along = along_all.data() + g * digits.size();
    double largest = 0, total = reserved.empty() ? 0 : 2 * reserved[g];
    for (size_t i = 0; i < digits.size(); ++i) {
      largest = std::max(largest, HighestWeight(along[i], digits[i]));
      total += ReachOfCodes(along[i], digits[i]);
    }
    const double unit = CodeUnit(largest, total, out.fields);
    int8_t* weights = out.weights.data() + size_t{g} * out.fields;
    uint32_t field = 0;
    int32_t sum = 0;
    for (size_t i = 0; i < digits.size(); ++i) {
      for (uint8_t j = 0; j < digits[i]; ++j, ++field) {
        weights[field] = static_cast<int8_t>(CodeWeight(along[i], j, sign, unit));
        sum += weights[field];
      }
    }
    const int32_t middle = MiddleOfCodes(sum);
    out.bias.push_back(-middle);
    const double mul = sign * scale * unit;
    out.mul.push_back(static_cast<float>(mul));
    out.add.push_back(static_cast<float>(mul * middle));
  }
  return out;
}

CodeQueries PrepareCodeQueries(const CodeBook& book, std::span<const float> queries, uint32_t heads,
                               float scale) {
  assert(queries.size() == size_t{heads} * book.key_dim);
  CodeQueries out = QuantiseQueries(ProjectOnDirections(book, queries, heads), book.digits, heads,
                                    CodeFields(book.key_dim), scale, {});
  for (uint32_t g = 0; g < heads; ++g) {
    const auto query = queries.subspan(size_t{g} * book.key_dim, book.key_dim);
    const double centre = std::inner_product(query.begin(), query.end(), book.centre.begin(), 0.0);
    out.add[g] = static_cast<float>(out.add[g] + scale * centre);
  }
  return out;
}

}  // namespace prefixd
