#include "daemon/calls/request_handler.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/session_arguments.h"
#include "daemon/watch/status.h"

namespace prefixd::daemon {

using wire::Extent;
using wire::Field;
using wire::FromJson;
using wire::Json;
using wire::MessageType;
using wire::ToJson;

namespace {

Result<ListSpec> ListOf(const Request& request) {
  const Json all = Json::object();
  return FromJson<ListSpec>(request.control.value("list", all), "list");
}

// Returns the extents under `key`, all inside `area_bytes` and together no larger than it: a short
// list of overlapping extents must not make the daemon copy without bound.
Result<std::vector<Extent>> Extents(const Json& control, const char* key, uint64_t area_bytes) {
  if (!control.contains(key)) return std::vector<Extent>{};
  PREFIXD_ASSIGN(auto extents, Field<std::vector<Extent>>(control, key));
  uint64_t left = area_bytes;
  for (const Extent& e : extents) {
    PREFIXD_TRY(wire::CheckExtent(e, area_bytes));
    if (e.length > left) return InvalidArgument("tensors overlap: together they exceed the area");
    left -= e.length;
  }
  return extents;
}

}  // namespace

std::string RequestId(uint64_t connection, uint64_t number, const Json& control) {
  std::string id = "c" + std::to_string(connection) + "-" + std::to_string(number);
  const auto trace = control.find("trace");
  if (trace == control.end() || !trace->is_string()) return id;
  const auto& text = trace->get_ref<const std::string&>();
  if (!text.empty()) id += "/" + text.substr(0, kMaxTraceBytes);
  return id;
}

RequestHandler::RequestHandler(Store& store, Peer peer, std::span<std::byte> region,
                               HandlerLimits limits,
                               std::function<wire::ServerStats()> server_stats)
    : store_(store),
      peer_(std::move(peer)),
      region_(region),
      limits_(limits),
      server_stats_(std::move(server_stats)) {}

Response RequestHandler::Handle(const Request& request, const ProgressFn& progress) {
  Response response;
  try {
    Result<Json> control = Dispatch(request, progress, &response);
    if (control.ok()) {
      response.control = *std::move(control);
    } else {
      response.error = control.error();
      response.waits = Waits(request, *response.error);
    }
  } catch (const std::bad_alloc&) {
    response.error = Error{Code::kResourceExhausted, "the daemon is out of memory for this call"};
  } catch (const std::exception& e) {
    response.error = Error{Code::kInternal, std::string("unexpected: ") + e.what()};
  }
  if (response.error) {
    response.payload = {};
    response.memory.Release();
    response.fd = -1;
  }
  return response;
}

void RequestHandler::ReleaseAll() {
  puts_.clear();  // a put destroyed before its commit is aborted
  held_rows_.clear();
  snapshot_.reset();
  for (const auto& [handle, attached] : sessions_) (void)End(attached);
  sessions_.clear();
}

Result<Json> RequestHandler::Dispatch(const Request& request, const ProgressFn& progress,
                                      Response* response) {
  PREFIXD_TRY(CheckRight(request.type));
  switch (request.type) {
    case MessageType::kRegisterModel:
      return RegisterModel(request);
    case MessageType::kModel: {
      PREFIXD_ASSIGN(const auto name, Field<std::string>(request.control, "model"));
      PREFIXD_ASSIGN(const ModelSpec model, store_.Model(name));
      return ToJson(model);
    }
    case MessageType::kListModels: {
      PREFIXD_ASSIGN(const auto spec, ListOf(request));
      PREFIXD_ASSIGN(const ModelPage page, store_.ListModels(spec));
      return ToJson(page);
    }
    case MessageType::kRemoveModel:
      return RemoveModel(request);
    case MessageType::kBeginPut:
      return BeginPut(request);
    case MessageType::kPutWrite:
    case MessageType::kPutQueries:
    case MessageType::kPutCommit:
    case MessageType::kPutAbort:
      return OnPut(request);
    case MessageType::kMatch:
      return Match(request);
    case MessageType::kAttach:
      return Attach(request);
    case MessageType::kStep:
      return Step(request, response);
    case MessageType::kAttendExact:
      return AttendExact(request, response);
    case MessageType::kReadRows:
      return ReadRows(request, response);
    case MessageType::kReadInPlace:
      return ReadInPlace(request, response);
    case MessageType::kReleaseRows:
      return ReleaseRows(request);
    case MessageType::kReadRange:
      return ReadRange(request, response);
    case MessageType::kReadLayer:
      return ReadLayer(request, response);
    case MessageType::kReadTokens:
      return ReadTokens(request, response);
    case MessageType::kAppend:
      return Append(request);
    case MessageType::kTruncate:
      return Truncate(request);
    case MessageType::kFork:
      return Fork(request);
    case MessageType::kPersist:
      return Persist(request);
    case MessageType::kForkPersisted:
      return ForkPersisted(request);
    case MessageType::kSelect:
      return Select(request, response);
    case MessageType::kSummary:
      return Summary(request, response);
    case MessageType::kSetPolicy:
      return SetPolicy(request);
    case MessageType::kReport:
      return Report(request);
    case MessageType::kDetach:
      return Detach(request);
    case MessageType::kListPrefixes:
      return ListPrefixes(request);
    case MessageType::kPrefix: {
      PREFIXD_ASSIGN(const auto id, Field<std::string>(request.control, "prefix"));
      PREFIXD_TRY(OwnPrefix(id));
      PREFIXD_ASSIGN(const PrefixDetail detail, store_.Prefix(id));
      return ToJson(detail);
    }
    case MessageType::kRemove:
      return Remove(request);
    case MessageType::kVerify:
      return Verify(request, progress);
    case MessageType::kWaitReady:
      return WaitReady(request, progress);
    case MessageType::kStats:
      return Stats(request);
    case MessageType::kExplain:
      return Explain(request);
    case MessageType::kRewrite:
      return Rewrite(request, progress);
    case MessageType::kCompress:
      return Compress(request, progress);
    case MessageType::kSnapshot:
      return TakeSnapshot(request);
    case MessageType::kSetLifetime:
      return SetLifetime(request);
    default:
      return InvalidArgument("message " + std::string(wire::MessageName(request.type)) +
                             " is not expected here");
  }
}

// ---- tensors ----------------------------------------------------------------------------------

Result<RequestHandler::Inputs> RequestHandler::ReadInputs(const Request& request,
                                                          Tensors where) const {
  const std::span<const std::byte> area = request.shared ? region_ : std::span(request.payload);
  PREFIXD_ASSIGN(const auto extents, Extents(request.control, "in", area.size()));
  Inputs inputs;
  uint64_t total = 0;
  for (const Extent& e : extents) total += e.length;
  // Elements are copied once more, and shared memory even before that.
  const bool copied = request.shared && where == Tensors::kPrivate;
  if (where == Tensors::kPrivate) {
    PREFIXD_ASSIGN(inputs.memory, TakeForMessage(limits_.account, copied ? 2 * total : total));
  }
  for (const Extent& e : extents) {
    std::span<const std::byte> bytes = area.subspan(e.offset, e.length);
    if (copied) {
      inputs.copies.emplace_back(bytes.begin(), bytes.end());
      bytes = inputs.copies.back();
    }
    inputs.tensors.push_back(bytes);
  }
  return inputs;
}

Result<std::span<const std::byte>> RequestHandler::Inputs::Bytes(size_t i) const {
  if (i >= tensors.size()) return InvalidArgument("an input tensor is missing");
  return tensors[i];
}

template <typename T>
Result<std::vector<T>> RequestHandler::Inputs::Elements(size_t i) const {
  PREFIXD_ASSIGN(const auto bytes, Bytes(i));
  if (bytes.size() % sizeof(T) != 0) return InvalidArgument("a tensor ends within an element");
  std::vector<T> elements(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(elements.data(), bytes.data(), bytes.size());
  return elements;
}
template Result<std::vector<float>> RequestHandler::Inputs::Elements<float>(size_t) const;
template Result<std::vector<uint32_t>> RequestHandler::Inputs::Elements<uint32_t>(size_t) const;

Result<RequestHandler::Outputs> RequestHandler::ReadOutputs(const Request& request,
                                                            Tensors where) const {
  Outputs outputs;
  PREFIXD_ASSIGN(
      outputs.extents,
      Extents(request.control, "out", request.shared ? region_.size() : limits_.max_payload_bytes));
  size_t total = 0;
  for (const Extent& e : outputs.extents) {
    outputs.starts.push_back(total);
    total += e.length;
  }
  if (request.shared && where == Tensors::kInPlace) {
    outputs.region = region_;
    return outputs;
  }
  PREFIXD_ASSIGN(outputs.memory, TakeForMessage(limits_.account, total));
  outputs.buffer.resize(total);
  return outputs;
}

Result<std::span<std::byte>> RequestHandler::Outputs::Bytes(size_t i) {
  if (i >= extents.size()) return InvalidArgument("the place of an output tensor is missing");
  if (!region.empty()) return region.subspan(extents[i].offset, extents[i].length);
  return std::span(buffer).subspan(starts[i], extents[i].length);
}

Result<std::span<float>> RequestHandler::Outputs::Floats(size_t i) {
  PREFIXD_ASSIGN(const auto bytes, Bytes(i));
  if (bytes.size() % sizeof(float) != 0 || starts[i] % sizeof(float) != 0) {
    return InvalidArgument("an output tensor ends within an element");
  }
  return std::span(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
}

void RequestHandler::HandOver(const Request& request, Outputs outputs, Response* response) const {
  if (!outputs.region.empty()) return;
  if (!request.shared) {
    response->payload = std::move(outputs.buffer);
    response->memory = std::move(outputs.memory);
    return;
  }
  for (size_t i = 0; i < outputs.extents.size(); ++i) {
    const Extent& e = outputs.extents[i];
    if (e.length == 0) continue;
    PREFIXD_CHECK(e.offset <= region_.size() && e.length <= region_.size() - e.offset &&
                      outputs.starts[i] + e.length <= outputs.buffer.size(),
                  e.offset, e.length, region_.size(), outputs.buffer.size());
    std::memcpy(region_.data() + e.offset, outputs.buffer.data() + outputs.starts[i], e.length);
  }
}

// ---- models, prefixes ---------------------------------------------------------------------------

Result<Json> RequestHandler::RegisterModel(const Request& request) {
  const Json empty = Json::object();
  PREFIXD_ASSIGN(const ModelSpec spec,
                 FromJson<ModelSpec>(request.control.value("model", empty), "model"));
  if (!peer_.trusted) {
    // Only a trusted peer may make the daemon open files or change a model that others use.
    if (!spec.feature_maps.empty()) {
      return InvalidArgument(
          "feature maps are files of the daemon's machine: register them over its Unix socket");
    }
    if (const auto known = store_.Model(spec.name); known.ok()) {
      if (known->geometry == spec.geometry && known->identity == spec.identity) {
        return Json::object();
      }
      return Error{Code::kAlreadyExists,
                   "model '" + spec.name + "' is stored with another fingerprint or geometry"};
    }
  }
  PREFIXD_TRY(store_.RegisterModel(spec));
  return Json::object();
}

Result<Json> RequestHandler::Stats(const Request& request) const {
  PREFIXD_ASSIGN(RuntimeStats stats, store_.Stats());
  const Viewer viewer =
      peer_.admin ? Viewer{Viewer::Sees::kAll, ""} : Viewer{Viewer::Sees::kTenant, peer_.tenant};
  KeepVisible(viewer, &stats);  // even the names of other tenants stay hidden
  Json reply = {{"runtime", ToJson(stats)}, {"server", ToJson(server_stats_())}};
  if (limits_.watch != nullptr && request.control.value("watch", Json(false)) == Json(true)) {
    reply["watch"] = WatchJson(*limits_.watch, viewer);
  }
  return reply;
}

Result<Json> RequestHandler::Match(const Request& request) const {
  const Json empty = Json::object();
  PREFIXD_ASSIGN(MatchSpec spec,
                 FromJson<MatchSpec>(request.control.value("match", empty), "match"));
  PREFIXD_ASSIGN(spec.tenant, TenantFor(spec.tenant));
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(spec.tokens, in.Elements<uint32_t>(0));
  const auto begun = Clock::now();
  PREFIXD_ASSIGN(const PrefixMatch match, store_.Match(spec));
  Took(Timed::kMatch, begun);
  return ToJson(match);
}

Result<Json> RequestHandler::ListPrefixes(const Request& request) const {
  PREFIXD_ASSIGN(ListSpec spec, ListOf(request));
  if (!peer_.admin) {
    PREFIXD_ASSIGN(spec.tenant, TenantFor(spec.tenant.value_or("")));
  }
  PREFIXD_ASSIGN(const PrefixPage page, store_.ListPrefixes(spec));
  return ToJson(page);
}

Result<Json> RequestHandler::Remove(const Request& request) {
  PREFIXD_ASSIGN(const auto id, Field<std::string>(request.control, "prefix"));
  PREFIXD_TRY(OwnPrefix(id));
  PREFIXD_TRY(store_.Remove(id));
  return Json::object();
}

Result<Json> RequestHandler::SetLifetime(const Request& request) {
  PREFIXD_ASSIGN(const auto id, Field<std::string>(request.control, "prefix"));
  const Json nothing = Json::object();
  PREFIXD_ASSIGN(const auto lifetime,
                 FromJson<Lifetime>(request.control.value("lifetime", nothing), "lifetime"));
  PREFIXD_TRY(OwnPrefix(id));
  PREFIXD_TRY(store_.SetLifetime(id, lifetime));
  return Json::object();
}

Result<Json> RequestHandler::WaitReady(const Request& request, const ProgressFn& progress) {
  PREFIXD_ASSIGN(const auto id, Field<std::string>(request.control, "prefix"));
  PREFIXD_TRY(OwnPrefix(id));
  PREFIXD_TRY(store_.WaitReady(id, progress));
  return Json::object();
}

}  // namespace prefixd::daemon
