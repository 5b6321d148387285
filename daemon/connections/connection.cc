#include <utility>  // before Asio 1.74's coroutines, which forget it

#include "daemon/connections/connection.h"

#include <spdlog/spdlog.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <exception>

#include "base/check.h"
#include "daemon/limits/with_memory.h"

namespace prefixd::daemon {

namespace asio = boost::asio;
using wire::Json;
using wire::MessageType;

Connection::Connection(ServerContext& context, Socket socket, bool local, TlsContext tls,
                       uint64_t id)
    : context_(context),
      stream_(std::move(socket)),
      tls_(std::move(tls)),
      local_(local),
      id_(id),
      hello_timer_(context.io),
      reader_(context, stream_),
      writer_(stream_, std::chrono::seconds(context.config.write_timeout_s),
              {[this](const FrameWriter::Frame& frame) { Sent(frame); },
               [this](const std::string& why) {
                 spdlog::debug("connection {}: closed: {}", id_, why);
                 Close();
               },
               [this](size_t bytes) { context_.counters.bytes_out += bytes; }}),
      calls_(context.counters) {
  ++context_.counters.connections_open;
  ++context_.counters.connections_total;
  if (!local_) ++context_.counters.connections_tcp;
}

Connection::~Connection() {
  --context_.counters.connections_open;
  if (!local_) --context_.counters.connections_tcp;
  context_.counters.shared_memory_bytes -= shared_bytes_;
}

void Connection::Start() {
  asio::co_spawn(
      context_.io, [self = shared_from_this()] { return self->Run(); },
      [self = shared_from_this()](const std::exception_ptr& thrown) {
        if (!thrown) return;
        try {
          std::rethrow_exception(thrown);
        } catch (const std::exception& e) {  // most likely std::bad_alloc for a frame
          spdlog::error("connection {}: closed: {}", self->id_, e.what());
        }
        self->Close();
      });
}

asio::awaitable<void> Connection::Run() {
  hello_timer_.expires_after(std::chrono::seconds(context_.config.hello_timeout_s));
  hello_timer_.async_wait([self = weak_from_this()](boost::system::error_code ec) {
    if (auto strong = self.lock(); strong && !ec) strong->Close();
  });
  bool welcome = co_await Secure();
  if (welcome) welcome = co_await Handshake();
  hello_timer_.cancel();
  while (welcome && !draining_ && !closed_) {
    Result<Frame> frame =
        co_await reader_.Read(wire::kMaxPayloadBytes, wire::kMaxRequestControlBytes);
    if (!frame.ok()) {
      if (frame.error().code == Code::kUnavailable) {  // the client went away
        if (!draining_) Close();
      } else {
        Fatal(frame.error());
      }
      break;
    }
    Receive(*std::move(frame));
  }
  if (!welcome) {
    draining_ = true;
    CloseIfDrained();
  }
}

void Connection::CloseIfSlow() {
  if (closed_ || !reader_.late()) return;
  if (const auto more = context_.refusals.Line()) {
    spdlog::info(
        "connection {}: closed: a message did not arrive in its time "
        "(limits.frame_timeout_s){}",
        id_, *more);
  }
  Close();
}

void Connection::CloseIfRevoked() {
  if (closed_ || !credential_ || context_.access.Holds(*credential_)) return;
  spdlog::info("connection {}: closed: tenant '{}' has other rights now (auth.tokens)", id_,
               tenant_);
  // The reason goes out if it can at once; calls under way must not keep the connection.
  Answering([&] {
    Send(MessageType::kError, 0,
         wire::ErrorToJson(Error{Code::kFailedPrecondition,
                                 "the rights by which this connection was admitted have changed; "
                                 "connect again"}),
         {}, false);
  });
  Close();
}

void Connection::AbortIdlePuts() {
  const auto limit = std::chrono::seconds(context_.config.put_idle_s);
  // While no call runs in turn, nothing else touches the puts.
  if (closed_ || released_ || !handler_ || !calls_.TakeTurn()) return;
  if (!handler_->HasIdlePut(limit)) return calls_.GiveTurn();
  OnWorker([this, limit] { handler_->AbortIdlePuts(limit); },
           [this] {
             calls_.GiveTurn();
             RunNext();
             ReleaseWhenUnused();
           });
}

void Connection::Fatal(const Error& error) {
  ++context_.counters.protocol_errors;
  if (const auto more = context_.refusals.Line()) {
    spdlog::info("connection {}: closed: {}{}", id_, error.message, *more);
  }
  draining_ = true;
  LeaveRing();
  DropCalls();  // nobody reads from here on, and so nobody would see the client go
  Send(MessageType::kError, 0, wire::ErrorToJson(error), {}, false);
}

void Connection::Send(MessageType type, uint64_t request_id, const Json& control,
                      std::vector<std::byte> payload, bool ends_call, int fd,
                      std::shared_ptr<const void> held, MemoryCharge memory) {
  wire::FrameHeader header;
  header.type = type;
  header.request_id = request_id;
  header.payload_bytes = payload.size();
  header.flags = fd >= 0 ? wire::kFlagRegion : 0;
  writer_.Push(shared_from_this(), {EncodeFrame(header, wire::PackControl(control)),
                                    std::move(payload),
                                    ends_call,
                                    fd,
                                    std::move(held),
                                    std::move(memory),
                                    {}});
}

void Connection::SendReply(uint64_t request_id, Response response) {
  wire::FrameHeader header;
  header.type = MessageType::kReply;
  header.request_id = request_id;
  header.payload_bytes = response.payload.size();
  header.flags = response.fd >= 0 ? wire::kFlagRegion : 0;
  writer_.Push(
      shared_from_this(),
      {EncodeFrame(header, response.packed), std::move(response.payload), true, response.fd,
       std::move(response.held), std::move(response.memory), std::move(response.packed_memory)});
}

void Connection::Sent(const FrameWriter::Frame& frame) {
  PREFIXD_CHECK(!frame.ends_call || calls_in_flight_ > 0);
  if (frame.ends_call) --calls_in_flight_;
  RunNext();
  CloseIfDrained();
}

void Connection::Drain() {
  draining_ = true;
  LeaveRing();
  calls_.CancelEndless();
  boost::system::error_code ignored;
  stream_.socket().shutdown(Socket::shutdown_receive, ignored);  // wakes the reader
  CloseIfDrained();
}

void Connection::LeaveRing() {
  if (!ring_ || std::exchange(ring_left_, true)) return;
  WithMemory([&] {
    context_.steps.Leave(ring_, [self = shared_from_this()] {
      PostSurely(self->context_.io, [self] {
        self->ring_running_ = false;
        self->CloseIfDrained();
        self->ReleaseWhenUnused();
      });
    });
  });
}

void Connection::CloseIfDrained() {
  if (draining_ && idle()) Close();
}

void Connection::Close() {
  if (closed_) return;
  closed_ = true;
  LeaveRing();
  if (ring_) StepService::Cancel(*ring_);
  boost::system::error_code ignored;
  stream_.socket().close(ignored);
  writer_.Close();
  hello_timer_.cancel();
  reader_.Close();
  DropCalls();
  ReleaseWhenUnused();
}

void Connection::DropCalls() {
  const CallQueue::Calls dropped = calls_.CancelAll();
  context_.counters.calls_dropped += dropped.size();
  calls_in_flight_ -= dropped.size();
  for (const auto& call : dropped) reader_.Release(call->frame.header.payload_bytes);
}

// Releases sessions and puts after the last call, on a worker because ending them does I/O.
void Connection::ReleaseWhenUnused() {
  if (!closed_ || calls_.running() || ring_running_ || released_) return;
  released_ = true;
  if (!handler_) {  // not admitted: it must not wait for workers, which may be busy
    return PostSurely(context_.io,
                      [self = shared_from_this()] { self->context_.on_gone(self.get()); });
  }
  OnWorker([this] { handler_->ReleaseAll(); }, [this] { context_.on_gone(this); });
}

}  // namespace prefixd::daemon
