// Carries out the calls that operators make: why a prompt missed, verification, rewriting,
// snapshots, removing models.
#include <filesystem>
#include <string>
#include <utility>

#include "daemon/calls/request_handler.h"

namespace prefixd::daemon {

using wire::Field;
using wire::FromJson;
using wire::Json;
using wire::ToJson;

Result<Json> RequestHandler::Explain(const Request& request) const {
  const Json empty = Json::object();
  PREFIXD_ASSIGN(ExplainSpec spec,
                 FromJson<ExplainSpec>(request.control.value("explain", empty), "explain"));
  PREFIXD_ASSIGN(spec.match.tenant, TenantFor(spec.match.tenant));
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(spec.match.tokens, in.Elements<uint32_t>(0));
  PREFIXD_ASSIGN(const Explanation explanation, store_.Explain(spec));
  return ToJson(explanation);
}

// Others may be about to put under an idle model, so only an operator removes one.
Result<Json> RequestHandler::RemoveModel(const Request& request) {
  PREFIXD_ASSIGN(const auto name, Field<std::string>(request.control, "model"));
  if (!peer_.trusted && !peer_.admin) {
    return Error{Code::kFailedPrecondition,
                 "models are removed by the daemon's own user over its Unix socket, or with the "
                 "right 'admin'"};
  }
  PREFIXD_TRY(store_.RemoveModel(name));
  return Json::object();
}

Result<Json> RequestHandler::Verify(const Request& request, const ProgressFn& progress) {
  PREFIXD_ASSIGN(const auto id, Field<std::string>(request.control, "prefix"));
  if (!id.empty()) PREFIXD_TRY(OwnPrefix(id));
  const bool one_tenant = id.empty() && (!peer_.admin || request.control.contains("tenant"));
  if (!one_tenant) {
    PREFIXD_ASSIGN(const VerifySummary summary, store_.Verify(id, progress));
    return ToJson(summary);
  }
  std::string tenant = peer_.tenant;
  if (request.control.contains("tenant")) {
    PREFIXD_ASSIGN(const auto named, Field<std::string>(request.control, "tenant"));
    PREFIXD_ASSIGN(tenant, TenantFor(named));
  }
  PREFIXD_ASSIGN(const VerifySummary summary, store_.VerifyTenant(tenant, progress));
  return ToJson(summary);
}

Result<Json> RequestHandler::Rewrite(const Request& request, const ProgressFn& progress) {
  PREFIXD_ASSIGN(const auto id, Field<std::string>(request.control, "prefix"));
  PREFIXD_ASSIGN(const auto kind, Field<RewriteKind>(request.control, "kind"));
  PREFIXD_TRY(OwnPrefix(id));
  PREFIXD_ASSIGN(const RewriteResult result, store_.Rewrite(id, kind, progress));
  return ToJson(result);
}

Result<Json> RequestHandler::Compress(const Request& request, const ProgressFn& progress) {
  PREFIXD_ASSIGN(const auto id, Field<std::string>(request.control, "prefix"));
  PREFIXD_ASSIGN(
      const auto spec,
      FromJson<CompressSpec>(request.control.value("compress", Json::object()), "compress"));
  PREFIXD_TRY(OwnPrefix(id));
  if (!peer_.trusted && !spec.scorers.empty()) {
    return InvalidArgument(
        "scorers are a file of the daemon's machine: name them over its Unix socket");
  }
  if (!spec.scorers.empty() && !std::filesystem::path(spec.scorers).is_absolute()) {
    return InvalidArgument("scorers '" + spec.scorers +
                           "': name the file by its whole path, since the daemon opens it");
  }
  PREFIXD_ASSIGN(const CompressReport report, store_.Compress(id, spec, progress));
  return ToJson(report);
}

// A snapshot holds files of every tenant, so the daemon's own user alone may take one.
Result<Json> RequestHandler::TakeSnapshot(const Request& request) {
  if (!peer_.trusted) {
    return Error{Code::kFailedPrecondition,
                 "snapshots are taken by the daemon's own user over its Unix socket"};
  }
  snapshot_.reset();
  if (request.control.contains("end")) {
    PREFIXD_ASSIGN(const bool end, Field<bool>(request.control, "end"));
    if (end) return Json::object();
  }
  PREFIXD_ASSIGN(snapshot_, store_.TakeSnapshot());
  return Json{{"dir", snapshot_->dir().string()}};
}

}  // namespace prefixd::daemon
