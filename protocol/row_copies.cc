#include "protocol/row_copies.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/check.h"

namespace prefixd::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "bytes on the wire are little-endian");

struct Head {
  uint32_t copies, places;
};
struct Encoded {
  uint64_t from, to;
  uint32_t to_step, first_place;
  uint16_t bytes, parts, step, flags;
};
static_assert(sizeof(Encoded) == 32);
constexpr uint16_t kValues = 1, kPlaces = 2;  // flags

uint64_t PlacesOf(std::span<const RowCopy> copies) {
  uint64_t n = 0;
  for (const RowCopy& copy : copies) n += copy.places != nullptr ? copy.n : 0;
  return n;
}

Error Malformed(const std::string& why) {
  return {Code::kUnavailable, "the daemon sent a malformed answer: " + why};
}

// Whether `parts` parts of so many bytes fit from `at` on, the last one `last` bytes further.
bool Fits(uint64_t at, uint64_t last, uint64_t bytes, uint64_t size) {
  return at <= size && last <= size - at && bytes <= size - at - last;
}

}  // namespace

uint64_t EncodedCopiesBytes(std::span<const RowCopy> copies) {
  return sizeof(Head) + copies.size() * sizeof(Encoded) + PlacesOf(copies) * sizeof(uint16_t);
}

std::vector<std::byte> EncodeCopies(std::span<const RowCopy> copies,
                                    std::span<const std::byte> region, const RowArrays& to) {
  std::vector<std::byte> out(EncodedCopiesBytes(copies));
  const Head head = {static_cast<uint32_t>(copies.size()), static_cast<uint32_t>(PlacesOf(copies))};
  std::memcpy(out.data(), &head, sizeof(head));
  std::byte* at = out.data() + sizeof(head);
  std::byte* const places = at + copies.size() * sizeof(Encoded);
  uint32_t placed = 0;
  for (const RowCopy& copy : copies) {
    const bool values = !(copy.to >= to.k.data() && copy.to < to.k.data() + to.k.size());
    const std::span<std::byte> array = values ? to.v : to.k;
    Encoded e = {static_cast<uint64_t>(copy.from - region.data()),
                 static_cast<uint64_t>(copy.to - array.data()),
                 static_cast<uint32_t>(copy.to_step),
                 placed,
                 static_cast<uint16_t>(copy.bytes),
                 static_cast<uint16_t>(copy.n),
                 static_cast<uint16_t>(copy.step),
                 static_cast<uint16_t>(values ? kValues : 0)};
    PREFIXD_CHECK(e.from < region.size() && e.to < array.size() && copy.to_step <= UINT32_MAX,
                  e.from, e.to, copy.to_step);
    if (copy.places != nullptr) {
      e.flags |= kPlaces;
      std::memcpy(places + placed * sizeof(uint16_t), copy.places, copy.n * sizeof(uint16_t));
      placed += copy.n;
    }
    std::memcpy(at, &e, sizeof(e));
    at += sizeof(e);
  }
  return out;
}

Result<DecodedCopies> DecodeCopies(std::span<const std::byte> bytes,
                                   std::span<const std::byte> region, const RowArrays& to) {
  Head head{};
  if (bytes.size() < sizeof(head)) return Malformed("no copies");
  std::memcpy(&head, bytes.data(), sizeof(head));
  const uint64_t copies_bytes = uint64_t{head.copies} * sizeof(Encoded);
  if (bytes.size() != sizeof(head) + copies_bytes + uint64_t{head.places} * sizeof(uint16_t)) {
    return Malformed("copies of another length");
  }
  DecodedCopies out;
  out.places.resize(head.places);
  if (head.places > 0) {
    std::memcpy(out.places.data(), bytes.data() + sizeof(head) + copies_bytes,
                head.places * sizeof(uint16_t));
  }
  out.copies.resize(head.copies);
  uint64_t written = 0;
  for (uint32_t i = 0; i < head.copies; ++i) {
    Encoded e{};
    std::memcpy(&e, bytes.data() + sizeof(head) + i * sizeof(e), sizeof(e));
    const bool placed = (e.flags & kPlaces) != 0;
    if (e.parts == 0 || (e.flags & ~(kValues | kPlaces)) != 0 ||
        (placed && !Fits(e.first_place, 0, e.parts, out.places.size()))) {
      return Malformed("a copy of no known kind");
    }
    const uint16_t* const places = placed ? out.places.data() + e.first_place : nullptr;
    const uint64_t farthest =
        placed ? *std::max_element(places, places + e.parts) : uint64_t{e.parts} - 1;
    const std::span<std::byte> array = (e.flags & kValues) != 0 ? to.v : to.k;
    if (!Fits(e.from, (uint64_t{e.parts} - 1) * e.step, e.bytes, region.size()) ||
        !Fits(e.to, farthest * e.to_step, e.bytes, array.size())) {
      return Malformed("rows outside of their memory");
    }
    written += uint64_t{e.parts} * e.bytes;
    out.copies[i] = {
        region.data() + e.from, array.data() + e.to, e.bytes, e.parts, e.step, e.to_step, places};
  }
  if (written != to.k.size() + to.v.size()) return Malformed("too many rows or too few");
  return out;
}

}  // namespace prefixd::wire
