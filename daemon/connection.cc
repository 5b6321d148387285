#include <utility>  // before Asio 1.74's coroutines, which forget it

#include "daemon/connection.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <exception>

#include "base/capture_errors.h"
#include "base/check.h"
#include "daemon/admission.h"
#include "daemon/with_memory.h"

namespace prefixd::daemon {

namespace asio = boost::asio;
using wire::Json;
using wire::MessageType;

namespace {

constexpr size_t kFirstChunk = 1 << 20;  // memory follows the bytes that really arrive
// A control part takes up to so many times its bytes once it is unpacked.
constexpr uint64_t kControlMemory = 16;
constexpr auto kProgressInterval = std::chrono::milliseconds(100);

bool RunsBeside(MessageType type) {
  return type == MessageType::kVerify || type == MessageType::kWaitReady ||
         type == MessageType::kMatch;
}

}  // namespace

Connection::Connection(ServerContext& context, Socket socket, bool local, uint64_t id)
    : context_(context),
      socket_(std::move(socket)),
      local_(local),
      id_(id),
      hello_timer_(context.io),
      room_timer_(context.io, asio::steady_timer::time_point::max()),
      writer_(socket_, std::chrono::seconds(context.config.write_timeout_s),
              {[this](const FrameWriter::Frame& frame) { Sent(frame); },
               [this](const std::string& why) {
                 spdlog::debug("connection {}: closed: {}", id_, why);
                 Close();
               },
               [this](size_t bytes) { context_.counters.bytes_out += bytes; }}) {
  ++context_.counters.connections_open;
  ++context_.counters.connections_total;
}

Connection::~Connection() {
  --context_.counters.connections_open;
  context_.counters.shared_memory_bytes -= region_.bytes().size();
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
    Result<Frame> frame = co_await ReadFrame(wire::kMaxPayloadBytes);
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
  Result<Frame> frame = co_await ReadFrame(/*max_payload=*/0);
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
  Result<Admission> admission = Admit(context_, *hello, local_, socket_.native_handle());
  if (!admission.ok()) {
    spdlog::warn("connection {}: refused: {}", id_, admission.error().message);
    Fatal(admission.error());
    co_return false;
  }
  region_ = std::move(admission->region);
  region_memory_ = std::move(admission->memory);
  account_ = std::move(admission->account);
  context_.counters.shared_memory_bytes += region_.bytes().size();
  const Peer& peer = admission->peer;
  handler_ = std::make_unique<RequestHandler>(
      *context_.store, peer, region_.bytes(),
      HandlerLimits{context_.config.max_frame_mib << 20, context_.config.max_puts, account_},
      context_.stats);
  spdlog::debug("connection {}: {} for tenant '{}'{}", id_, hello->client, peer.tenant,
                peer.admin ? " (admin)" : "");
  if (!SendHelloReply(frame->header.request_id, admission->reply)) {
    Close();
    co_return false;
  }
  co_return true;
}

// The reply is small and the first thing sent here, so it fits the socket's buffer and sending does
// not wait. The descriptor of the shared memory travels with the first byte.
bool Connection::SendHelloReply(uint64_t request_id, const wire::HelloReply& reply) {
  wire::FrameHeader header;
  header.type = MessageType::kReply;
  header.request_id = request_id;
  header.flags = region_.empty() ? 0 : wire::kFlagRegion;
  const std::vector<std::byte> bytes = EncodeFrame(header, wire::ToJson(reply));
  const ssize_t sent = SendWithDescriptor(socket_.native_handle(), bytes, region_.fd());
  region_.CloseFd();
  context_.counters.bytes_out += bytes.size();
  return sent == static_cast<ssize_t>(bytes.size());
}

// ---- reading ------------------------------------------------------------------------------------

asio::awaitable<bool> Connection::ReadInto(std::vector<std::byte>* out, uint64_t bytes) {
  boost::system::error_code ec;
  size_t filled = 0;
  while (filled < bytes) {
    const size_t target = std::min<uint64_t>(bytes, std::max(kFirstChunk, filled * 2));
    out->resize(target);
    filled +=
        co_await asio::async_read(socket_, asio::buffer(out->data() + filled, target - filled),
                                  asio::redirect_error(asio::use_awaitable, ec));
    if (ec) co_return false;
  }
  context_.counters.bytes_in += bytes;
  co_return true;
}

asio::awaitable<bool> Connection::Skip(uint64_t bytes) {
  std::array<std::byte, 16384> nowhere;
  boost::system::error_code ec;
  for (uint64_t left = bytes; left > 0 && !ec;) {
    const size_t n = std::min<uint64_t>(left, nowhere.size());
    left -= co_await asio::async_read(socket_, asio::buffer(nowhere.data(), n),
                                      asio::redirect_error(asio::use_awaitable, ec));
  }
  context_.counters.bytes_in += bytes;
  co_return !ec;
}

asio::awaitable<Result<Connection::Frame>> Connection::ReadFrame(uint64_t max_payload) {
  const Error gone{Code::kUnavailable, "the client closed the connection"};
  std::array<std::byte, wire::kHeaderBytes> bytes{};
  boost::system::error_code ec;
  co_await asio::async_read(socket_, asio::buffer(bytes.data(), bytes.size()),
                            asio::redirect_error(asio::use_awaitable, ec));
  if (ec) co_return gone;
  context_.counters.bytes_in += bytes.size();
  const uint64_t limit = context_.config.max_frame_mib << 20;
  Result<wire::FrameHeader> header =
      wire::DecodeHeader(bytes, {wire::kMaxRequestControlBytes, std::min(limit, max_payload)});
  if (!header.ok()) co_return header.error();
  Frame frame;
  frame.header = *header;
  if (!wire::IsRequest(frame.header.type) || frame.header.request_id == 0) {
    co_return InvalidArgument("unknown message type " +
                              std::to_string(static_cast<unsigned>(frame.header.type)) +
                              " or request id 0");
  }
  auto memory = TakeForMessage(
      account_, frame.header.payload_bytes + kControlMemory * frame.header.control_bytes);
  if (!memory.ok()) {
    frame.refused = memory.error();
    const uint64_t rest = frame.header.control_bytes + frame.header.payload_bytes;
    frame.header.payload_bytes = 0;
    if (!co_await Skip(rest)) co_return gone;
    co_return frame;
  }
  frame.memory = *std::move(memory);
  const bool control_read = co_await ReadInto(&frame.control, frame.header.control_bytes);
  if (!control_read) co_return gone;
  while (!HasRoomFor(frame.header.payload_bytes) && !closed_) {
    room_timer_.expires_at(asio::steady_timer::time_point::max());
    co_await room_timer_.async_wait(asio::redirect_error(asio::use_awaitable, ec));
  }
  const bool payload_read = co_await ReadInto(&frame.payload, frame.header.payload_bytes);
  if (!payload_read) co_return gone;
  co_return frame;
}

// Payloads of unfinished calls count against one limit, answers not yet sent against another.
bool Connection::HasRoomFor(uint64_t payload_bytes) const {
  const uint64_t limit = context_.config.max_frame_mib << 20;
  return bytes_in_flight_ == 0 || bytes_in_flight_ + payload_bytes <= limit;
}

// ---- calls --------------------------------------------------------------------------------------

void Connection::Receive(Frame frame) {
  if (frame.header.type == MessageType::kCancel) {
    Result<Json> control = wire::UnpackControl(frame.control);
    if (!control.ok()) return Fatal(control.error());
    const auto id = wire::Field<uint64_t>(*control, "request");
    if (!id.ok()) return Fatal(id.error());
    const auto [first, last] = cancellable_.equal_range(*id);
    for (auto it = first; it != last; ++it) it->second->cancelled = true;
    return;  // a cancel has no answer: the call it names ends with kCancelled, or was done already
  }
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
  ++running_;
  bytes_in_flight_ += frame.header.payload_bytes;
  if (RunsBeside(frame.header.type)) return RunBeside(std::move(frame));
  WithMemory([&] { waiting_.push_back(std::move(frame)); });
  RunNext();
}

void Connection::RunBeside(Frame frame) {
  auto& pool = frame.header.type == MessageType::kMatch ? context_.matches : context_.long_calls;
  const auto call = WithMemory([&] { return std::make_shared<Call>(std::move(frame)); });
  WithMemory([&] { cancellable_.emplace(call->frame.header.request_id, call); });
  PostSurely(pool, [self = shared_from_this(), call] { self->Work(call, /*in_turn=*/false); });
}

void Connection::RunNext() {
  const uint64_t limit = context_.config.max_frame_mib << 20;
  if (turn_taken_ || waiting_.empty() || (!closed_ && writer_.queued_bytes() > limit)) return;
  turn_taken_ = true;
  const auto call = WithMemory([&] { return std::make_shared<Call>(std::move(waiting_.front())); });
  waiting_.pop_front();
  PostSurely(context_.workers,
             [self = shared_from_this(), call] { self->Work(call, /*in_turn=*/true); });
}

void Connection::Work(const std::shared_ptr<Call>& call, bool in_turn) {
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
    return !call->cancelled;
  };
  const Status handled = CaptureErrors([&]() -> Status {
    Request request;
    request.type = frame.header.type;
    request.shared = (frame.header.flags & wire::kFlagShared) != 0;
    PREFIXD_ASSIGN(request.control, wire::UnpackControl(frame.control));
    request.payload = std::move(frame.payload);
    call->response = handler_->Handle(request, progress);
    return {};
  });
  if (!handled.ok()) call->response.error = handled.error();
  PostSurely(context_.io,
             [self = shared_from_this(), call, in_turn] { self->Finish(*call, in_turn); });
}

void Connection::GiveUp(const Error& error) {
  spdlog::error("connection {}: closed: {}", id_, error.message);
  Close();
}

void Connection::Finish(Call& call, bool in_turn) {
  const Frame& frame = call.frame;
  Response& response = call.response;
  PREFIXD_CHECK(running_ > 0 && bytes_in_flight_ >= frame.header.payload_bytes, running_,
                bytes_in_flight_, frame.header.payload_bytes);
  --running_;
  if (in_turn) turn_taken_ = false;
  bytes_in_flight_ -= frame.header.payload_bytes;
  room_timer_.cancel();
  std::erase_if(cancellable_, [&](const auto& entry) { return entry.second.get() == &call; });
  if (response.error) ++context_.counters.calls_failed;
  Answering([&] {
    if (response.error) {
      spdlog::debug("connection {}: {}: {}", id_, wire::MessageName(frame.header.type),
                    response.error->ToString());
      Send(MessageType::kError, frame.header.request_id, wire::ErrorToJson(*response.error), {},
           true);
    } else {
      Send(MessageType::kReply, frame.header.request_id, response.control,
           std::move(response.payload), true, response.fd, std::move(response.held),
           std::move(response.memory));
    }
  });
  RunNext();
  ReleaseWhenUnused();
}

void Connection::AbortIdlePuts() {
  const auto limit = std::chrono::seconds(context_.config.put_idle_s);
  // While no call runs in turn, nothing else touches the puts.
  if (closed_ || released_ || turn_taken_ || !handler_ || !handler_->HasIdlePut(limit)) return;
  turn_taken_ = true;
  ++running_;
  OnWorker([this, limit] { handler_->AbortIdlePuts(limit); },
           [this] {
             --running_;
             turn_taken_ = false;
             RunNext();
             ReleaseWhenUnused();
           });
}

void Connection::Fatal(const Error& error) {
  ++context_.counters.protocol_errors;
  spdlog::info("connection {}: closed: {}", id_, error.message);
  draining_ = true;
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
  writer_.Push(shared_from_this(), {EncodeFrame(header, control), std::move(payload), ends_call, fd,
                                    std::move(held), std::move(memory)});
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
  for (auto& [id, call] : cancellable_) call->cancelled = true;
  boost::system::error_code ignored;
  socket_.shutdown(Socket::shutdown_receive, ignored);  // wakes the reader
  CloseIfDrained();
}

void Connection::CloseIfDrained() {
  if (draining_ && idle()) Close();
}

void Connection::Close() {
  if (closed_) return;
  closed_ = true;
  boost::system::error_code ignored;
  socket_.close(ignored);
  writer_.Close();
  hello_timer_.cancel();
  room_timer_.cancel();
  for (auto& [id, call] : cancellable_) call->cancelled = true;
  ReleaseWhenUnused();
}

// Releases sessions and puts after the last call, on a worker because ending them does I/O.
void Connection::ReleaseWhenUnused() {
  if (!closed_ || running_ > 0 || released_) return;
  released_ = true;
  OnWorker(
      [this] {
        if (handler_) handler_->ReleaseAll();
      },
      [this] { context_.on_gone(this); });
}

}  // namespace prefixd::daemon
