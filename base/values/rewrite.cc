#include "prefixd/rewrite.h"

namespace prefixd {

std::string_view RewriteKindName(RewriteKind kind) {
  switch (kind) {
    case RewriteKind::kCompact:
      return "compact";
    case RewriteKind::kEncrypt:
      return "encrypt";
    case RewriteKind::kRecluster:
      break;
  }
  return "recluster";
}

Result<RewriteKind> RewriteKindFromName(std::string_view name) {
  for (const RewriteKind kind :
       {RewriteKind::kRecluster, RewriteKind::kCompact, RewriteKind::kEncrypt}) {
    if (RewriteKindName(kind) == name) return kind;
  }
  return InvalidArgument("a prefix is rewritten by recluster, compact or encrypt, not by '" +
                         std::string(name) + "'");
}

}  // namespace prefixd
