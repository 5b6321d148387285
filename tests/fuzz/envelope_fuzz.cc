// Fuzzes stored indexes: the envelope around the bytes of FAISS.
#include <xxhash.h>

#include "index/search/envelope.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

constexpr size_t kChecksumAt = 16, kCoveredFrom = 24;  // envelope.h

void PutChecksumRight(Bytes& bytes) {
  if (bytes.size() < index::kEnvelopeBytes) return;
  const uint64_t sum = XXH3_64bits(bytes.data() + kCoveredFrom, bytes.size() - kCoveredFrom);
  std::memcpy(bytes.data() + kChecksumAt, &sum, sizeof(sum));
}

void Check(const Bytes& bytes) {
  const auto opened = index::Open(bytes);
  if (opened.ok()) FUZZ_EXPECT(index::Seal(opened->fields, opened->payload) == bytes);
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  const uint8_t mode = Whole<uint8_t>(in) % 3;
  if (mode < 2) {
    Bytes bytes = Rest(in);
    if (mode == 1) PutChecksumRight(bytes);
    Check(bytes);
    return;
  }
  index::Envelope fields;
  fields.kind = Whole<uint32_t>(in);
  fields.covered = {Whole<uint32_t>(in), Whole<uint32_t>(in)};
  fields.key_dim = Whole<uint32_t>(in);
  fields.n_lists = Whole<uint32_t>(in);
  fields.probe_fraction = in.ConsumeFloatingPoint<float>();
  fields.seed = Whole<uint32_t>(in);
  const auto payload = in.ConsumeBytes<uint8_t>(Whole<uint16_t>(in));
  const Bytes bytes = index::Seal(fields, std::as_bytes(std::span(payload)));
  FUZZ_EXPECT(index::Open(bytes).ok());
  CheckDamaged(in, bytes, Check, PutChecksumRight);
}

}  // namespace prefixd::fuzz
