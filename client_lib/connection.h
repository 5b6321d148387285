// Connects a client to the daemon: hello, then one call at a time, or a series of which several are
// in flight; steps go through a ring, several at a time, where there is one (ring_calls.h).
// Internal to client_lib.
//
// Tensors of a call go through the shared region when there is one and they fit, else inline. Every
// call lays the region out afresh, because calls take turns, and so does every series, whose calls
// have parts of equal size in it: no allocator is needed.
//
// A call runs under the calling thread's limits (base/call_scope.h): the daemon is told its
// deadline with it, and its cancellation when that comes. Only a daemon that does not answer for
// kGrace after that costs the connection. A commit that has begun goes on to its end, so that its
// answer is waited for as long as the connection lasts, unless the caller gives up
// (Call::gives_up).
//
// Thread-safety: Do and DoSeries may be called concurrently; they take turns. AwaitStep runs beside
// them. After a broken connection every call fails with kUnavailable, and in a child that fork()
// has made of this process with kFailedPrecondition.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/call_scope.h"
#include "base/opened_here.h"
#include "base/rows/copy_rows.h"
#include "client_lib/ring_calls.h"
#include "prefixd/client.h"
#include "protocol/codec.h"
#include "protocol/frame.h"
#include "protocol/shared_region.h"
#include "protocol/socket.h"

namespace prefixd {

class Connection {
 public:
  struct Call {
    wire::MessageType type;
    wire::Json control = wire::Json::object();
    std::vector<std::span<const std::byte>> in;  // borrowed
    std::vector<std::span<std::byte>> out;       // filled when Do succeeds; borrowed
    const ProgressFn* progress = nullptr;        // for long calls, which then have no timeout
    // The call is cancelled when one of these is, beside the calling thread's limits.
    std::vector<const CallLimits*> cancelled_by;
    // Rows for `out`, keys and values, may lie in the tenant's region of the host tier, and are
    // then copied from there in this way.
    std::optional<CopyMode> in_place = {};
    // A daemon that has not answered kGrace after the deadline costs the connection, also where the
    // call runs to its end: for who has something better to do than to wait.
    bool gives_up = false;
  };
  struct Reply {
    wire::Json control;
    std::vector<std::byte> payload;     // empty when the call has outputs
    SharedRegion region;                // came with the reply; writable in the reply to hello only
    std::shared_ptr<Descriptors> ring;  // came with the reply to hello: memory and eventfd
  };

  static Result<std::shared_ptr<Connection>> Open(const Address& address,
                                                  const ConnectOptions& options);

  // How long the daemon has to say that a call is late or cancelled.
  static constexpr std::chrono::milliseconds kGrace{5000};
  // How long after a deadline it says so of what it carries out.
  static constexpr std::chrono::milliseconds kSaysItself{100};

  Result<Reply> Do(Call call);
  // Carries out a call that ends a session or a put, whose answer nobody needs. Where the calling
  // thread's limits end before it has its turn, whoever has the turn sends it: nothing is left at
  // the daemon.
  void EndAtDaemon(Call call);

  // So many calls of a series are in flight at most: the daemon has work while the client copies.
  static constexpr size_t kInFlight = 4;
  // Carries out the calls, which should carry SeriesBytes each: the tensors of the next ones are
  // copied while the daemon works. `done(i)` is called for each that succeeded, in their order;
  // false ends the series with kCancelled. None is sent after one has failed; its error is returned
  // once those in flight have been answered, and the daemon may have carried these out.
  Status DoSeries(std::vector<Call> calls, const std::function<bool(size_t)>& done);
  // Returns how many bytes of tensors each call of a series that carries so many in all should
  // have.
  uint64_t SeriesBytes(uint64_t in_all) const;

  // Null: the daemon gave none.
  RingCalls* ring() { return ring_ ? &*ring_ : nullptr; }
  // Hands a slot of the ring over and waits for its answer. kUnavailable breaks the connection, as
  // for Do; the slot must not be used again then.
  // cancelled: whether nobody wants the answer any more; asked now and then.
  struct Bound {
    uint32_t deadline_ms = 0;  // as the daemon is told it; 0: none
    Socket::Deadline end;
  };
  // Until when a call of this thread that begins now is worth its work.
  Bound BoundNow(bool timed) const;
  Status AwaitStep(uint32_t slot, const Bound& bound, const std::function<bool()>& cancelled);

  // kFailedPrecondition in a child of the process that opened the connection.
  Status CheckProcess() const { return opened_.Check(); }

  bool alive() const { return end_ == End::kNone; }
  // Whether the connection broke because the daemon closed it or went away: not by a timeout, and
  // not by what was said on it.
  bool lost() const { return end_ == End::kLost; }
  // Looks whether the daemon has closed the connection, which otherwise the next call would find.
  void NoticeEnd();
  // Makes the running call, if there is one, and all later ones fail with kUnavailable.
  void Interrupt();
  const wire::HelloReply& hello() const { return hello_; }
  // Returns the daemon's numbers of the regions of rows in place that are mapped.
  std::vector<uint64_t> TierRegionIds() const;
  // Returns the region that a reply names, which came with it or is mapped already; keeps it, and
  // the others that are still in use.
  Result<std::shared_ptr<const SharedRegion>> TierRegionOf(Reply& reply);
  // Returns the largest sum of tensor bytes that one call should carry; the caller splits larger
  // ones.
  uint64_t chunk_bytes() const;

 private:
  enum class End { kNone, kLost, kOther };

  // A call from the sending of its request to its answer.
  struct Flight {
    Call call;
    uint64_t id = 0;
    bool shared = false;  // its tensors lie in the region, from `at` on
    uint64_t at = 0;
    Socket::Deadline deadline = {};
    bool told = false;       // that the caller's limits ended the call
    bool late = false;       // told because its own deadline passed
    bool cancelled = false;  // by its progress function: it fails, even where it was finished
    std::vector<uint64_t> releases = {};  // holds that it tells the daemon to release
    std::optional<Result<Reply>> answer = {};

    // Of one with a deadline: from then on the daemon would have said itself that it is late.
    Socket::Clock::time_point late_from() const { return *deadline - kGrace + kSaysItself; }
  };
  // Nothing is in flight any more when it goes: what is, ends with the connection.
  struct Landing;

  Connection() = default;
  Status SayHello(const ConnectOptions& options);
  // timed: not longer than a call may take.
  Result<CallLock> TakeTurn(bool timed);
  // Sends what EndAtDaemon left, without waiting for answers. Needs the turn.
  void SendEnds();
  // Fails where no call can begin.
  Status CheckUsable() const;
  // Sends a flight's request. kInvalidArgument: nothing was sent. Any other error has broken the
  // connection, and so has every error of Receive.
  Status Launch(Flight& flight);
  // Receives one message and hands it to the flight that it is for.
  Status Receive();
  // After a request could not be sent: what the daemon said before it closed the connection, or
  // else `sent`.
  Error LastWords(Flight& flight, const Error& sent);
  Status SendRequest(Flight& flight);
  Status SendCancel(uint64_t id, Socket::Deadline deadline);
  Result<wire::FrameHeader> ReceiveHeader(Socket::Deadline deadline, Reply* reply);
  Flight* FindFlight(uint64_t id) const;
  // Receives what a reply has behind its control part, and takes the outputs out of the region.
  Status ReceiveOutputs(const wire::FrameHeader& header, Flight* flight, Reply* reply,
                        Socket::Deadline deadline);
  // Copies rows from where a reply says that they lie; kUnavailable where it makes no sense, or the
  // daemon may have let go of them meanwhile.
  Status CopyInPlace(Flight& flight, Reply* reply);
  // Has the daemon release what was copied, without waiting for its answer.
  void ReleaseCopied();
  Status Progress(Flight& flight, const wire::Json& control);
  void Answer(Flight& flight, Result<Reply> answer);
  // Tells the daemon until when a call that begins now is worth its work, and returns how long to
  // wait for the answer.
  Socket::Deadline DeadlineOf(Call& call) const;
  // The earliest deadline of what is in flight.
  Socket::Deadline Earliest() const;
  // When the first call is late that was not told so; none: no call has a deadline.
  Socket::Deadline NextLate() const;
  // Waits until a message comes or a deadline has passed. Sends a cancel for each call that is late
  // or to end meanwhile, and shortens its deadline then, unless the call runs to its end.
  Status AwaitMessage();
  static Error Malformed(const std::string& why);
  // Marks the connection as broken, and closes it.
  Error Break(Error error, Socket::Deadline deadline);
  Error Break(Error error, End end);
  void EndAs(End end);  // the first reason counts
  // Returns the bytes of a call's tensor in the shared region.
  std::span<std::byte> RegionPart(uint64_t at, uint64_t bytes) const;

  void CloseSocket();

  const OpenedHere opened_;
  CallMutex mutex_;
  std::mutex socket_mutex_;  // taken to close the socket, and by Interrupt
  Socket socket_;
  SharedRegion region_;
  std::optional<RingCalls> ring_;
  wire::HelloReply hello_;
  uint32_t call_timeout_ms_ = 0;
  uint64_t next_id_ = 1;
  std::vector<Flight*> flights_;  // sent and not answered; mutex_ is held
  std::vector<uint64_t> copied_;  // holds to be released; likewise
  std::mutex to_end_mutex_;
  std::vector<Call> to_end_;  // what EndAtDaemon left
  mutable std::mutex tier_mutex_;
  std::map<uint64_t, std::shared_ptr<const SharedRegion>> tier_regions_;
  std::string broken_;  // why the connection can no longer be used; empty while it can
  std::atomic<End> end_ = End::kNone;
};

}  // namespace prefixd
