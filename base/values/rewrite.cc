#include "prefixd/rewrite.h"

namespace prefixd {

std::string_view RewriteKindName(RewriteKind kind) {
  return kind == RewriteKind::kCompact ? "compact" : "recluster";
}

Result<RewriteKind> RewriteKindFromName(std::string_view name) {
  for (const RewriteKind kind : {RewriteKind::kRecluster, RewriteKind::kCompact}) {
    if (RewriteKindName(kind) == name) return kind;
  }
  return InvalidArgument("a prefix is rewritten by recluster or compact, not by '" +
                         std::string(name) + "'");
}

}  // namespace prefixd
