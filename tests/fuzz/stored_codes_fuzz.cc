// Fuzzes stored compact codes, behind an envelope whose checksum is right.
#include "index/code_search/stored_codes.h"

#include <algorithm>
#include <cstring>

#include "index/code_search/code_blocks.h"
#include "index/code_search/code_ranks.h"
#include "index/codes/block_queries.h"
#include "index/codes/code_scan.h"
#include "index/search/key_index.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

// Accepted codes can be scanned, decoded, and serialise to themselves.
void Check(const index::Envelope& fields, std::span<const std::byte> payload) {
  const std::vector<std::byte> sealed = index::Seal(fields, payload);
  const auto opened = index::Open(sealed);
  FUZZ_EXPECT(opened.ok());
  const auto stored = index::ParseCodes(*opened);
  if (!stored.ok()) return;
  FUZZ_EXPECT(index::SerializeCodes(stored->book, fields.covered, stored->arrays) == sealed);
  const uint32_t n = fields.covered.size(), dim = stored->book.keys.key_dim;
  // The memory is aligned as an index keeps it.
  index::CodeMemory arrays(stored->arrays.size());
  std::copy(stored->arrays.begin(), stored->arrays.end(), arrays.bytes().begin());
  const BlockCodes codes(dim, n, arrays.bytes());
  if (!codes.Validate().ok()) return;
  std::vector<float> query(dim, 0.5f), decoded(dim);
  std::vector<bool> seen(n);
  for (size_t place = 0; place < n; ++place) {
    const uint32_t key = codes.key(place);
    FUZZ_EXPECT(key < n && !seen[key]);
    seen[key] = true;
  }
  DecodeBlockKey(stored->book, codes, n - 1, decoded);
  const auto queries = PrepareBlockQueries(stored->book, query, 1, 1);
  if (!queries.ok()) return;
  std::vector<int16_t> means(codes.layout.n_windows * kCodeBlockKeys), out(kCodeBlockKeys);
  const CodeQueries& of_means = queries->means;
  CodeScan().scan(codes.means, nullptr, codes.layout.n_windows,
                  {of_means.weights.data(), of_means.bias.data(), 1, of_means.fields}, means.data(),
                  means.size());
  const CodeQueries& of_keys = queries->keys;
  std::vector<int16_t> bias(means.size());
  CodeScan().scaled(means.data(), means.size(), queries->units_of_mean[0], bias.data());
  for (uint32_t b = 0; b < codes.layout.n_blocks; ++b) {
    CodeScan().scan(
        codes.codes, &b, 1,
        {of_keys.weights.data(), of_keys.bias.data(), 1, of_keys.fields, bias.data(), bias.size()},
        out.data(), out.size());
    for (const int16_t v : out) FUZZ_EXPECT(v > index::kNoScore);
  }
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  const bool built = Whole<uint8_t>(in) % 2 == 1;
  index::Envelope fields;
  fields.kind = static_cast<uint32_t>(index::IndexKind::kCodes);
  fields.covered.begin = Whole<uint8_t>(in);
  fields.covered.end = fields.covered.begin + Whole<uint16_t>(in) % 2100;
  fields.key_dim = Whole<uint8_t>(in) % 40;
  if (!built) {
    const Bytes payload = Rest(in);
    Check(fields, payload);
    return;
  }
  // The bytes are a builder's, then damaged.
  if (fields.key_dim == 0 || fields.covered.size() == 0) return;
  BlockCodeBook book;
  CodeBook& keys = book.keys;
  keys.key_dim = fields.key_dim;
  for (uint32_t d = 0; d < keys.key_dim; ++d) keys.centre.push_back(float(Whole<int8_t>(in)));
  const uint32_t components = Whole<uint8_t>(in) % (keys.key_dim + 1);
  for (uint32_t i = 0; i < components; ++i) {
    keys.digits.push_back(Whole<uint8_t>(in) % 2);
    book.mean_digits.push_back(Whole<uint8_t>(in) % 2);
    book.mean_ratios.push_back(float(Whole<uint8_t>(in)) / 16);
    book.variances.push_back(float(Whole<uint8_t>(in)));
    for (uint32_t d = 0; d < keys.key_dim; ++d) {
      keys.directions.push_back(FloatToBf16(float(Whole<int8_t>(in)) / 16));
    }
  }
  const uint32_t n = fields.covered.size();
  const BlockLayout layout(keys.key_dim, n);
  std::vector<std::byte> arrays(layout.end);
  const auto filling = in.ConsumeBytes<uint8_t>(layout.tokens);
  if (!filling.empty()) std::memcpy(arrays.data(), filling.data(), filling.size());
  auto* tokens = reinterpret_cast<uint16_t*>(arrays.data() + layout.tokens);
  for (size_t i = 0; i < layout.n_blocks * kCodeBlockKeys; ++i) {
    tokens[i] = i < n ? static_cast<uint16_t>(i % kWindowKeys) : kNoKey;
  }
  const std::vector<std::byte> sealed = index::SerializeCodes(book, fields.covered, arrays);
  const auto opened = index::Open(sealed);
  FUZZ_EXPECT(opened.ok() && index::ParseCodes(*opened).ok());
  const Bytes payload(opened->payload.begin(), opened->payload.end());
  CheckDamaged(in, payload, [&](const Bytes& p) { Check(fields, p); });
}

}  // namespace prefixd::fuzz
