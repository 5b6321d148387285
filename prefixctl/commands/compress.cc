// Compresses a prefix, and shows what that does to attention over it.
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "prefixctl/commands/operate.h"
#include "prefixctl/show/output.h"
#include "protocol/codec.h"

namespace prefixd::ctl {
namespace {

std::string Error4(double error) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4f", error);
  return text;
}

void PrintErrors(const CompressReport& r) {
  if (r.queries_measured == 0) {
    std::printf("no error was measured: the put kept no queries that have seen these rows\n");
    return;
  }
  std::printf("\nerror of a step of %u retrieved tokens, on %u queries over %s tokens:\n",
              r.retrieved_tokens, r.queries_measured, std::to_string(r.measured_tokens).c_str());
  std::vector<std::vector<std::string>> rows = {{"LAYER", "AS IT IS", "COMPRESSED", "WORST HEAD"}};
  for (const CompressReport::Layer& layer : r.layers) {
    rows.push_back({std::to_string(layer.layer), Error4(layer.error_before),
                    Error4(layer.error_after), Error4(layer.worst_after)});
  }
  rows.push_back({"all", Error4(r.error_before), Error4(r.error_after), ""});
  PrintTable(rows);
}

}  // namespace

Status CompressPrefix(RemoteStore& client, const Options& options) {
  CompressSpec spec = options.compress;
  if (!spec.scorers.empty()) {
    // The daemon has another working directory.
    std::error_code ec;
    const auto whole = std::filesystem::absolute(spec.scorers, ec);
    if (!ec) spec.scorers = whole.string();
  }
  PREFIXD_ASSIGN(const CompressReport report,
                 client.Compress(options.prefix, spec, ShowProgress("compress", options.quiet)));
  if (options.json) {
    PrintJson(wire::ToJson(report));
  } else {
    std::printf("%s %s of %s tokens for each KV head by %s: %s instead of %s\n",
                report.compressed ? "kept" : "would keep",
                std::to_string(report.kept_tokens).c_str(),
                std::to_string(report.own_tokens).c_str(), options.compress.policy.c_str(),
                Bytes(report.bytes_after).c_str(), Bytes(report.bytes_before).c_str());
    PrintErrors(report);
  }
  if (report.refused.empty()) return {};
  return Error{Code::kFailedPrecondition, report.refused};
}

}  // namespace prefixd::ctl
