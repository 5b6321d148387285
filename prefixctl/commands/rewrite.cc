#include <cstdio>
#include <nlohmann/json.hpp>

#include "prefixctl/commands/operate.h"
#include "prefixctl/show/output.h"
#include "protocol/codec.h"

namespace prefixd::ctl {
namespace {

Status RewritePrefix(RemoteStore& client, const Options& options, RewriteKind kind,
                     const char* done) {
  const std::string name(RewriteKindName(kind));
  PREFIXD_ASSIGN(const RewriteResult result,
                 client.Rewrite(options.prefix, kind, ShowProgress(name, options.quiet)));
  if (options.json) {
    PrintJson(wire::ToJson(result));
    return {};
  }
  std::printf("%s %u %s, %s written; the prefix has %u segments now\n", done, result.rewritten,
              result.rewritten == 1 ? "segment" : "segments", Bytes(result.bytes).c_str(),
              result.segments);
  for (const std::string& why : result.left) std::printf("left: %s\n", Printable(why).c_str());
  return {};
}

}  // namespace

Status ReclusterPrefix(RemoteStore& client, const Options& options) {
  return RewritePrefix(client, options, RewriteKind::kRecluster, "reclustered");
}

Status CompactPrefix(RemoteStore& client, const Options& options) {
  return RewritePrefix(client, options, RewriteKind::kCompact, "joined");
}

}  // namespace prefixd::ctl
