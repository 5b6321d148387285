// What a connection may ask: by its rights, and of which tenant.
#include <string>

#include "base/session_arguments.h"
#include "daemon/calls/request_handler.h"

namespace prefixd::daemon {

using wire::MessageType;

Status RequestHandler::CheckRight(MessageType type) const {
  const auto lacks = [&](const char* right) {
    return Error{Code::kFailedPrecondition,
                 "message " + std::string(wire::MessageName(type)) + " takes the right '" + right +
                     "', which this connection does not have (auth.tokens)"};
  };
  switch (type) {
    case MessageType::kRegisterModel:
    case MessageType::kRemoveModel:
    case MessageType::kBeginPut:
    case MessageType::kPutWrite:
    case MessageType::kPutQueries:
    case MessageType::kPutCommit:
    case MessageType::kPutAbort:
    case MessageType::kRemove:
    case MessageType::kSetLifetime:
    case MessageType::kRewrite:
    case MessageType::kCompress:
    case MessageType::kPersist:
      if (!peer_.write) return lacks("write");
      return {};
    case MessageType::kModel:
    case MessageType::kListModels:
    case MessageType::kWaitReady:
    case MessageType::kStats:
      return {};  // who stores asks this too
    case MessageType::kMatch:
    case MessageType::kAttach:
    case MessageType::kStep:
    case MessageType::kAttendExact:
    case MessageType::kReadRows:
    case MessageType::kReadRange:
    case MessageType::kSelect:
    case MessageType::kSummary:
    case MessageType::kSetPolicy:
    case MessageType::kReport:
    case MessageType::kDetach:
    case MessageType::kPrefix:
    case MessageType::kVerify:
    case MessageType::kReadInPlace:
    case MessageType::kReleaseRows:
    case MessageType::kReadLayer:
    case MessageType::kReadTokens:
    case MessageType::kListPrefixes:
    case MessageType::kExplain:
    case MessageType::kSnapshot:
    case MessageType::kAppend:
    case MessageType::kTruncate:
    case MessageType::kFork:
    case MessageType::kForkPersisted:
      if (!peer_.read) return lacks("read");
      return {};
    case MessageType::kHello:
    case MessageType::kCancel:
    case MessageType::kReply:
    case MessageType::kError:
    case MessageType::kProgress:
      return {};  // none of the store's; Dispatch refuses what is no request
  }
  return lacks("read");  // a number that is no message; Dispatch says so
}

Result<std::string> RequestHandler::TenantFor(const std::string& named) const {
  if (named.empty() || named == peer_.tenant) return peer_.tenant;
  if (peer_.admin) return named;
  return InvalidArgument("this connection speaks for tenant '" + peer_.tenant + "', not for '" +
                         named + "'");
}

Result<std::string> RequestHandler::OwnPrefix(const std::string& id) const {
  auto tenant = store_.TenantOf(id);
  if (!tenant.ok() && tenant.error().code != Code::kNotFound) return tenant;
  if (!tenant.ok() || (!peer_.admin && *tenant != peer_.tenant)) return NoSuchPrefix(id);
  return tenant;
}

}  // namespace prefixd::daemon
