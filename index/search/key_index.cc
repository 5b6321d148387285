#include "index/search/key_index.h"

#include <algorithm>

#include "index/code_search/codes_index.h"
#include "index/search/envelope.h"
#include "index/ivf/hnsw_index.h"
#include "index/ivf/ivf_index.h"
#include "index/search/pages_index.h"

namespace prefixd::index {

std::string_view IndexName(IndexKind kind) {
  switch (kind) {
    case IndexKind::kExact:
      return "exact";
    case IndexKind::kIvf:
      return "ivf";
    case IndexKind::kCodes:
      return "codes";
    case IndexKind::kHnsw:
      return "hnsw";
    case IndexKind::kPages:
      return "pages";
  }
  return "unknown";
}

Result<IndexKind> IndexFromName(std::string_view name) {
  for (const IndexKind kind : {IndexKind::kExact, IndexKind::kIvf, IndexKind::kCodes,
                               IndexKind::kHnsw, IndexKind::kPages}) {
    if (name == IndexName(kind)) return kind;
  }
  return InvalidArgument("no index named '" + std::string(name) +
                         "'; there are exact, codes, ivf, hnsw and pages");
}

Status KeyIndex::SetEffort(float effort) {
  if (effort == 1) return {};
  return InvalidArgument("an exact search has no effort to set");
}

std::vector<Result<Selection>> KeyIndex::SearchMany(std::span<const SearchRequest> requests) const {
  std::vector<Result<Selection>> selections;
  selections.reserve(requests.size());
  for (const SearchRequest& request : requests) selections.push_back(Search(request));
  return selections;
}

Result<std::unique_ptr<KeyIndex>> LoadIndex(std::span<const std::byte> bytes) {
  PREFIXD_ASSIGN(const OpenedEnvelope opened, Open(bytes));
  switch (static_cast<IndexKind>(std::min(opened.fields.kind, 255u))) {
    case IndexKind::kIvf:
      return LoadIvfIndex(opened);
    case IndexKind::kCodes:
      return LoadCodesIndex(opened);
    case IndexKind::kHnsw:
      return LoadHnswIndex(opened);
    case IndexKind::kPages:
      return LoadPagesIndex(opened);
    case IndexKind::kExact:  // stores nothing
      break;
  }
  return Error{Code::kCorrupt,
               "stored index: unknown kind " + std::to_string(opened.fields.kind) + "; rebuild it"};
}

}  // namespace prefixd::index
