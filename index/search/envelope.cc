#include "index/search/envelope.h"

#include <xxhash.h>

#include <bit>
#include <cstring>
#include <string>
#include <string_view>

namespace prefixd::index {

static_assert(std::endian::native == std::endian::little,
              "stored indexes are little-endian and are read in place");

namespace {

constexpr std::string_view kMagic = "PFXDINDX";
constexpr size_t kVersionAt = 8, kHeaderBytesAt = 12, kChecksumAt = 16, kFieldsAt = 24;
constexpr size_t kReservedAt = 52, kPayloadBytesAt = 56;

template <typename T>
void Put(std::byte*& at, T value) {
  std::memcpy(at, &value, sizeof(T));
  at += sizeof(T);
}

template <typename T>
T Get(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

uint64_t Checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data() + kFieldsAt, bytes.size() - kFieldsAt);
}

Error Corrupt(std::string what) {
  return {Code::kCorrupt, "stored index: " + std::move(what) + "; rebuild it"};
}

}  // namespace

std::vector<std::byte> Seal(const Envelope& fields, std::span<const std::byte> payload) {
  std::vector<std::byte> bytes(kEnvelopeBytes + payload.size());
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  std::byte* at = bytes.data() + kVersionAt;
  Put(at, kEnvelopeVersion);
  Put(at, uint32_t{kEnvelopeBytes});
  Put(at, uint64_t{0});  // the checksum, below
  Put(at, fields.kind);
  Put(at, fields.covered.begin);
  Put(at, fields.covered.end);
  Put(at, fields.key_dim);
  Put(at, fields.n_lists);
  Put(at, fields.probe_fraction);
  Put(at, fields.seed);
  Put(at, uint32_t{0});
  Put(at, uint64_t{payload.size()});
  if (!payload.empty()) std::memcpy(at, payload.data(), payload.size());
  at = bytes.data() + kChecksumAt;
  Put(at, Checksum(bytes));
  return bytes;
}

Result<OpenedEnvelope> Open(std::span<const std::byte> bytes) {
  if (bytes.size() < kEnvelopeBytes) {
    return Corrupt("only " + std::to_string(bytes.size()) + " bytes");
  }
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return Corrupt("not an index of prefixd");
  }
  const auto version = Get<uint32_t>(bytes.data() + kVersionAt);
  if (version != kEnvelopeVersion) {
    return Corrupt("version " + std::to_string(version) + ", this build reads version " +
                   std::to_string(kEnvelopeVersion));
  }
  if (Get<uint32_t>(bytes.data() + kHeaderBytesAt) != kEnvelopeBytes) {
    return Corrupt("header of an unknown size");
  }
  const auto payload_bytes = Get<uint64_t>(bytes.data() + kPayloadBytesAt);
  if (payload_bytes != bytes.size() - kEnvelopeBytes) {
    return Corrupt("holds " + std::to_string(bytes.size() - kEnvelopeBytes) +
                   " bytes of payload where " + std::to_string(payload_bytes) + " were written");
  }
  if (Get<uint64_t>(bytes.data() + kChecksumAt) != Checksum(bytes)) {
    return Corrupt("checksum mismatch");
  }
  if (Get<uint32_t>(bytes.data() + kReservedAt) != 0) return Corrupt("a reserved field is set");
  const std::byte* fields = bytes.data() + kFieldsAt;
  OpenedEnvelope opened;
  opened.fields.kind = Get<uint32_t>(fields);
  opened.fields.covered = {Get<uint32_t>(fields + 4), Get<uint32_t>(fields + 8)};
  opened.fields.key_dim = Get<uint32_t>(fields + 12);
  opened.fields.n_lists = Get<uint32_t>(fields + 16);
  opened.fields.probe_fraction = Get<float>(fields + 20);
  opened.fields.seed = Get<uint32_t>(fields + 24);
  opened.payload = bytes.subspan(kEnvelopeBytes);
  return opened;
}

}  // namespace prefixd::index
