#include "client_lib/connection.h"

#include <algorithm>
#include <utility>

#include "client_lib/open_tls.h"
#include "protocol/step_frame.h"

namespace prefixd {

Result<std::shared_ptr<Connection>> Connection::Open(const Address& address,
                                                     const ConnectOptions& options) {
  auto deadline = Socket::Clock::now() + std::chrono::milliseconds(options.connect_timeout_ms);
  if (const CallLimits* limits = CarriedScope::Current()) {
    deadline = std::min(deadline, limits->Earliest());
  }
  // A child of fork() leaves its copy as it is: a lock may be held for ever, and the end of TLS
  // would be the parent's.
  std::shared_ptr<Connection> connection(new Connection, [](const Connection* ended) {
    if (ended->opened_.holds()) delete ended;
  });
  PREFIXD_ASSIGN(connection->socket_, Socket::Connect(address, deadline));
  if (address.tls) PREFIXD_TRY(StartTls(address, options, deadline, &connection->socket_));
  connection->call_timeout_ms_ = options.connect_timeout_ms;  // until hello is answered
  ConnectOptions hello = options;
  hello.shared_memory = options.shared_memory && address.kind == Address::Kind::kUnix;
  PREFIXD_TRY(connection->SayHello(hello));
  connection->call_timeout_ms_ = options.call_timeout_ms;
  return connection;
}

Status Connection::SayHello(const ConnectOptions& options) {
  Call call{wire::MessageType::kHello, {}, {}, {}, nullptr, {}};
  call.control = wire::ToJson(wire::Hello{"prefixd_client", options.tenant, options.token,
                                          options.admin, options.shared_memory,
                                          options.shared_memory ? wire::kStepFrameVersion : 0});
  PREFIXD_ASSIGN(Reply reply, Do(std::move(call)));
  region_ = std::move(reply.region);
  PREFIXD_ASSIGN(hello_, wire::FromJson<wire::HelloReply>(reply.control, "hello"));
  if (hello_.region_bytes > 0 && region_.empty()) {
    return Malformed("shared memory was announced but not passed");
  }
  if (hello_.ring_slots > 0) {
    if (!reply.ring) return Malformed("a ring was announced but not passed");
    const int memory = reply.ring->Take(), bell = reply.ring->Take();
    PREFIXD_ASSIGN(StepRing ring,
                   StepRing::Map(memory, bell, {hello_.ring_slots, hello_.ring_slot_bytes}));
    ring_.emplace(std::move(ring), options.spin_us);
  }
  return {};
}

Error Connection::Malformed(const std::string& why) {
  return {Code::kUnavailable, "the daemon sent a malformed answer: " + why};
}

Error Connection::Break(Error error, End end) {
  broken_ = error.message;
  EndAs(end);
  CloseSocket();
  return error;
}

// A failure before the deadline is the end of the connection; one after it says nothing about the
// daemon.
Error Connection::Break(Error error, Socket::Deadline deadline) {
  const bool late = deadline && Socket::Clock::now() >= *deadline;
  const bool lost = error.code == Code::kUnavailable && !late;
  return Break(std::move(error), lost ? End::kLost : End::kOther);
}

void Connection::EndAs(End end) {
  End none = End::kNone;
  end_.compare_exchange_strong(none, end);
}

Status Connection::AwaitStep(uint32_t slot, const Bound& bound,
                             const std::function<bool()>& cancelled) {
  Socket::Deadline deadline = bound.end;
  if (deadline) *deadline += kGrace;
  bool late = false, told = false;
  const auto give_up = [&] {
    const auto now = Socket::Clock::now();
    if (!told && cancelled()) {
      told = true;
      ring_->Cancel(slot);
      deadline = std::min(deadline.value_or(Socket::Clock::time_point::max()), now + kGrace);
    }
    late = deadline && now >= *deadline;
    std::lock_guard lock(socket_mutex_);
    return late || socket_.ended();
  };
  if (ring_->Await(slot, give_up)) return {};
  // Another thread may be in Do, so the socket is only interrupted.
  EndAs(late ? End::kOther : End::kLost);
  Interrupt();
  return Error{Code::kUnavailable,
               late ? "the daemon did not answer in time" : "the daemon closed the connection"};
}

void Connection::NoticeEnd() {
  std::lock_guard lock(socket_mutex_);
  if (!socket_.ended()) return;
  EndAs(End::kLost);
  socket_.Interrupt();  // another thread may be in Do
}

void Connection::Interrupt() {
  std::lock_guard lock(socket_mutex_);
  socket_.Interrupt();
}

void Connection::CloseSocket() {
  std::lock_guard lock(socket_mutex_);
  socket_.Close();
}

uint64_t Connection::chunk_bytes() const {
  const uint64_t inline_bytes = hello_.max_payload_bytes;
  return region_.empty() ? inline_bytes : std::max<uint64_t>(region_.bytes().size() / 2, 1);
}

uint64_t Connection::SeriesBytes(uint64_t in_all) const {
  // Small ones, so that the first and the last, beside which nothing else goes on, take little of
  // the time, and what one side has copied is in a cache yet when the other comes to it.
  constexpr uint64_t kCalls = 4, kLeast = 2u << 20, kMost = 4u << 20;
  const uint64_t room = region_.empty() ? hello_.max_payload_bytes : region_.bytes().size();
  return std::clamp<uint64_t>(room / kInFlight, 1, std::clamp(in_all / kCalls, kLeast, kMost));
}

Connection::Bound Connection::BoundNow(bool timed) const {
  const auto now = Socket::Clock::now();
  auto end = Socket::Clock::time_point::max();
  if (timed && call_timeout_ms_ > 0) end = now + std::chrono::milliseconds(call_timeout_ms_);
  if (const CallLimits* limits = CarriedScope::Current()) end = std::min(end, limits->Earliest());
  if (end == Socket::Clock::time_point::max()) return {};
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - now).count();
  return {static_cast<uint32_t>(std::clamp<int64_t>(left, 1, UINT32_MAX)), end};
}

}  // namespace prefixd
