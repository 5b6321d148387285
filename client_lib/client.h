// What a decoder links. One C++ interface over an embedded store (one directory, no daemon) and
// over a running daemon (Unix socket or TCP); both behave alike.
//
//   auto client = prefixd::Client::Connect("unix:/run/prefixd/prefixd.sock");
//   auto session = (*client)->Attach({.model = "llama", .tokens = prompt});
//   for each layer: (*session)->Step(layer, q, y, lse, nullptr);
//                   MergeStates(y_h, &lse_h, y_own_h, lse_own_h);   // attention/step.h
//
// Thread-safety: a Client may be shared by threads; calls over one connection are answered in
// turn. Sessions and PutStreams keep what they need of the client alive. Values of PutStream and
// Session: runtime/store.h and runtime/session.h say shapes, units and errors.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/result.h"
#include "runtime/restore.h"
#include "runtime/session.h"
#include "runtime/store.h"
#include "runtime/types.h"

namespace prefixd {

struct ConnectOptions {
  std::string tenant;  // default for calls that name none
  uint32_t connect_timeout_ms = 5000;
  uint32_t call_timeout_ms = 120000;  // 0: wait forever
  bool shared_memory = true;          // Unix sockets only: tensors go through shared memory
  std::string token;                  // TCP, where the daemon asks for one
  bool admin = false;  // every tenant; for the daemon's own user over its Unix socket only
};

class Client {
 public:
  // A store of this process's own; locks the directory.
  static Result<std::unique_ptr<Client>> OpenEmbedded(const RuntimeOptions& options);
  // "unix:/path/to.sock", a plain path, or "tcp:host:port".
  static Result<std::unique_ptr<Client>> Connect(std::string_view address,
                                                 const ConnectOptions& options = {});
  virtual ~Client() = default;

  virtual Status RegisterModel(const ModelSpec& spec) = 0;
  virtual Result<std::vector<ModelSpec>> Models() = 0;
  virtual Result<std::unique_ptr<PutStream>> BeginPut(const PutSpec& spec) = 0;
  virtual Result<PrefixMatch> Match(std::string_view model, std::string_view tenant,
                                    std::span<const uint32_t> tokens) = 0;
  virtual Status WaitReady(std::string_view prefix, const ProgressFn& progress) = 0;
  virtual Result<std::shared_ptr<Session>> Attach(const AttachSpec& spec) = 0;
  // Layer steps of several sessions of this client, run together; remotely one message carries
  // them all. Every request gets its own status (runtime/store.h).
  virtual void StepBatch(std::span<StepRequest> requests) = 0;

  virtual Result<std::vector<PrefixSummary>> Prefixes() = 0;
  virtual Result<PrefixDetail> Prefix(std::string_view prefix) = 0;
  virtual Status Remove(std::string_view prefix) = 0;
  virtual Status SetRetention(std::string_view prefix, const Retention& retention) = 0;
  virtual Result<VerifySummary> Verify(std::string_view prefix, const ProgressFn& progress) = 0;
  virtual Result<RuntimeStats> Stats() = 0;
};

}  // namespace prefixd
