#include "index/code_search/stored_codes.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "index/search/key_index.h"

namespace prefixd::index {
namespace {

constexpr uint32_t kVersion = 3;
constexpr uint32_t kMaxKeyDim = 1024;  // of KvGeometry
constexpr size_t kHeaderBytes = 2 * sizeof(uint32_t), kAlignment = 64;

constexpr size_t RoundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Where the parts of the payload begin.
struct Layout {
  size_t centre, ratios, variances, directions, arrays, end;
  Layout(uint32_t key_dim, size_t components, size_t n_keys)
      : centre(RoundUp(kHeaderBytes + 2 * components, sizeof(float))),
        ratios(centre + key_dim * sizeof(float)),
        variances(ratios + components * sizeof(float)),
        directions(variances + components * sizeof(float)),
        arrays(RoundUp(directions + components * key_dim * sizeof(uint16_t), kAlignment)),
        end(arrays + BlockLayout(key_dim, n_keys).end) {}
};

bool AllZero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

template <typename T>
void Put(std::span<std::byte> payload, size_t at, const std::vector<T>& from) {
  if (!from.empty()) std::memcpy(payload.data() + at, from.data(), from.size() * sizeof(T));
}
// Returns where it ends.
template <typename T>
size_t Get(std::span<const std::byte> payload, size_t at, size_t n, std::vector<T>& to) {
  to.resize(n);
  if (n > 0) std::memcpy(to.data(), payload.data() + at, n * sizeof(T));
  return at + n * sizeof(T);
}

}  // namespace

std::vector<std::byte> SerializeCodes(const BlockCodeBook& book, TokenRange covered,
                                      std::span<const std::byte> arrays) {
  const CodeBook& keys = book.keys;
  const Layout layout(keys.key_dim, keys.components(), covered.size());
  std::vector<std::byte> payload(layout.end);
  Put(payload, 0, std::vector<uint32_t>{kVersion, static_cast<uint32_t>(keys.components())});
  Put(payload, kHeaderBytes, keys.digits);
  Put(payload, kHeaderBytes + keys.components(), book.mean_digits);
  Put(payload, layout.centre, keys.centre);
  Put(payload, layout.ratios, book.mean_ratios);
  Put(payload, layout.variances, book.variances);
  Put(payload, layout.directions, keys.directions);
  std::copy(arrays.begin(), arrays.end(), payload.begin() + ptrdiff_t(layout.arrays));
  Envelope fields;
  fields.kind = static_cast<uint32_t>(IndexKind::kCodes);
  fields.covered = covered;
  fields.key_dim = keys.key_dim;
  return Seal(fields, payload);
}

Result<StoredCodes> ParseCodes(const OpenedEnvelope& opened) {
  const auto corrupt = [](const std::string& what) {
    return Error{Code::kCorrupt, "stored codes: " + what + "; rebuild the index"};
  };
  const Envelope& fields = opened.fields;
  const std::span<const std::byte> payload = opened.payload;
  if (fields.covered.begin >= fields.covered.end || fields.key_dim == 0 ||
      fields.key_dim > kMaxKeyDim || fields.n_lists != 0 || fields.probe_fraction != 0 ||
      fields.seed != 0 || payload.size() < kHeaderBytes) {
    return corrupt("impossible header");
  }
  uint32_t header[2];
  std::memcpy(header, payload.data(), sizeof header);
  if (header[0] != kVersion) {
    return corrupt("version " + std::to_string(header[0]) + ", this build reads version " +
                   std::to_string(kVersion));
  }
  const uint32_t components = header[1];
  if (components > fields.key_dim) return corrupt("more components than dimensions");
  const Layout layout(fields.key_dim, components, fields.covered.size());
  if (payload.size() != layout.end) {
    return corrupt(std::to_string(payload.size()) + " bytes where " + std::to_string(layout.end) +
                   " are needed");
  }
  StoredCodes out;
  CodeBook& keys = out.book.keys;
  keys.key_dim = fields.key_dim;
  const size_t digits_end = Get(payload, Get(payload, kHeaderBytes, components, keys.digits),
                                components, out.book.mean_digits);
  Get(payload, layout.centre, fields.key_dim, keys.centre);
  Get(payload, layout.ratios, components, out.book.mean_ratios);
  Get(payload, layout.variances, components, out.book.variances);
  const size_t directions_end =
      Get(payload, layout.directions, size_t{components} * fields.key_dim, keys.directions);
  if (!AllZero(payload.subspan(digits_end, layout.centre - digits_end)) ||
      !AllZero(payload.subspan(directions_end, layout.arrays - directions_end))) {
    return corrupt("padding is set");
  }
  if (const Status valid = out.book.Validate(); !valid.ok()) {
    return corrupt(valid.error().message);
  }
  out.arrays = payload.subspan(layout.arrays);
  return out;
}

}  // namespace prefixd::index
