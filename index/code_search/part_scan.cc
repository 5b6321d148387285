#include "index/code_search/part_scan.h"

#include <algorithm>

#include "index/codes/code_scan.h"

namespace prefixd::index {
namespace {

// Fills in which blocks of the part's windows hold keys that are used, and how many.
void CountUsed(const CodePart& part, PartScan& scan) {
  const size_t first = part.first_block(), end = part.end_block();
  const uint32_t from = part.used.begin - part.first_token, to = part.used.end - part.first_token;
  for (size_t b = first; b < end; ++b) {
    const size_t key = b / kWindowBlocks * kWindowKeys;
    uint16_t n = kCodeBlockKeys;
    if (key < from || key + kWindowKeys > to) {  // a window that is cut
      n = 0;
      for (size_t place = b * kCodeBlockKeys; place < (b + 1) * kCodeBlockKeys; ++place) {
        n = static_cast<uint16_t>(n + part.uses(place));
      }
    }
    if (n == 0) continue;
    scan.blocks.push_back(static_cast<uint32_t>(b - first));
    scan.used.push_back(n);
  }
}

}  // namespace

size_t CodePart::end_block() const {
  return std::min(end_window() * kWindowBlocks, codes.layout.n_blocks);
}

bool CodePart::uses(size_t place) const {
  if (codes.tokens[place] == kNoKey) return false;
  const uint32_t token = first_token + codes.key(place);
  return token >= used.begin && token < used.end;
}

Result<PartScan> PreparePart(const SearchRequest& request, const CodePart& part,
                             SearchScratch& scratch) {
  const uint32_t heads = request.group;
  PartScan scan;
  PREFIXD_ASSIGN(scan.queries,
                 PrepareBlockQueries(*part.book, request.queries, heads, request.layer.scale));
  CountUsed(part, scan);
  const size_t windows = part.end_window() - part.first_window();
  scan.ld_bias = windows * kCodeBlockKeys;
  std::vector<int16_t>& means = scratch.block_means;
  means.resize(heads * scan.ld_bias);
  scan.bias.resize(heads * scan.ld_bias);
  const CodeQueries& q = scan.queries.means;
  CodeScan().scan(part.codes.means + part.first_window() * CodeBlockBytes(part.book->keys.key_dim),
                  nullptr, windows, {q.weights.data(), q.bias.data(), heads, q.fields},
                  means.data(), scan.ld_bias);
  const size_t n = part.end_block() - part.first_block();
  for (uint32_t g = 0; g < heads; ++g) {
    CodeScan().scaled(means.data() + g * scan.ld_bias, n, scan.queries.units_of_mean[g],
                      scan.bias.data() + g * scan.ld_bias);
  }
  return scan;
}

}  // namespace prefixd::index
