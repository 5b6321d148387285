// Serves one client: reads frames, has them carried out, and writes answers in the order in which
// the calls finish. Calls of a connection run one after another in the order they were sent; none
// starts while the client has left more bytes of answers unread than one message may hold. verify,
// wait_ready and match run beside them: a match that a slow disk holds up delays no step. Calls end
// by their deadline, by a cancel message and with their connection; those that wait then never
// begin.
//
// Steps through the connection's ring (step_service.h) run beside all of them.
//
// Thread-safety: everything runs on the io thread except Work, which runs on worker threads. The
// object keeps itself alive until its last call is done and its sessions and puts are released.
#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/capture_errors.h"
#include "daemon/access/access.h"
#include "daemon/access/tls.h"
#include "daemon/calls/request_handler.h"
#include "daemon/connections/call_queue.h"
#include "daemon/connections/frame_reader.h"
#include "daemon/connections/frame_writer.h"
#include "daemon/connections/server_context.h"
#include "daemon/connections/step_service.h"
#include "daemon/connections/stream.h"
#include "daemon/limits/with_memory.h"
#include "protocol/frame.h"
#include "protocol/shared_region.h"

namespace prefixd::daemon {

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;

  // tls: by which it speaks TLS; null: in the clear.
  Connection(ServerContext& context, Socket socket, bool local, TlsContext tls, uint64_t id);
  ~Connection();
  uint64_t id() const { return id_; }
  void Start();
  // Stops reading, finishes the calls in flight, then closes.
  void Drain();
  // Closes now; running calls are cancelled, their answers and the waiting calls dropped.
  void Close();
  // Closes the connection, and says why, if what it was admitted by does not hold any more
  // (auth.tokens was read again).
  void CloseIfRevoked();
  // Closes the connection if a message under way has not arrived in its time. The server calls it
  // with AbortIdlePuts.
  void CloseIfSlow();
  // Aborts puts that nothing was written to for limits.put_idle_s. The server calls this every few
  // seconds.
  void AbortIdlePuts();

 private:
  boost::asio::awaitable<void> Run();
  // Speaks TLS from here on, where that is to be (connection_tls.cc); false as for Handshake.
  boost::asio::awaitable<bool> Secure();
  // Reads the first frame, which must be a hello; false when the connection must not be used.
  boost::asio::awaitable<bool> Handshake();
  bool SendHelloReply(uint64_t request_id, const wire::HelloReply& reply, const StepRing& ring);

  void Receive(Frame frame);  // one request: refuse, cancel or run
  void RunNext();             // starts the first waiting call
  // Runs on a worker thread and hands its result to Finish on the io thread.
  void Work(const std::shared_ptr<Call>& call);
  void Finish(Call& call);
  void Answer(Call& call);
  void CancelCalls(const Frame& frame);  // a cancel message
  // Runs `answer`, which sends; closes the connection where there is no memory for that.
  template <typename Answer>
  void Answering(const Answer& answer) {
    const Status answered = CaptureErrors([&]() -> Status {
      answer();
      return {};
    });
    if (!answered.ok()) GiveUp(answered.error());
  }
  void GiveUp(const Error& error);
  // Runs `task` on a worker, then `then` on the io thread, whatever becomes of the task.
  template <typename Task, typename Then>
  void OnWorker(Task task, Then then) {
    context_.workers.PostOwn([self = shared_from_this(), task, then] {
      static_cast<void>(CaptureErrors([&]() -> Status {
        task();
        return {};
      }));
      PostSurely(self->context_.io, [self, then] { then(); });
    });
  }
  // Cancels the calls that run, and drops those that wait.
  void DropCalls();
  // Drops the calls, tells the client, and closes when those that run have ended.
  void Fatal(const Error& error);

  void Send(wire::MessageType type, uint64_t request_id, const wire::Json& control,
            std::vector<std::byte> payload, bool ends_call, int fd = -1,
            std::shared_ptr<const void> held = nullptr, MemoryCharge memory = {});
  void SendReply(uint64_t request_id, Response response);
  void Sent(const FrameWriter::Frame& frame);
  // Takes no more calls of the ring; running ones end.
  void LeaveRing();
  bool idle() const { return calls_in_flight_ == 0 && !ring_running_ && writer_.empty(); }
  void CloseIfDrained();
  void ReleaseWhenUnused();

  ServerContext& context_;
  Stream stream_;
  const TlsContext tls_;
  const bool local_;  // Unix socket
  const uint64_t id_;
  boost::asio::steady_timer hello_timer_;
  SharedRegion region_;
  RegionMemory::Taken region_memory_;
  std::string tenant_;  // once it is known
  std::optional<Credential> credential_;
  MemoryAccount account_;  // the tenant's
  std::unique_ptr<RequestHandler> handler_;
  std::shared_ptr<StepService::Ring> ring_;
  RegionMemory::Taken ring_memory_;
  bool ring_left_ = false;
  bool ring_running_ = false;  // its calls may run, also after LeaveRing
  uint64_t shared_bytes_ = 0;  // of region and ring
  FrameReader reader_;
  FrameWriter writer_;
  CallQueue calls_;
  uint64_t calls_in_flight_ = 0;        // answers not yet sent
  std::atomic<uint64_t> abandoned_{0};  // answered calls that wait for a thread, which drops them
  bool draining_ = false, closed_ = false, released_ = false;
};

}  // namespace prefixd::daemon
