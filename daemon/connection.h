// Serves one client: reads frames, has them carried out, and writes answers in the order in which
// the calls finish. Calls of a connection run one after another in the order they were sent; none
// starts while the client has left more bytes of answers unread than one message may hold. verify,
// wait_ready and match run beside them: a match that a slow disk holds up delays no step.
//
// Thread-safety: everything runs on the io thread except Work, which runs on worker threads. The
// object keeps itself alive until its last call is done and its sessions and puts are released.
#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/capture_errors.h"
#include "daemon/frame_writer.h"
#include "daemon/request_handler.h"
#include "daemon/server_context.h"
#include "daemon/with_memory.h"
#include "protocol/frame.h"
#include "protocol/shared_region.h"

namespace prefixd::daemon {

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;

  Connection(ServerContext& context, Socket socket, bool local, uint64_t id);
  ~Connection();
  void Start();
  // Stops reading, finishes the calls in flight, then closes.
  void Drain();
  // Closes now; running calls finish, and their answers are dropped.
  void Close();
  // Aborts puts that nothing was written to for limits.put_idle_s. The server calls this every few
  // seconds.
  void AbortIdlePuts();

 private:
  struct Frame {
    wire::FrameHeader header;
    std::vector<std::byte> control, payload;
    MemoryCharge memory;           // of both
    std::optional<Error> refused;  // there was no memory for the payload, which was skipped
  };
  // A Call is made before its work begins, so that its end needs no memory.
  struct Call {
    explicit Call(Frame f) : frame(std::move(f)) {}
    Frame frame;
    Response response;
    std::atomic<bool> cancelled{false};
  };

  boost::asio::awaitable<void> Run();
  // Reads the first frame, which must be a hello; false when the connection must not be used.
  boost::asio::awaitable<bool> Handshake();
  boost::asio::awaitable<Result<Frame>> ReadFrame(uint64_t max_payload);
  boost::asio::awaitable<bool> ReadInto(std::vector<std::byte>* out, uint64_t bytes);
  // Reads and forgets so many bytes.
  boost::asio::awaitable<bool> Skip(uint64_t bytes);
  bool SendHelloReply(uint64_t request_id, const wire::HelloReply& reply);

  bool HasRoomFor(uint64_t payload_bytes) const;

  void Receive(Frame frame);  // one request: refuse, cancel or run
  void RunBeside(Frame frame);
  void RunNext();  // starts the first waiting call
  // Runs on a worker thread and hands its result to Finish on the io thread.
  void Work(const std::shared_ptr<Call>& call, bool in_turn);
  void Finish(Call& call, bool in_turn);
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
    PostSurely(context_.workers, [self = shared_from_this(), task, then] {
      static_cast<void>(CaptureErrors([&]() -> Status {
        task();
        return {};
      }));
      PostSurely(self->context_.io, [self, then] { then(); });
    });
  }
  void Fatal(const Error& error);  // tells the client, then closes

  void Send(wire::MessageType type, uint64_t request_id, const wire::Json& control,
            std::vector<std::byte> payload, bool ends_call, int fd = -1,
            std::shared_ptr<const void> held = nullptr, MemoryCharge memory = {});
  void Sent(const FrameWriter::Frame& frame);
  bool idle() const { return calls_in_flight_ == 0 && writer_.empty(); }
  void CloseIfDrained();
  void ReleaseWhenUnused();

  ServerContext& context_;
  Socket socket_;
  const bool local_;  // Unix socket
  const uint64_t id_;
  boost::asio::steady_timer hello_timer_;
  boost::asio::steady_timer room_timer_;  // wakes the reader when payload memory is free again
  SharedRegion region_;
  MemoryCharge region_memory_;
  MemoryAccount account_;  // the tenant's, once it is known
  std::unique_ptr<RequestHandler> handler_;
  // Calls beside the others, by request id; a client may give several the same id.
  std::multimap<uint64_t, std::shared_ptr<Call>> cancellable_;
  FrameWriter writer_;
  std::deque<Frame> waiting_;  // calls that run one after another
  bool turn_taken_ = false;    // one of those calls runs, or idle puts are being aborted
  uint64_t calls_in_flight_ = 0;
  uint64_t running_ = 0;  // calls whose work is not done, also after Close
  uint64_t bytes_in_flight_ = 0;
  bool draining_ = false, closed_ = false, released_ = false;
};

}  // namespace prefixd::daemon
