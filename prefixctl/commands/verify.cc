#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "prefixctl/commands/commands.h"
#include "prefixctl/show/output.h"
#include "protocol/codec.h"

namespace prefixd::ctl {
namespace {

// "all good", "2 damaged", "1 not read", "2 damaged, 1 not read".
std::string Verdict(const VerifySummary& v) {
  std::string text;
  if (!v.damaged.empty()) text = std::to_string(v.damaged.size()) + " damaged";
  if (!v.unread.empty())
    text += (text.empty() ? "" : ", ") + std::to_string(v.unread.size()) + " not read";
  return text.empty() ? "all good" : text;
}

}  // namespace

Status VerifyPrefixes(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const VerifySummary v,
                 client.Verify(options.prefix, ShowProgress("verify", options.quiet)));
  if (options.json) {
    PrintJson(wire::ToJson(v));
  } else {
    std::printf("verified %s segments, %s pages, %s derived files, %s: %s\n",
                std::to_string(v.segments).c_str(), std::to_string(v.pages).c_str(),
                std::to_string(v.blobs).c_str(), Bytes(v.bytes).c_str(), Verdict(v).c_str());
    for (const std::string& d : v.damaged) std::printf("damaged: %s\n", Printable(d).c_str());
    for (const std::string& u : v.unread) std::printf("not read: %s\n", Printable(u).c_str());
  }
  std::string wrong;
  if (!v.damaged.empty()) {
    wrong = std::to_string(v.damaged.size()) +
            " damaged; segments are quarantined and will not be served: put those prompts again, "
            "then remove the damaged prefixes. Damaged derived files were deleted and are made "
            "again";
  }
  if (!v.unread.empty()) {
    wrong += (wrong.empty() ? "" : ". ") + std::to_string(v.unread.size()) +
             " could not be read, and nothing was done about them: look after the disk, and verify "
             "again";
  }
  if (wrong.empty()) return {};
  return Error{v.damaged.empty() ? Code::kIo : Code::kCorrupt, std::move(wrong)};
}

}  // namespace prefixd::ctl
