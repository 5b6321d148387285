// Stored compact codes, behind an envelope whose checksum is right.
#include "index/stored_codes.h"

#include "attention/code_scan.h"
#include "index/key_index.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

// What is accepted can be scanned, decoded, and comes out as it went in.
void Check(const index::Envelope& fields, std::span<const std::byte> payload) {
  const std::vector<std::byte> sealed = index::Seal(fields, payload);
  const auto opened = index::Open(sealed);
  FUZZ_EXPECT(opened.ok());
  const auto stored = index::ParseCodes(*opened);
  if (!stored.ok()) return;
  FUZZ_EXPECT(index::SerializeCodes(stored->book, fields.covered, stored->codes) == sealed);
  const uint32_t dim = stored->book.key_dim;
  std::vector<float> query(dim, 0.5f), decoded(dim);
  const CodeQueries queries = PrepareCodeQueries(stored->book, query, 1, 1);
  const size_t blocks = CodeBlocks(fields.covered.size());
  std::vector<int16_t> out(blocks * kCodeBlockKeys);
  CodeScan().scan(stored->codes.data(), blocks,
                  {queries.weights.data(), queries.bias.data(), 1, queries.fields}, out.data(),
                  out.size());
  DecodeKey(stored->book, stored->codes, fields.covered.size() - 1, decoded);
}

}  // namespace
}  // namespace prefixd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace prefixd;
  using namespace prefixd::fuzz;
  FuzzedDataProvider in(data, size);
  const bool built = Whole<uint8_t>(in) % 2 == 1;
  index::Envelope fields;
  fields.kind = static_cast<uint32_t>(index::IndexKind::kCodes);
  fields.covered.begin = Whole<uint8_t>(in);
  fields.covered.end = fields.covered.begin + Whole<uint8_t>(in);
  fields.key_dim = Whole<uint8_t>(in) % 40;
  if (!built) {
    const Bytes payload = Rest(in);
    Check(fields, payload);
    return 0;
  }
  // What a builder would write, then damaged.
  if (fields.key_dim == 0 || fields.covered.size() == 0) return 0;
  CodeBook book;
  book.key_dim = fields.key_dim;
  for (uint32_t d = 0; d < book.key_dim; ++d) book.centre.push_back(float(Whole<int8_t>(in)));
  const uint32_t components = Whole<uint8_t>(in) % (book.key_dim + 1);
  for (uint32_t i = 0; i < components; ++i) {
    book.digits.push_back(1);
    for (uint32_t d = 0; d < book.key_dim; ++d) {
      book.directions.push_back(FloatToBf16(float(Whole<int8_t>(in)) / 16));
    }
  }
  std::vector<std::byte> codes(CodeBlocks(fields.covered.size()) * CodeBlockBytes(book.key_dim));
  const auto filling = in.ConsumeBytes<uint8_t>(codes.size());
  if (!filling.empty()) std::memcpy(codes.data(), filling.data(), filling.size());
  const std::vector<std::byte> sealed = index::SerializeCodes(book, fields.covered, codes);
  const auto opened = index::Open(sealed);
  FUZZ_EXPECT(opened.ok() && index::ParseCodes(*opened).ok());
  Bytes payload(opened->payload.begin(), opened->payload.end());
  Check(fields, payload);
  Damage(in, payload);
  Check(fields, payload);
  return 0;
}
