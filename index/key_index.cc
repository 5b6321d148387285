#include "index/key_index.h"

#include "index/codes_index.h"
#include "index/envelope.h"
#include "index/ivf_index.h"

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
  if (name == "exact") return IndexKind::kExact;
  if (name == "ivf") return IndexKind::kIvf;
  if (name == "codes") return IndexKind::kCodes;
  return InvalidArgument("no index named '" + std::string(name) +
                         "'; there are exact, codes and ivf");
}

Result<std::unique_ptr<KeyIndex>> LoadIndex(std::span<const std::byte> bytes) {
  PREFIXD_ASSIGN(const OpenedEnvelope opened, Open(bytes));
  if (opened.fields.kind == static_cast<uint32_t>(IndexKind::kIvf)) return LoadIvfIndex(opened);
  if (opened.fields.kind == static_cast<uint32_t>(IndexKind::kCodes)) {
    return LoadCodesIndex(opened);
  }
  return Error{Code::kCorrupt,
               "stored index: unknown kind " + std::to_string(opened.fields.kind) + "; rebuild it"};
}

}  // namespace prefixd::index
