#include "index/search/key_index.h"

#include <string>

namespace prefixd::index {

std::string_view IndexName(IndexKind kind) {
  switch (kind) {
    case IndexKind::kExact:
      return "exact";
    case IndexKind::kIvf:
      return "ivf";
    case IndexKind::kCodes:
      return "codes";
  }
  return "unknown";
}

Result<IndexKind> IndexFromName(std::string_view name) {
  for (const IndexKind kind : {IndexKind::kExact, IndexKind::kIvf, IndexKind::kCodes}) {
    if (name == IndexName(kind)) return kind;
  }
  return InvalidArgument("no index named '" + std::string(name) +
                         "'; there are exact, codes and ivf");
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

}  // namespace prefixd::index
