// Stored indexes: the envelope around what FAISS wrote.
#include <xxhash.h>

#include "index/envelope.h"
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
}  // namespace prefixd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace prefixd::fuzz;
  FuzzedDataProvider in(data, size);
  const uint8_t mode = Whole<uint8_t>(in) % 3;
  if (mode < 2) {
    Bytes bytes = Rest(in);
    if (mode == 1) PutChecksumRight(bytes);
    Check(bytes);
    return 0;
  }
  prefixd::index::Envelope fields;
  fields.kind = Whole<uint32_t>(in);
  fields.covered = {Whole<uint32_t>(in), Whole<uint32_t>(in)};
  fields.key_dim = Whole<uint32_t>(in);
  fields.n_lists = Whole<uint32_t>(in);
  fields.probe_fraction = in.ConsumeFloatingPoint<float>();
  fields.seed = Whole<uint32_t>(in);
  const auto payload = in.ConsumeBytes<uint8_t>(Whole<uint16_t>(in));
  Bytes bytes = prefixd::index::Seal(fields, std::as_bytes(std::span(payload)));
  FUZZ_EXPECT(prefixd::index::Open(bytes).ok());
  Check(bytes);
  Damage(in, bytes);
  Check(bytes);
  PutChecksumRight(bytes);
  Check(bytes);
  return 0;
}
