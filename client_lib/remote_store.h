// Implements the store of a running daemon. Engines use it through Store; tools such as prefixctl
// also use its further methods. Internal to client_lib and prefixctl.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/match_calls.h"
#include "client_lib/connection.h"
#include "client_lib/link.h"
#include "prefixd/client.h"
#include "protocol/codec.h"

namespace prefixd {

// A broken connection is replaced by the next call (link.h). Sessions attach again, as far as
// ConnectOptions::reconnect_ms allows; puts of the old connection fail with kUnavailable.
class RemoteStore final : public Store {
 public:
  static Result<std::unique_ptr<RemoteStore>> Connect(std::string_view address,
                                                      const ConnectOptions& options);
  ~RemoteStore() override;

  Status RegisterModel(const ModelSpec& spec) override;
  Result<ModelSpec> Model(std::string_view name) override;
  Result<ModelPage> ListModels(const ListSpec& spec) override;
  Status RemoveModel(std::string_view name) override;
  Result<std::unique_ptr<PutStream>> BeginPut(const PutSpec& spec) override;
  Result<PrefixMatch> Match(const MatchSpec& spec) override;
  Result<std::unique_ptr<PendingMatch>> MatchAsync(const MatchSpec& spec,
                                                   std::chrono::milliseconds deadline) override;
  Result<Explanation> Explain(const ExplainSpec& spec) override;
  Status WaitReady(std::string_view prefix, const ProgressFn& progress) override;
  Result<std::shared_ptr<Session>> Attach(const AttachSpec& spec) override;
  void StepBatch(std::span<StepRequest> requests) override;
  Result<PrefixPage> ListPrefixes(const ListSpec& spec) override;
  Result<PrefixDetail> Prefix(std::string_view prefix) override;
  Status Remove(std::string_view prefix) override;
  Status SetLifetime(std::string_view prefix, const Lifetime& lifetime) override;
  Result<RewriteResult> Rewrite(std::string_view prefix, RewriteKind kind,
                                const ProgressFn& progress) override;
  Result<CompressReport> Compress(std::string_view prefix, const CompressSpec& spec,
                                  const ProgressFn& progress) override;
  // Lasts no longer than the connection of its own that it holds.
  Result<std::unique_ptr<Snapshot>> TakeSnapshot() override;
  Result<VerifySummary> Verify(std::string_view prefix, const ProgressFn& progress) override;
  Result<VerifySummary> VerifyTenant(std::string_view tenant, const ProgressFn& progress) override;
  Result<RuntimeStats> Stats() override;

  // Returns the daemon's own counters.
  Result<wire::ServerStats> Server();
  // Returns how the daemon stands, as `prefixctl top` shows it: {"runtime", "server", "watch"}
  // (docs/protocol.md).
  Result<wire::Json> Watch();
  // Returns whether tensors of this client go through shared memory.
  bool shared_memory() const;

 private:
  Result<std::unique_ptr<PutStream>> TryPut(const PutSpec& spec, bool* lost);
  RemoteStore(Address address, ConnectOptions options);
  Result<Connection::Reply> Do(const Connection::Call& call) { return link_->Do(call); }
  // Runs a long call on a connection of its own, so that steps need not wait for it.
  Result<Connection::Reply> DoAside(Connection::Call call);
  // Matches for MatchAsync, on the connection of one of its threads; finds a daemon that was
  // started again.
  Result<PrefixMatch> MatchAside(size_t thread, const MatchSpec& spec);
  Result<std::shared_ptr<Connection>> MatchConnection(size_t thread);

  const std::shared_ptr<Link> link_;
  std::mutex match_mutex_;  // guards the next two
  std::array<std::shared_ptr<Connection>, MatchCalls::kThreads> match_connections_;
  bool closing_ = false;
  std::unique_ptr<MatchCalls> matches_;
};

// RemoteStore makes these; they keep the connection alive.
std::unique_ptr<PutStream> MakeRemotePut(std::shared_ptr<Connection> connection, uint64_t put,
                                         uint32_t prompt_tokens, TokenRange missing,
                                         const KvGeometry& geometry,
                                         std::chrono::milliseconds wait);
Result<std::shared_ptr<Session>> AttachRemote(std::shared_ptr<Link> link, const AttachSpec& spec);
// Runs steps of the link's sessions; a request with any other session fails alone.
void RemoteStepBatch(const Link& link, std::span<StepRequest> requests);

}  // namespace prefixd
