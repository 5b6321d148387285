// Carries out the requests of one connection on the store; connection.h does the transport. The
// handler owns the connection's sessions and puts, so that they end with it.
//
// Thread-safety: one thread at a time calls Handle, except that verify, wait_ready, match, explain,
// rewrite, persist and read_layer may run beside any other call. StepInSlot may be called
// concurrently, beside all others but ReleaseAll. Tenants: every request is confined to the peer's
// tenant unless the peer is an admin; prefixes of other tenants look absent.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/memory_budget.h"
#include "daemon/calls/message.h"
#include "daemon/calls/peer.h"
#include "daemon/calls/slow_steps.h"
#include "daemon/calls/step_scratch.h"
#include "daemon/limits/slots.h"
#include "daemon/watch/watch.h"
#include "prefixd/result.h"
#include "prefixd/store.h"
#include "protocol/codec.h"
#include "protocol/frame.h"
#include "protocol/step_frame.h"

namespace prefixd::daemon {

Error NoSession(uint64_t handle);  // on this connection

struct HandlerLimits {
  uint64_t max_payload_bytes = 256ull << 20;
  uint64_t max_puts = 16;
  MemoryAccount account = {};  // for what a call copies and answers
  // Of the whole daemon; null: not bounded. All of these outlive the handler.
  Slots* put_slots = nullptr;
  Slots* session_slots = nullptr;
  Watch* watch = nullptr;  // where calls are counted; null: nowhere
  SlowSteps* slow_steps = nullptr;
  uint64_t connection = 0;  // for the ids of requests
};

class RequestHandler {
 public:
  // The client may write to `region` (may be empty) at any time, so the handler copies inputs out
  // of it before checking or using them, or hands them to who does (PutStream::Write). Store and
  // region must outlive the handler.
  RequestHandler(Store& store, Peer peer, std::span<std::byte> region, HandlerLimits limits,
                 std::function<wire::ServerStats()> server_stats);

  Response Handle(const Request& request, const ProgressFn& progress);
  // Carries out the steps in a slot of the connection's ring and leaves their answers there. The
  // client may change the slot at any time.
  StepServed StepInSlot(std::span<std::byte> slot, StepScratch& scratch);
  // Detaches every session, aborts every put and unpins rows read in place.
  void ReleaseAll();
  // A put that nothing was written to for `limit` is idle and only keeps disk space from others.
  bool HasIdlePut(std::chrono::seconds limit) const;
  void AbortIdlePuts(std::chrono::seconds limit);

 private:
  using Clock = std::chrono::steady_clock;
  struct PieceAt {  // of a write of several messages; piece 0: of none
    uint32_t layer = 0, first = 0;
    uint64_t piece = 0;
    bool operator==(const PieceAt&) const = default;
  };
  struct Put {
    std::unique_ptr<PutStream> stream;
    Clock::time_point last_used;
    Slots::Slot slot;
    std::string model;
    Clock::time_point begun;
    PieceAt next = {};  // what goes on with the client's last write
  };
  struct Attached {
    std::shared_ptr<Session> session;
    Slots::Slot slot;
    uint64_t watched = 0;  // its number in Watch
  };
  struct HeldRows {
    std::shared_ptr<const void> hold;
    MemoryCharge memory;
  };
  // Where tensors of a call are kept that lie in shared memory. kPrivate: in memory of the daemon,
  // for calls that look at them more than once. kInPlace: where they are, for calls that read each
  // byte once before they check it, or that write rows and never look at them again.
  enum class Tensors : uint8_t { kPrivate, kInPlace };
  // Tensors of a request: views of its payload, or copies of what lay in shared memory, or views of
  // it.
  struct Inputs {
    std::vector<std::span<const std::byte>> tensors;
    std::vector<std::vector<std::byte>> copies;
    MemoryCharge memory;  // of the copies, here and as elements
    Result<std::span<const std::byte>> Bytes(size_t i) const;
    template <typename T>  // float or uint32_t; the size must be whole elements
    Result<std::vector<T>> Elements(size_t i) const;
  };
  // Results are gathered in private memory and handed over at the end, or written where they go.
  struct Outputs {
    std::vector<wire::Extent> extents;
    std::span<std::byte> region;    // where the outputs lie in place; else empty
    std::vector<std::byte> buffer;  // all outputs in sequence
    MemoryCharge memory;
    std::vector<size_t> starts;
    Result<std::span<std::byte>> Bytes(size_t i);
    Result<std::span<float>> Floats(size_t i);
  };

  // Notes how long a call took from `begun` until now.
  void Took(Timed what, Watch::Clock::time_point begun) const {
    if (limits_.watch != nullptr) limits_.watch->Took(what, Watch::Clock::now() - begun);
  }
  Result<wire::Json> Dispatch(const Request& request, const ProgressFn& progress,
                              Response* response);
  Result<Inputs> ReadInputs(const Request& request, Tensors where = Tensors::kPrivate) const;
  Result<Outputs> ReadOutputs(const Request& request, Tensors where = Tensors::kPrivate) const;
  void HandOver(const Request& request, Outputs outputs, Response* response) const;

  Status CheckRight(wire::MessageType type) const;
  Result<std::string> TenantFor(const std::string& named) const;
  // Returns whose prefix it is. Another tenant's looks, and takes as long, as one that nobody has:
  // nothing else is asked of the store before this was.
  Result<std::string> OwnPrefix(const std::string& id) const;

  // One function per message; it returns the reply's control part.
  Result<wire::Json> RegisterModel(const Request& request);
  Result<wire::Json> Stats(const Request& request) const;
  Result<wire::Json> Match(const Request& request) const;
  Result<wire::Json> ListPrefixes(const Request& request) const;
  Result<wire::Json> Remove(const Request& request);
  Result<wire::Json> SetLifetime(const Request& request);
  Result<wire::Json> WaitReady(const Request& request, const ProgressFn& progress);

  // operator_calls.cc
  Result<wire::Json> Explain(const Request& request) const;
  Result<wire::Json> RemoveModel(const Request& request);
  Result<wire::Json> Verify(const Request& request, const ProgressFn& progress);
  Result<wire::Json> Rewrite(const Request& request, const ProgressFn& progress);
  Result<wire::Json> Compress(const Request& request, const ProgressFn& progress);
  Result<wire::Json> TakeSnapshot(const Request& request);

  // put_calls.cc
  // Whether an error says that the client waits for others' puts: it asks again until they end.
  static bool Waits(const Request& request, const Error& error);
  Result<wire::Json> BeginPut(const Request& request);
  Result<wire::Json> OnPut(const Request& request);  // whatever names an open put
  Result<wire::Json> PutWrite(const Request& request, Put& put);
  Result<wire::Json> PutQueries(const Request& request, PutStream& put);
  Result<wire::Json> PutCommit(const Put& put, bool* ended);
  Result<wire::Json> Persist(const Request& request);

  // session_calls.cc
  Result<wire::Json> Attach(const Request& request);
  Result<wire::Json> Step(const Request& request, Response* response);
  Result<wire::Json> AttendExact(const Request& request, Response* response);
  Result<wire::Json> ReadRows(const Request& request, Response* response);
  Result<wire::Json> ReadRange(const Request& request, Response* response);
  Result<wire::Json> ReadLayer(const Request& request, Response* response);
  Result<wire::Json> ReadTokens(const Request& request, Response* response);
  Result<wire::Json> Append(const Request& request);
  Result<wire::Json> Truncate(const Request& request);
  Result<wire::Json> Fork(const Request& request);
  Result<wire::Json> ForkPersisted(const Request& request);
  Result<wire::Json> Select(const Request& request, Response* response);
  Result<wire::Json> Summary(const Request& request, Response* response);
  Result<wire::Json> SetPolicy(const Request& request);
  Result<wire::Json> Report(const Request& request);
  Result<wire::Json> Detach(const Request& request);
  // Makes a session one of this connection's; returns its handle and what a client must know of it.
  // watched: its number in the daemon's watch; 0 where there is none.
  wire::Json Keep(std::shared_ptr<Session> session, Slots::Slot slot, uint64_t watched);
  // The same of one that continues another, with how many own tokens it has.
  Result<wire::Json> KeepFork(std::shared_ptr<Session> session, Slots::Slot slot);
  Result<std::shared_ptr<Session>> FindSession(const wire::Json& control) const;
  std::shared_ptr<Session> SessionOf(uint64_t handle) const;  // null: there is none
  // Detaches it, and keeps what it read.
  Result<SessionReport> End(const Attached& attached);

  // in_place_calls.cc
  Result<wire::Json> ReadInPlace(const Request& request, Response* response);
  Result<wire::Json> ReleaseRows(const Request& request);
  // Returns an answer that says where the rows lie, if the client can map them and all are there.
  Result<std::optional<wire::Json>> LayerInPlaceFor(const Request& request, Session& session,
                                                    const LayerRead& read, Response* response);
  // Releases the rows that a request names in `release`; kNotFound: one of them is not held, and
  // the others are released.
  Status ReleaseNamed(const wire::Json& control);
  wire::Json Hold(const RowsInPlace::Region& region, std::shared_ptr<const void> hold,
                  MemoryCharge memory);

  // ring_steps.cc
  Status RunSteps(std::span<std::byte> slot, StepScratch& scratch, StepServed* served);
  void NoteFailedStep(const Error& error) const;

  Store& store_;
  const Peer peer_;
  const std::span<std::byte> region_;
  const HandlerLimits limits_;
  const std::function<wire::ServerStats()> server_stats_;
  uint64_t next_handle_ = 1;
  std::map<uint64_t, Put> puts_;
  mutable std::mutex sessions_mutex_;
  std::map<uint64_t, Attached> sessions_;
  std::mutex held_mutex_;  // guards what follows
  uint64_t next_hold_ = 1;
  std::map<uint64_t, HeldRows> held_rows_;
  std::unique_ptr<Snapshot> snapshot_;  // as long as the connection
};

}  // namespace prefixd::daemon
