#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/every_page.h"
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

Status EncryptPrefixes(RemoteStore& client, const Options& options) {
  std::vector<std::string> ids = {options.prefix};
  if (options.prefix.empty()) {
    ids.clear();
    PREFIXD_ASSIGN(const std::vector<PrefixSummary> prefixes, EveryPrefix(client));
    for (const PrefixSummary& prefix : prefixes) ids.push_back(prefix.id);
  }
  RewriteResult all;
  for (const std::string& id : ids) {
    auto one = client.Rewrite(id, RewriteKind::kEncrypt, ShowProgress("encrypt", options.quiet));
    if (!one.ok() && one.error().code == Code::kNotFound && options.prefix.empty()) continue;
    if (!one.ok() && one.error().code == Code::kCorrupt && options.prefix.empty()) {
      all.left.push_back(id + ": " + one.error().message);  // the others go on
      continue;
    }
    if (!one.ok()) return std::move(one).error();
    all.segments += one->segments;
    all.rewritten += one->rewritten;
    all.bytes += one->bytes;
    for (std::string& why : one->left) all.left.push_back(id + ": " + std::move(why));
  }
  if (options.json) {
    PrintJson(wire::ToJson(all));
  } else {
    std::printf("%zu %s: encrypted %u %s, %s written\n", ids.size(),
                ids.size() == 1 ? "prefix" : "prefixes", all.rewritten,
                all.rewritten == 1 ? "segment" : "segments", Bytes(all.bytes).c_str());
    for (const std::string& why : all.left) std::printf("left: %s\n", Printable(why).c_str());
  }
  if (all.left.empty()) return {};
  return Error{Code::kUnavailable, std::to_string(all.left.size()) +
                                       " segments are not under the newest key yet; try again, and "
                                       "remove what is quarantined"};
}

}  // namespace prefixd::ctl
