#include <utility>  // before Asio 1.74's coroutines, which forget it

#include "daemon/connections/connection.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <exception>

#include "base/capture_errors.h"
#include "base/check.h"
#include "daemon/calls/reply.h"
#include "daemon/connections/admission.h"
#include "daemon/limits/with_memory.h"
#include "protocol/socket.h"

namespace prefixd::daemon {

namespace asio = boost::asio;
using wire::Json;
using wire::MessageType;

namespace {

// From here on what a control part really takes is found out before it is unpacked.
constexpr uint64_t kSmallControl = 16u << 10;
// The parts that the io thread unpacks itself, and that a peer may send before it is admitted.
constexpr uint32_t kMaxHelloBytes = 16u << 10, kMaxCancelBytes = 256;
constexpr auto kProgressInterval = std::chrono::milliseconds(100);

bool RunsBeside(MessageType type) {
  return type == MessageType::kVerify || type == MessageType::kWaitReady ||
         type == MessageType::kMatch;
}

// Whether a call gives something back: it is carried out however late it is, so that a client that
// does not wait for its answer leaves nothing behind.
bool GivesBack(MessageType type) {
  return type == MessageType::kDetach || type == MessageType::kPutAbort ||
         type == MessageType::kReleaseRows;
}

// Returns until when the client waits for the call; max(): as long as it takes.
Result<CallLimits::Clock::time_point> DeadlineOf(const Json& control, const Frame& frame) {
  constexpr uint64_t kLongestMs = 1000ull * 3600 * 24 * 365;
  if (!control.contains("deadline_ms")) return CallLimits::Clock::time_point::max();
  PREFIXD_ASSIGN(const auto ms, wire::Field<uint64_t>(control, "deadline_ms"));
  return frame.received + std::chrono::milliseconds(std::min(ms, kLongestMs));
}

}  // namespace

Connection::Connection(ServerContext& context, Socket socket, bool local, uint64_t id)
    : context_(context),
      socket_(std::move(socket)),
      local_(local),
      id_(id),
      hello_timer_(context.io),
      reader_(context, socket_),
      writer_(socket_, std::chrono::seconds(context.config.write_timeout_s),
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
  const bool welcome = co_await Handshake();
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

// ---- hello --------------------------------------------------------------------------------------

asio::awaitable<bool> Connection::Handshake() {
  // The peer is not admitted yet, so its payload must be empty.
  Result<Frame> frame = co_await reader_.Read(/*max_payload=*/0, kMaxHelloBytes);
  if (!frame.ok()) {
    if (frame.error().code == Code::kUnavailable) {
      Close();
    } else {
      Fatal(frame.error());
    }
    co_return false;
  }
  if (frame->header.type != MessageType::kHello) {
    Fatal(InvalidArgument("the first message must be hello"));
    co_return false;
  }
  Result<Json> control = wire::UnpackControl(frame->control);
  Result<wire::Hello> hello =
      control.ok() ? wire::FromJson<wire::Hello>(*control, "hello") : control.error();
  if (!hello.ok()) {
    Fatal(hello.error());
    co_return false;
  }
  Result<Admission> admission = Admit(context_, *hello, local_, socket_.native_handle(), id_);
  if (!admission.ok()) {
    if (const auto more = context_.refusals.Line()) {
      spdlog::warn("connection {}: refused: {}{}", id_, admission.error().message, *more);
    }
    Fatal(admission.error());
    co_return false;
  }
  region_ = std::move(admission->region);
  region_memory_ = std::move(admission->memory);
  account_ = std::move(admission->account);
  reader_.TakeMemoryFrom(account_);
  ring_memory_ = std::move(admission->ring_memory);
  const StepRing& ring = admission->ring;
  shared_bytes_ = region_.bytes().size() + (ring.empty() ? 0 : ring.shape().bytes());
  context_.counters.shared_memory_bytes += shared_bytes_;
  const Peer& peer = admission->peer;
  handler_ = std::make_unique<RequestHandler>(
      *context_.store, peer, region_.bytes(),
      HandlerLimits{context_.config.max_frame_mib << 20, context_.config.max_puts, account_,
                    &context_.puts, &context_.sessions},
      context_.stats);
  spdlog::debug("connection {}: {} for tenant '{}'{}", id_, hello->client, peer.tenant,
                peer.admin ? " (admin)" : "");
  if (!SendHelloReply(frame->header.request_id, admission->reply, ring)) {
    Close();
    co_return false;
  }
  if (!ring.empty()) {
    admission->ring.CloseMemoryFd();
    auto served = context_.steps.Serve(std::move(admission->ring), *handler_);
    if (!served.ok()) {
      Fatal(served.error());
      co_return false;
    }
    ring_ = *std::move(served);
    ring_running_ = true;
  }
  co_return true;
}

// The reply is small and the first thing sent here, so it fits the socket's buffer and sending does
// not wait. The descriptors of the shared memory travel with the first byte.
bool Connection::SendHelloReply(uint64_t request_id, const wire::HelloReply& reply,
                                const StepRing& ring) {
  wire::FrameHeader header;
  header.type = MessageType::kReply;
  header.request_id = request_id;
  std::array<int, Descriptors::kMost> fds{};
  size_t n_fds = 0;
  if (!region_.empty()) {
    header.flags |= wire::kFlagRegion;
    fds[n_fds++] = region_.fd();
  }
  if (!ring.empty()) {
    header.flags |= wire::kFlagRing;
    fds[n_fds++] = ring.memory_fd();
    fds[n_fds++] = ring.bell_fd();
  }
  const std::vector<std::byte> bytes = EncodeFrame(header, wire::PackControl(wire::ToJson(reply)));
  const ssize_t sent =
      SendWithDescriptors(socket_.native_handle(), bytes, std::span(fds).first(n_fds));
  region_.CloseFd();
  context_.counters.bytes_out += bytes.size();
  return sent == static_cast<ssize_t>(bytes.size());
}

// ---- calls --------------------------------------------------------------------------------------

void Connection::CancelCalls(const Frame& frame) {
  if (frame.control.size() > kMaxCancelBytes) {
    return Fatal(InvalidArgument("a cancel has at most " + std::to_string(kMaxCancelBytes) +
                                 " bytes of control part"));
  }
  Result<Json> control = wire::UnpackControl(frame.control);
  if (!control.ok()) return Fatal(control.error());
  const auto id = wire::Field<uint64_t>(*control, "request");
  if (!id.ok()) return Fatal(id.error());
  // A cancel has no answer: the call that it names ends with kCancelled, or was done already.
  for (const auto& call : calls_.Cancel(*id)) {
    call->response.error = Error{Code::kCancelled, "the call was cancelled before it began"};
    Answer(*call);
  }
}

void Connection::Receive(Frame frame) {
  if (frame.header.type == MessageType::kCancel) return CancelCalls(frame);
  ++context_.counters.calls;
  if (frame.refused) {
    ++context_.counters.calls_failed;
    ++calls_in_flight_;
    return Send(MessageType::kError, frame.header.request_id, wire::ErrorToJson(*frame.refused), {},
                true);
  }
  if (calls_in_flight_ >= context_.config.max_calls) {
    ++context_.counters.calls_failed;
    const Error error{Code::kResourceExhausted,
                      "too many calls in flight on this connection (limits.max_calls = " +
                          std::to_string(context_.config.max_calls) + ")"};
    if (writer_.size() > 2 * context_.config.max_calls) return Close();  // it reads nothing
    ++calls_in_flight_;
    return Send(MessageType::kError, frame.header.request_id, wire::ErrorToJson(error), {}, true);
  }
  ++calls_in_flight_;
  const MessageType type = frame.header.type;
  const bool in_turn = !RunsBeside(type);
  reader_.Hold(frame.header.payload_bytes);
  const auto call = WithMemory([&] { return std::make_shared<Call>(std::move(frame), in_turn); });
  WithMemory([&] { calls_.Add(call); });
  if (in_turn) return RunNext();
  auto& pool = type == MessageType::kMatch ? context_.matches : context_.long_calls;
  PostSurely(pool, [self = shared_from_this(), call] { self->Work(call); });
}

void Connection::RunNext() {
  const uint64_t limit = context_.config.max_frame_mib << 20;
  if (closed_ || writer_.queued_bytes() > limit) return;
  if (const auto call = calls_.Next()) {
    PostSurely(context_.workers, [self = shared_from_this(), call] { self->Work(call); });
  }
}

void Connection::Work(const std::shared_ptr<Call>& call) {
  Frame& frame = call->frame;
  auto last = std::chrono::steady_clock::now() - kProgressInterval;
  const uint64_t request_id = frame.header.request_id;
  const ProgressFn progress = [&](uint64_t done, uint64_t total, std::string_view unit) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last >= kProgressInterval || done == total) {
      last = now;
      Json control = {{"done", done}, {"total", total}, {"unit", std::string(unit)}};
      asio::post(context_.io, [self = shared_from_this(), request_id, c = std::move(control)] {
        if (self->writer_.size() >= 16) return;  // a client that does not read misses some
        self->Answering([&] { self->Send(MessageType::kProgress, request_id, c, {}, false); });
      });
    }
    return call->canceller.count() == 0;
  };
  const Status handled = CaptureErrors([&]() -> Status {
    Request request;
    request.type = frame.header.type;
    request.shared = (frame.header.flags & wire::kFlagShared) != 0;
    if (frame.control.size() > kSmallControl) {
      PREFIXD_ASSIGN(const uint64_t unpacked, wire::ControlMemory(frame.control));
      PREFIXD_TRY(frame.memory.Resize(
          std::max(frame.memory.bytes(), frame.header.payload_bytes + unpacked)));
    }
    PREFIXD_ASSIGN(request.control, wire::UnpackControl(frame.control));
    CallLimits limits;
    PREFIXD_ASSIGN(limits.deadline, DeadlineOf(request.control, frame));
    limits.canceller = &call->canceller;
    if (GivesBack(request.type)) limits = {};
    const CallScope scope(limits);
    PREFIXD_TRY(CheckCall());
    request.payload = std::move(frame.payload);
    call->response = handler_->Handle(request, progress);
    PackReply(account_, context_.config.max_frame_mib << 20, &call->response);
    return {};
  });
  if (!handled.ok()) call->response.error = handled.error();
  PostSurely(context_.io, [self = shared_from_this(), call] { self->Finish(*call); });
}

void Connection::GiveUp(const Error& error) {
  spdlog::error("connection {}: closed: {}", id_, error.message);
  Close();
}

void Connection::Finish(Call& call) {
  calls_.End(call);
  Answer(call);
  RunNext();
  ReleaseWhenUnused();
}

void Connection::Answer(Call& call) {
  const Frame& frame = call.frame;
  Response& response = call.response;
  reader_.Release(frame.header.payload_bytes);
  if (response.error) ++context_.counters.calls_failed;
  Answering([&] {
    if (response.error) {
      spdlog::debug("connection {}: {}: {}", id_, wire::MessageName(frame.header.type),
                    response.error->ToString());
      Send(MessageType::kError, frame.header.request_id, wire::ErrorToJson(*response.error), {},
           true);
    } else {
      SendReply(frame.header.request_id, std::move(response));
    }
  });
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
  Send(MessageType::kError, 0, wire::ErrorToJson(error), {}, false);
}

// ---- writing ------------------------------------------------------------------------------------

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

// ---- the end ------------------------------------------------------------------------------------

void Connection::Drain() {
  draining_ = true;
  LeaveRing();
  calls_.CancelBeside();
  boost::system::error_code ignored;
  socket_.shutdown(Socket::shutdown_receive, ignored);  // wakes the reader
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
  socket_.close(ignored);
  writer_.Close();
  hello_timer_.cancel();
  reader_.Close();
  const CallQueue::Calls dropped = calls_.CancelAll();
  context_.counters.calls_dropped += dropped.size();
  calls_in_flight_ -= dropped.size();
  for (const auto& call : dropped) reader_.Release(call->frame.header.payload_bytes);
  ReleaseWhenUnused();
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
