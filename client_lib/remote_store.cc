#include "client_lib/remote_store.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/session_arguments.h"
#include "client_lib/put_wait.h"

namespace prefixd {

using wire::Field;
using wire::FromJson;
using wire::Json;
using wire::MessageType;
using wire::ToJson;

namespace {

Connection::Call MatchCall(const MatchSpec& spec) {
  return {MessageType::kMatch,
          {{"match", ToJson(spec)}},
          {wire::BytesOf(std::span<const uint32_t>(spec.tokens))},
          {},
          nullptr,
          {}};
}

class RemoteSnapshot final : public Snapshot {
 public:
  RemoteSnapshot(std::shared_ptr<Connection> connection, std::filesystem::path dir)
      : connection_(std::move(connection)), dir_(std::move(dir)) {}
  // Waits until the daemon has ended it, so that the next one is not refused. A daemon that does
  // not answer ends it with the connection.
  ~RemoteSnapshot() override {
    static_cast<void>(
        connection_->Do({MessageType::kSnapshot, {{"end", true}}, {}, {}, nullptr, {}}));
  }
  RemoteSnapshot(const RemoteSnapshot&) = delete;
  RemoteSnapshot& operator=(const RemoteSnapshot&) = delete;
  const std::filesystem::path& dir() const override { return dir_; }

 private:
  const std::shared_ptr<Connection> connection_;  // the daemon keeps the snapshot as long as it
  const std::filesystem::path dir_;
};

}  // namespace

RemoteStore::RemoteStore(Address address, ConnectOptions options)
    : link_(std::make_shared<Link>(std::move(address), std::move(options))),
      matches_(std::make_unique<MatchCalls>(
          [this](size_t thread, const MatchSpec& spec) { return MatchAside(thread, spec); })) {}

RemoteStore::~RemoteStore() {
  if (!link_->CheckProcess().ok()) {  // a child of fork(), where there are no threads to wait for
    static_cast<void>(matches_.release());
    return;
  }
  {
    std::lock_guard lock(match_mutex_);
    closing_ = true;
    for (const auto& connection : match_connections_) {
      if (connection) connection->Interrupt();
    }
  }
  matches_->Stop();
}

Result<std::unique_ptr<RemoteStore>> RemoteStore::Connect(std::string_view address,
                                                          const ConnectOptions& options) {
  PREFIXD_ASSIGN(Address parsed, Address::Parse(address));
  std::unique_ptr<RemoteStore> client(new RemoteStore(std::move(parsed), options));
  PREFIXD_ASSIGN(auto connection, client->link_->Live());
  return client;
}

Result<Connection::Reply> RemoteStore::DoAside(Connection::Call call) {
  PREFIXD_ASSIGN(auto connection, link_->Aside(/*shared_memory=*/false));
  return connection->Do(std::move(call));
}

bool RemoteStore::shared_memory() const { return link_->shared_memory(); }

Status RemoteStore::RegisterModel(const ModelSpec& spec) {
  Connection::Call call{
      MessageType::kRegisterModel, {{"model", ToJson(spec)}}, {}, {}, nullptr, {}};
  PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
  return {};
}

Result<ModelSpec> RemoteStore::Model(std::string_view name) {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kModel, {{"model", name}}, {}, {}, nullptr, {}}));
  return FromJson<ModelSpec>(reply.control, "model");
}

Result<ModelPage> RemoteStore::ListModels(const ListSpec& spec) {
  PREFIXD_ASSIGN(auto reply,
                 Do({MessageType::kListModels, {{"list", ToJson(spec)}}, {}, {}, nullptr, {}}));
  return FromJson<ModelPage>(reply.control, "models");
}

Status RemoteStore::RemoveModel(std::string_view name) {
  // Not repeated: the second call would find nothing to remove.
  PREFIXD_ASSIGN(auto connection, link_->LiveNow());
  PREFIXD_ASSIGN(
      auto reply,
      connection->Do({MessageType::kRemoveModel, {{"model", name}}, {}, {}, nullptr, {}}));
  return {};
}

// The daemon does not wait for another put of the same tokens: it says kUnavailable, and the client
// asks again until the time is over. A waiting client thus holds no thread of the daemon, and steps
// of its other threads go on.
Result<std::unique_ptr<PutStream>> RemoteStore::BeginPut(const PutSpec& spec) {
  // Where no daemon answers nobody is waited for.
  bool lost = false;
  return AskBesideOthers(
      spec, [&](const PutSpec& asked) { return TryPut(asked, &lost); }, [&] { return lost; });
}

Result<std::unique_ptr<PutStream>> RemoteStore::TryPut(const PutSpec& spec, bool* lost) {
  const Connection::Call call{MessageType::kBeginPut,
                              {{"put", ToJson(spec)}},
                              {wire::BytesOf(std::span<const uint32_t>(spec.tokens))},
                              {},
                              nullptr,
                              {}};
  std::shared_ptr<Connection> connection;  // that the put belongs to
  const auto reply = link_->Run([&](const auto& live) {
    connection = live;
    return live->Do(call);
  });
  *lost = connection == nullptr || !connection->alive();
  if (!reply.ok()) return reply.error();
  PREFIXD_ASSIGN(const uint64_t put, Field<uint64_t>(reply->control, "put"));
  PREFIXD_ASSIGN(const TokenRange missing, Field<TokenRange>(reply->control, "missing"));
  PREFIXD_ASSIGN(
      const KvGeometry geometry,
      FromJson<KvGeometry>(reply->control.value("geometry", Json::object()), "geometry"));
  if (const Status valid = geometry.Validate(); !valid.ok()) {
    return Error{Code::kUnavailable,
                 "the daemon sent a malformed answer: " + valid.error().message};
  }
  PREFIXD_ASSIGN(const HeadRange heads, ResolvePutHeads(geometry, spec.heads));
  return MakeRemotePut(std::move(connection), put, static_cast<uint32_t>(spec.tokens.size()),
                       missing, GeometryOf(geometry, heads),
                       std::chrono::milliseconds(spec.wait_ms));
}

Result<PrefixMatch> RemoteStore::Match(const MatchSpec& spec) {
  PREFIXD_ASSIGN(auto reply, Do(MatchCall(spec)));
  return FromJson<PrefixMatch>(reply.control, "match");
}

Result<std::unique_ptr<PendingMatch>> RemoteStore::MatchAsync(const MatchSpec& spec,
                                                              std::chrono::milliseconds deadline) {
  PREFIXD_TRY(link_->CheckProcess());
  return matches_->Begin(spec, deadline);
}

Result<std::shared_ptr<Connection>> RemoteStore::MatchConnection(size_t thread) {
  {
    std::lock_guard lock(match_mutex_);
    if (closing_) return Error{Code::kCancelled, "the store is closing"};
    const auto& kept = match_connections_[thread];
    if (kept && kept->alive()) return kept;
  }
  PREFIXD_ASSIGN(auto opened, link_->Aside(/*shared_memory=*/false));
  std::lock_guard lock(match_mutex_);
  if (closing_) return Error{Code::kCancelled, "the store is closing"};
  return match_connections_[thread] = std::move(opened);
}

Result<PrefixMatch> RemoteStore::MatchAside(size_t thread, const MatchSpec& spec) {
  PREFIXD_ASSIGN(auto reply, link_->RunOver([&] { return MatchConnection(thread); },
                                            [&](const auto& connection) {
                                              return connection->Do(MatchCall(spec));
                                            }));
  return FromJson<PrefixMatch>(reply.control, "match");
}

Result<Explanation> RemoteStore::Explain(const ExplainSpec& spec) {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kExplain,
                                 {{"explain", ToJson(spec)}},
                                 {wire::BytesOf(std::span<const uint32_t>(spec.match.tokens))},
                                 {},
                                 nullptr,
                                 {}}));
  return FromJson<Explanation>(reply.control, "explanation");
}

Result<RewriteResult> RemoteStore::Rewrite(std::string_view prefix, RewriteKind kind,
                                           const ProgressFn& progress) {
  Json control = {{"prefix", prefix}, {"kind", RewriteKindName(kind)}};
  PREFIXD_ASSIGN(auto reply,
                 DoAside({MessageType::kRewrite, std::move(control), {}, {}, &progress, {}}));
  return FromJson<RewriteResult>(reply.control, "rewrite");
}

Result<CompressReport> RemoteStore::Compress(std::string_view prefix, const CompressSpec& spec,
                                             const ProgressFn& progress) {
  Json control = {{"prefix", prefix}, {"compress", wire::ToJson(spec)}};
  PREFIXD_ASSIGN(auto reply,
                 DoAside({MessageType::kCompress, std::move(control), {}, {}, &progress, {}}));
  return FromJson<CompressReport>(reply.control, "compress");
}

Result<std::unique_ptr<Snapshot>> RemoteStore::TakeSnapshot() {
  PREFIXD_ASSIGN(auto connection, link_->Aside(/*shared_memory=*/false));
  PREFIXD_ASSIGN(auto reply,
                 connection->Do({MessageType::kSnapshot, Json::object(), {}, {}, nullptr, {}}));
  PREFIXD_ASSIGN(auto dir, Field<std::string>(reply.control, "dir"));
  return std::unique_ptr<Snapshot>(
      std::make_unique<RemoteSnapshot>(std::move(connection), std::move(dir)));
}

Status RemoteStore::WaitReady(std::string_view prefix, const ProgressFn& progress) {
  PREFIXD_ASSIGN(auto reply,
                 DoAside({MessageType::kWaitReady, {{"prefix", prefix}}, {}, {}, &progress, {}}));
  return {};
}

Result<std::shared_ptr<Session>> RemoteStore::Attach(const AttachSpec& spec) {
  return AttachRemote(link_, spec);
}

void RemoteStore::StepBatch(std::span<StepRequest> requests) { RemoteStepBatch(*link_, requests); }

Result<PrefixPage> RemoteStore::ListPrefixes(const ListSpec& spec) {
  PREFIXD_ASSIGN(auto reply,
                 Do({MessageType::kListPrefixes, {{"list", ToJson(spec)}}, {}, {}, nullptr, {}}));
  return FromJson<PrefixPage>(reply.control, "prefixes");
}

Result<PrefixDetail> RemoteStore::Prefix(std::string_view prefix) {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kPrefix, {{"prefix", prefix}}, {}, {}, nullptr, {}}));
  return FromJson<PrefixDetail>(reply.control, "prefix");
}

Status RemoteStore::Remove(std::string_view prefix) {
  // Not repeated: the second call would find nothing to remove.
  PREFIXD_ASSIGN(auto connection, link_->LiveNow());
  PREFIXD_ASSIGN(auto reply,
                 connection->Do({MessageType::kRemove, {{"prefix", prefix}}, {}, {}, nullptr, {}}));
  return {};
}

Status RemoteStore::SetLifetime(std::string_view prefix, const Lifetime& lifetime) {
  Json control = {{"prefix", prefix}, {"lifetime", ToJson(lifetime)}};
  PREFIXD_ASSIGN(auto reply,
                 Do({MessageType::kSetLifetime, std::move(control), {}, {}, nullptr, {}}));
  return {};
}

Result<VerifySummary> RemoteStore::Verify(std::string_view prefix, const ProgressFn& progress) {
  PREFIXD_ASSIGN(auto reply,
                 DoAside({MessageType::kVerify, {{"prefix", prefix}}, {}, {}, &progress, {}}));
  return FromJson<VerifySummary>(reply.control, "verify");
}

Result<VerifySummary> RemoteStore::VerifyTenant(std::string_view tenant,
                                                const ProgressFn& progress) {
  Json control = {{"prefix", ""}, {"tenant", tenant}};
  PREFIXD_ASSIGN(auto reply,
                 DoAside({MessageType::kVerify, std::move(control), {}, {}, &progress, {}}));
  return FromJson<VerifySummary>(reply.control, "verify");
}

Result<RuntimeStats> RemoteStore::Stats() {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kStats, Json::object(), {}, {}, nullptr, {}}));
  return FromJson<RuntimeStats>(reply.control.value("runtime", Json::object()), "stats");
}

Result<wire::ServerStats> RemoteStore::Server() {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kStats, Json::object(), {}, {}, nullptr, {}}));
  return FromJson<wire::ServerStats>(reply.control.value("server", Json::object()), "server");
}

Result<Json> RemoteStore::Watch() {
  PREFIXD_ASSIGN(auto reply, Do({MessageType::kStats, {{"watch", true}}, {}, {}, nullptr, {}}));
  return std::move(reply.control);
}

Result<std::unique_ptr<Store>> Connect(std::string_view address, const ConnectOptions& options) {
  PREFIXD_ASSIGN(std::unique_ptr<Store> store, RemoteStore::Connect(address, options));
  return store;
}

}  // namespace prefixd
