#include "client_lib/remote_store.h"

#include <utility>

namespace prefixd {

using wire::Field;
using wire::FromJson;
using wire::Json;
using wire::MessageType;
using wire::ToJson;

Result<std::unique_ptr<RemoteStore>> RemoteStore::Connect(std::string_view address,
                                                          const ConnectOptions& options) {
  PREFIXD_ASSIGN(Address parsed, Address::Parse(address));
  std::unique_ptr<RemoteStore> client(new RemoteStore(std::move(parsed), options));
  PREFIXD_ASSIGN(auto connection, client->Live());
  return client;
}

Result<std::shared_ptr<Connection>> RemoteStore::Live() {
  std::lock_guard lock(mutex_);
  if (connection_ == nullptr || !connection_->alive()) {
    PREFIXD_ASSIGN(connection_, Connection::Open(address_, options_));
  }
  return connection_;
}

Result<Connection::Reply> RemoteStore::Do(Connection::Call call) {
  PREFIXD_ASSIGN(auto connection, Live());
  return connection->Do(std::move(call));
}

Result<Connection::Reply> RemoteStore::DoAside(Connection::Call call) {
  ConnectOptions options = options_;
  options.shared_memory = false;
  PREFIXD_ASSIGN(auto connection, Connection::Open(address_, options));
  return connection->Do(std::move(call));
}

bool RemoteStore::shared_memory() const {
  std::lock_guard lock(mutex_);
  return connection_ != nullptr && connection_->hello().region_bytes > 0;
}

Status RemoteStore::RegisterModel(const ModelSpec& spec) {
  Connection::Call call{MessageType::kRegisterModel, {{"model", ToJson(spec)}}, {}, {}, nullptr};
  PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
  return {};
}

Result<std::vector<ModelSpec>> RemoteStore::Models() {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kModels, Json::object(), {}, {}, nullptr}));
  return FromJson<std::vector<ModelSpec>>(reply.control.value("models", Json::array()), "models");
}

Result<std::unique_ptr<PutStream>> RemoteStore::BeginPut(const PutSpec& spec) {
  PREFIXD_ASSIGN(auto connection, Live());
  Connection::Call call{MessageType::kBeginPut,
                        {{"put", ToJson(spec)}},
                        {wire::BytesOf(std::span<const uint32_t>(spec.tokens))},
                        {},
                        nullptr};
  PREFIXD_ASSIGN(auto reply, connection->Do(std::move(call)));
  PREFIXD_ASSIGN(const uint64_t put, Field<uint64_t>(reply.control, "put"));
  PREFIXD_ASSIGN(const TokenRange missing, Field<TokenRange>(reply.control, "missing"));
  PREFIXD_ASSIGN(const KvGeometry geometry,
                 FromJson<KvGeometry>(reply.control.value("geometry", Json::object()), "geometry"));
  return MakeRemotePut(std::move(connection), put, missing, geometry);
}

Result<PrefixMatch> RemoteStore::Match(const MatchSpec& spec) {
  Connection::Call call{MessageType::kMatch,
                        {{"match", ToJson(spec)}},
                        {wire::BytesOf(std::span<const uint32_t>(spec.tokens))},
                        {},
                        nullptr};
  PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
  return FromJson<PrefixMatch>(reply.control, "match");
}

Status RemoteStore::WaitReady(std::string_view prefix, const ProgressFn& progress) {
  PREFIXD_ASSIGN(auto reply,
                 DoAside({MessageType::kWaitReady, {{"prefix", prefix}}, {}, {}, &progress}));
  return {};
}

Result<std::shared_ptr<Session>> RemoteStore::Attach(const AttachSpec& spec) {
  PREFIXD_ASSIGN(auto connection, Live());
  Connection::Call call{MessageType::kAttach, {{"attach", ToJson(spec)}}, {}, {}, nullptr};
  if (!spec.tokens.empty()) {
    call.in.push_back(wire::BytesOf(std::span<const uint32_t>(spec.tokens)));
  }
  PREFIXD_ASSIGN(auto reply, connection->Do(std::move(call)));
  PREFIXD_ASSIGN(const uint64_t session, Field<uint64_t>(reply.control, "session"));
  PREFIXD_ASSIGN(SessionInfo info,
                 FromJson<SessionInfo>(reply.control.value("info", Json::object()), "info"));
  PREFIXD_TRY(info.geometry.Validate());
  PREFIXD_ASSIGN(StepPolicy policy, Field<StepPolicy>(reply.control, "policy"));
  return MakeRemoteSession(std::move(connection), session, std::move(info), policy);
}

void RemoteStore::StepBatch(std::span<StepRequest> requests) { RemoteStepBatch(requests); }

Result<std::vector<PrefixSummary>> RemoteStore::Prefixes() {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kPrefixes, Json::object(), {}, {}, nullptr}));
  return FromJson<std::vector<PrefixSummary>>(reply.control.value("prefixes", Json::array()),
                                              "prefixes");
}

Result<PrefixDetail> RemoteStore::Prefix(std::string_view prefix) {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kPrefix, {{"prefix", prefix}}, {}, {}, nullptr}));
  return FromJson<PrefixDetail>(reply.control, "prefix");
}

Status RemoteStore::Remove(std::string_view prefix) {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kRemove, {{"prefix", prefix}}, {}, {}, nullptr}));
  return {};
}

Status RemoteStore::SetLifetime(std::string_view prefix, const Lifetime& lifetime) {
  Json control = {{"prefix", prefix}, {"lifetime", ToJson(lifetime)}};
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kSetLifetime, std::move(control), {}, {}, nullptr}));
  return {};
}

Result<VerifySummary> RemoteStore::Verify(std::string_view prefix, const ProgressFn& progress) {
  PREFIXD_ASSIGN(auto reply,
                 DoAside({MessageType::kVerify, {{"prefix", prefix}}, {}, {}, &progress}));
  return FromJson<VerifySummary>(reply.control, "verify");
}

Result<VerifySummary> RemoteStore::VerifyTenant(std::string_view tenant,
                                                const ProgressFn& progress) {
  Json control = {{"prefix", ""}, {"tenant", tenant}};
  PREFIXD_ASSIGN(auto reply,
                 DoAside({MessageType::kVerify, std::move(control), {}, {}, &progress}));
  return FromJson<VerifySummary>(reply.control, "verify");
}

Result<RuntimeStats> RemoteStore::Stats() {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kStats, Json::object(), {}, {}, nullptr}));
  return FromJson<RuntimeStats>(reply.control.value("runtime", Json::object()), "stats");
}

Result<wire::ServerStats> RemoteStore::Server() {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kStats, Json::object(), {}, {}, nullptr}));
  return FromJson<wire::ServerStats>(reply.control.value("server", Json::object()), "server");
}

Result<std::unique_ptr<Store>> Connect(std::string_view address, const ConnectOptions& options) {
  PREFIXD_ASSIGN(std::unique_ptr<Store> store, RemoteStore::Connect(address, options));
  return store;
}

}  // namespace prefixd
