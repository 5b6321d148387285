#include <utility>  // before Asio 1.74's coroutines, which forget it

#include "daemon/connection.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <cerrno>
#include <cstring>

namespace prefixd::daemon {

namespace asio = boost::asio;
using wire::Json;
using wire::MessageType;

namespace {

constexpr size_t kFirstChunk = 1 << 20;  // memory follows the bytes that really arrive
constexpr auto kProgressInterval = std::chrono::milliseconds(100);
constexpr size_t kMaxTenantBytes = 256;

bool IsLong(MessageType type) {
  return type == MessageType::kVerify || type == MessageType::kWaitReady;
}

// Equal time for equal lengths, whatever the contents.
bool SameToken(std::string_view a, std::string_view b) {
  unsigned difference = a.size() != b.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

bool SameUser(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         (peer.uid == ::geteuid() || peer.uid == 0);
}

std::vector<std::byte> Encode(wire::FrameHeader header, const Json& control) {
  const std::vector<std::byte> packed = wire::PackControl(control);
  header.control_bytes = static_cast<uint32_t>(packed.size());
  const auto encoded = wire::EncodeHeader(header);
  std::vector<std::byte> head(encoded.size() + packed.size());
  std::copy(packed.begin(), packed.end(), std::copy(encoded.begin(), encoded.end(), head.begin()));
  return head;
}

// What fits of `bytes`, without waiting, and a descriptor with the first of them (-1: none). As
// sendmsg.
ssize_t SendWithDescriptor(int socket, std::span<std::byte> bytes, int fd) {
  iovec iov{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &fd, sizeof(fd));
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

Connection::Connection(ServerContext& context, Socket socket, bool local, uint64_t id)
    : context_(context),
      socket_(std::move(socket)),
      local_(local),
      id_(id),
      strand_(context.workers.get_executor()),
      hello_timer_(context.io),
      room_timer_(context.io, asio::steady_timer::time_point::max()) {
  ++context_.counters.connections_open;
  ++context_.counters.connections_total;
}

Connection::~Connection() {
  --context_.counters.connections_open;
  context_.counters.shared_memory_bytes -= region_.bytes().size();
}

void Connection::Start() {
  asio::co_spawn(
      context_.io, [self = shared_from_this()] { return self->Run(); }, asio::detached);
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
  // Nobody is known yet: no payload is taken.
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
  Peer peer;
  Result<wire::HelloReply> reply = Admit(*hello, &peer);
  if (!reply.ok()) {
    spdlog::warn("connection {}: refused: {}", id_, reply.error().message);
    Fatal(reply.error());
    co_return false;
  }
  handler_ = std::make_unique<RequestHandler>(
      *context_.store, peer, region_.bytes(),
      HandlerLimits{context_.config.max_frame_mib << 20, context_.config.max_puts}, context_.stats);
  spdlog::debug("connection {}: {} for tenant '{}'{}", id_, hello->client, peer.tenant,
                peer.admin ? " (admin)" : "");
  if (!SendHelloReply(frame->header.request_id, *reply)) {
    Close();
    co_return false;
  }
  co_return true;
}

Result<wire::HelloReply> Connection::Admit(const wire::Hello& hello, Peer* peer) {
  if (!local_ && !context_.token.empty() && !SameToken(hello.token, context_.token)) {
    return Error{Code::kFailedPrecondition,
                 "the daemon asks TCP clients for a token; this one is "
                 "missing or wrong"};
  }
  if (hello.tenant.size() > kMaxTenantBytes) {
    return InvalidArgument("the tenant's name is longer than 256 bytes");
  }
  peer->tenant = hello.tenant;
  peer->local = local_;
  peer->trusted = local_ && SameUser(socket_.native_handle());
  peer->admin = hello.admin;
  if (hello.admin && !peer->trusted) {
    return Error{Code::kFailedPrecondition,
                 "access to all tenants is for the daemon's own user over its Unix socket"};
  }
  wire::HelloReply reply;
  reply.server = std::string("prefixd ") + PREFIXD_VERSION;
  reply.pid = static_cast<uint32_t>(::getpid());
  reply.max_payload_bytes = context_.config.max_frame_mib << 20;
  reply.max_calls = static_cast<uint32_t>(context_.config.max_calls);
  reply.admin = peer->admin;
  if (local_ && hello.shared_memory && context_.config.shared_memory_mib > 0) {
    auto region = SharedRegion::Create(context_.config.shared_memory_mib << 20);
    if (region.ok()) {
      region_ = *std::move(region);
      context_.counters.shared_memory_bytes += region_.bytes().size();
      reply.region_bytes = region_.bytes().size();
    } else {
      spdlog::warn("connection {}: no shared memory: {}", id_, region.error().message);
    }
  }
  return reply;
}

// Small, and the first bytes ever sent here: they fit the socket's buffer, so no waiting. The
// descriptor of the shared memory travels with the first byte.
bool Connection::SendHelloReply(uint64_t request_id, const wire::HelloReply& reply) {
  wire::FrameHeader header;
  header.type = MessageType::kReply;
  header.request_id = request_id;
  header.flags = region_.empty() ? 0 : wire::kFlagRegion;
  std::vector<std::byte> bytes = Encode(header, wire::ToJson(reply));
  const ssize_t sent = SendWithDescriptor(socket_.native_handle(), bytes, region_.fd());
  region_.CloseFd();
  context_.counters.bytes_out += bytes.size();
  return sent == static_cast<ssize_t>(bytes.size());
}

// ---- reading
// --------------------------------------------------------------------------------------

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
  const bool control_read = co_await ReadInto(&frame.control, frame.header.control_bytes);
  if (!control_read) co_return gone;
  // Payloads of calls not yet done count against one limit: wait until there is room.
  while (bytes_in_flight_ > 0 && bytes_in_flight_ + frame.header.payload_bytes > limit &&
         !closed_) {
    room_timer_.expires_at(asio::steady_timer::time_point::max());
    co_await room_timer_.async_wait(asio::redirect_error(asio::use_awaitable, ec));
  }
  const bool payload_read = co_await ReadInto(&frame.payload, frame.header.payload_bytes);
  if (!payload_read) co_return gone;
  co_return frame;
}

// ---- calls
// ----------------------------------------------------------------------------------------

void Connection::Receive(Frame frame) {
  if (frame.header.type == MessageType::kCancel) {
    Result<Json> control = wire::UnpackControl(frame.control);
    if (!control.ok()) return Fatal(control.error());
    const auto id = wire::Field<uint64_t>(*control, "request");
    if (!id.ok()) return Fatal(id.error());
    if (const auto it = cancellable_.find(*id); it != cancellable_.end()) *it->second = true;
    return;  // no answer of its own: the call it names ends with kCancelled, or was done already
  }
  ++context_.counters.calls;
  if (calls_in_flight_ >= context_.config.max_calls) {
    ++context_.counters.calls_failed;
    const Error error{Code::kResourceExhausted,
                      "too many calls in flight on this connection (limits.max_calls = " +
                          std::to_string(context_.config.max_calls) + ")"};
    if (outgoing_.size() > 2 * context_.config.max_calls) return Close();  // it reads nothing
    ++calls_in_flight_;
    return Send(MessageType::kError, frame.header.request_id, wire::ErrorToJson(error), {}, true);
  }
  Dispatch(std::move(frame));
}

void Connection::Dispatch(Frame frame) {
  ++calls_in_flight_;
  ++running_;
  bytes_in_flight_ += frame.header.payload_bytes;
  CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  const bool is_long = IsLong(frame.header.type);
  if (is_long) cancellable_[frame.header.request_id] = cancelled;
  auto work = [self = shared_from_this(), cancelled,
               held = std::make_shared<Frame>(std::move(frame))] { self->Work(held, cancelled); };
  if (is_long) {
    asio::post(context_.long_calls, std::move(work));
  } else {
    asio::post(strand_, std::move(work));
  }
}

// On a worker thread.
void Connection::Work(const std::shared_ptr<Frame>& frame, const CancelFlag& cancelled) {
  auto last = std::chrono::steady_clock::now() - kProgressInterval;
  const uint64_t request_id = frame->header.request_id;
  const ProgressFn progress = [&](uint64_t done, uint64_t total, std::string_view unit) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last >= kProgressInterval || done == total) {
      last = now;
      Json control = {{"done", done}, {"total", total}, {"unit", std::string(unit)}};
      asio::post(context_.io, [self = shared_from_this(), request_id, c = std::move(control)] {
        if (self->outgoing_.size() < 16) {  // a client that does not read misses some
          self->Send(MessageType::kProgress, request_id, c, {}, false);
        }
      });
    }
    return !cancelled->load();
  };
  Request request;
  request.type = frame->header.type;
  request.shared = (frame->header.flags & wire::kFlagShared) != 0;
  Response response;
  Result<Json> control = wire::UnpackControl(frame->control);
  if (control.ok()) {
    request.control = *std::move(control);
    request.payload = std::move(frame->payload);
    response = handler_->Handle(request, progress);
  } else {
    response.error = control.error();
  }
  asio::post(context_.io, [self = shared_from_this(), frame,
                           r = std::make_shared<Response>(std::move(response))] {
    self->Finish(*frame, std::move(*r));
  });
}

void Connection::Finish(const Frame& frame, Response response) {
  --running_;
  bytes_in_flight_ -= frame.header.payload_bytes;
  room_timer_.cancel();
  cancellable_.erase(frame.header.request_id);
  if (response.error) {
    ++context_.counters.calls_failed;
    spdlog::debug("connection {}: {}: {}", id_, wire::MessageName(frame.header.type),
                  response.error->ToString());
    Send(MessageType::kError, frame.header.request_id, wire::ErrorToJson(*response.error), {},
         true);
  } else {
    Send(MessageType::kReply, frame.header.request_id, response.control,
         std::move(response.payload), true, response.fd, std::move(response.held));
  }
  ReleaseWhenUnused();
}

void Connection::Fatal(const Error& error) {
  ++context_.counters.protocol_errors;
  spdlog::info("connection {}: closed: {}", id_, error.message);
  draining_ = true;
  Send(MessageType::kError, 0, wire::ErrorToJson(error), {}, false);
}

// ---- writing
// --------------------------------------------------------------------------------------

void Connection::Send(MessageType type, uint64_t request_id, const Json& control,
                      std::vector<std::byte> payload, bool ends_call, int fd,
                      std::shared_ptr<const void> held) {
  if (closed_) {
    if (ends_call) --calls_in_flight_;
    return;
  }
  wire::FrameHeader header;
  header.type = type;
  header.request_id = request_id;
  header.payload_bytes = payload.size();
  header.flags = fd >= 0 ? wire::kFlagRegion : 0;
  outgoing_.push_back(
      {Encode(header, control), std::move(payload), ends_call, fd, std::move(held)});
  if (outgoing_.size() == 1) WriteNext();
}

void Connection::WriteNext() {
  const Outgoing& next = outgoing_.front();
  if (next.fd >= 0) return WriteDescriptor();
  const std::array<asio::const_buffer, 2> buffers = {
      asio::buffer(next.head.data(), next.head.size()),
      asio::buffer(next.payload.data(), next.payload.size())};
  asio::async_write(socket_, buffers,
                    [self = shared_from_this()](boost::system::error_code ec, size_t bytes) {
                      self->Written(ec, bytes);
                    });
}

// The first bytes of a frame, as many as the socket takes now; the rest follows as usual.
void Connection::WriteDescriptor() {
  Outgoing& next = outgoing_.front();
  const ssize_t sent = SendWithDescriptor(socket_.native_handle(), next.head, next.fd);
  if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
    return socket_.async_wait(Socket::wait_write,
                              [self = shared_from_this()](boost::system::error_code ec) {
                                if (ec || self->closed_) return self->Written(ec, 0);
                                self->WriteDescriptor();
                              });
  }
  if (sent < 0) return Written({errno, boost::system::system_category()}, 0);
  context_.counters.bytes_out += static_cast<uint64_t>(sent);
  next.head.erase(next.head.begin(), next.head.begin() + sent);
  next.fd = -1;
  next.held.reset();
  WriteNext();
}

void Connection::Written(boost::system::error_code ec, size_t bytes) {
  context_.counters.bytes_out += bytes;
  if (outgoing_.front().ends_call) --calls_in_flight_;
  outgoing_.pop_front();
  if (ec || closed_) {
    for (const Outgoing& o : outgoing_) {
      if (o.ends_call) --calls_in_flight_;
    }
    outgoing_.clear();
    return Close();
  }
  if (!outgoing_.empty()) return WriteNext();
  CloseIfDrained();
}

// ---- the end
// --------------------------------------------------------------------------------------

void Connection::Drain() {
  draining_ = true;
  for (auto& [id, flag] : cancellable_) *flag = true;
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
  hello_timer_.cancel();
  room_timer_.cancel();
  for (auto& [id, flag] : cancellable_) *flag = true;
  ReleaseWhenUnused();
}

// Sessions and puts end with their connection, after its last call, on a worker (ending them does
// I/O).
void Connection::ReleaseWhenUnused() {
  if (!closed_ || running_ > 0 || released_) return;
  released_ = true;
  asio::post(strand_, [self = shared_from_this()] {
    if (self->handler_) self->handler_->ReleaseAll();
    asio::post(self->context_.io, [self] { self->context_.on_gone(self.get()); });
  });
}

}  // namespace prefixd::daemon
