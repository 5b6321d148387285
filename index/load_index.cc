#include "index/load_index.h"

#include <algorithm>
#include <string>

#include "index/code_search/codes_index.h"
#include "index/ivf/ivf_index.h"
#include "index/search/envelope.h"

namespace prefixd::index {

Result<std::unique_ptr<KeyIndex>> LoadIndex(std::span<const std::byte> bytes) {
  PREFIXD_ASSIGN(const OpenedEnvelope opened, Open(bytes));
  switch (static_cast<IndexKind>(std::min(opened.fields.kind, 255u))) {
    case IndexKind::kIvf:
      return LoadIvfIndex(opened);
    case IndexKind::kCodes:
      return LoadCodesIndex(opened);
    case IndexKind::kExact:  // stores nothing
      break;
  }
  return Error{Code::kCorrupt,
               "stored index: unknown kind " + std::to_string(opened.fields.kind) + "; rebuild it"};
}

}  // namespace prefixd::index
