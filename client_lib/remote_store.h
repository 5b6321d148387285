// Implements the store of a running daemon. Engines use it through Store; tools such as prefixctl
// also use its further methods. Internal to client_lib and prefixctl.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "client_lib/connection.h"
#include "prefixd/client.h"
#include "protocol/codec.h"

namespace prefixd {

// The next call that belongs to no session and no put replaces a broken connection (after a restart
// of the daemon, for example). Sessions and puts of the old connection fail with kUnavailable.
class RemoteStore final : public Store {
 public:
  static Result<std::unique_ptr<RemoteStore>> Connect(std::string_view address,
                                                      const ConnectOptions& options);

  Status RegisterModel(const ModelSpec& spec) override;
  Result<std::vector<ModelSpec>> Models() override;
  Result<std::unique_ptr<PutStream>> BeginPut(const PutSpec& spec) override;
  Result<PrefixMatch> Match(const MatchSpec& spec) override;
  Status WaitReady(std::string_view prefix, const ProgressFn& progress) override;
  Result<std::shared_ptr<Session>> Attach(const AttachSpec& spec) override;
  void StepBatch(std::span<StepRequest> requests) override;
  Result<std::vector<PrefixSummary>> Prefixes() override;
  Result<PrefixDetail> Prefix(std::string_view prefix) override;
  Status Remove(std::string_view prefix) override;
  Status SetLifetime(std::string_view prefix, const Lifetime& lifetime) override;
  Result<VerifySummary> Verify(std::string_view prefix, const ProgressFn& progress) override;
  Result<VerifySummary> VerifyTenant(std::string_view tenant, const ProgressFn& progress) override;
  Result<RuntimeStats> Stats() override;

  // Returns the daemon's own counters.
  Result<wire::ServerStats> Server();
  // Returns whether tensors of this client go through shared memory.
  bool shared_memory() const;

 private:
  RemoteStore(Address address, ConnectOptions options)
      : address_(std::move(address)), options_(std::move(options)) {}
  Result<std::shared_ptr<Connection>> Live();
  Result<Connection::Reply> Do(Connection::Call call);
  // Runs a long call on a connection of its own, so that steps need not wait for it.
  Result<Connection::Reply> DoAside(Connection::Call call);

  const Address address_;
  const ConnectOptions options_;
  mutable std::mutex mutex_;
  std::shared_ptr<Connection> connection_;
};

// RemoteStore makes these; they keep the connection alive.
std::unique_ptr<PutStream> MakeRemotePut(std::shared_ptr<Connection> connection, uint64_t put,
                                         TokenRange missing, const KvGeometry& geometry);
std::shared_ptr<Session> MakeRemoteSession(std::shared_ptr<Connection> connection, uint64_t session,
                                           SessionInfo info, StepPolicy policy);
// Runs steps of sessions of one daemon; a request with any other session fails alone.
void RemoteStepBatch(std::span<StepRequest> requests);

}  // namespace prefixd
