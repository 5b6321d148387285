#include "index/stored_codes.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "index/key_index.h"

namespace prefixd::index {
namespace {

constexpr uint32_t kVersion = 1;
constexpr uint32_t kMaxKeyDim = 1024;  // of KvGeometry
constexpr size_t kHeaderBytes = 2 * sizeof(uint32_t), kAlignment = 64;

constexpr size_t RoundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Where the parts of the payload begin.
struct Layout {
  size_t centre, directions, codes, end;
  Layout(uint32_t key_dim, size_t components, size_t n_keys)
      : centre(RoundUp(kHeaderBytes + components, sizeof(float))),
        directions(centre + key_dim * sizeof(float)),
        codes(RoundUp(directions + components * key_dim * sizeof(uint16_t), kAlignment)),
        end(codes + CodeBlocks(n_keys) * CodeBlockBytes(key_dim)) {}
};

bool AllZero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

std::vector<std::byte> SerializeCodes(const CodeBook& book, TokenRange covered,
                                      std::span<const std::byte> codes) {
  const Layout layout(book.key_dim, book.components(), covered.size());
  std::vector<std::byte> payload(layout.end);
  const uint32_t header[2] = {kVersion, static_cast<uint32_t>(book.components())};
  const auto put = [&](size_t at, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(payload.data() + at, from, bytes);
  };
  put(0, header, sizeof header);
  put(kHeaderBytes, book.digits.data(), book.digits.size());
  put(layout.centre, book.centre.data(), book.centre.size() * sizeof(float));
  put(layout.directions, book.directions.data(), book.directions.size() * sizeof(uint16_t));
  put(layout.codes, codes.data(), codes.size());
  Envelope fields;
  fields.kind = static_cast<uint32_t>(IndexKind::kCodes);
  fields.covered = covered;
  fields.key_dim = book.key_dim;
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
  out.book.key_dim = fields.key_dim;
  out.book.digits.resize(components);
  out.book.centre.resize(fields.key_dim);
  out.book.directions.resize(size_t{components} * fields.key_dim);
  const auto get = [&](size_t at, void* to, size_t bytes) {
    if (bytes > 0) std::memcpy(to, payload.data() + at, bytes);
    return at + bytes;
  };
  const size_t digits_end = get(kHeaderBytes, out.book.digits.data(), components);
  get(layout.centre, out.book.centre.data(), out.book.centre.size() * sizeof(float));
  const size_t directions_end = get(layout.directions, out.book.directions.data(),
                                    out.book.directions.size() * sizeof(uint16_t));
  if (!AllZero(payload.subspan(digits_end, layout.centre - digits_end)) ||
      !AllZero(payload.subspan(directions_end, layout.codes - directions_end))) {
    return corrupt("padding is set");
  }
  if (const Status valid = out.book.Validate(); !valid.ok()) {
    return corrupt(valid.error().message);
  }
  out.codes = payload.subspan(layout.codes);
  return out;
}

}  // namespace prefixd::index
