#include "client_lib/connection.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "client_lib/open_tls.h"
#include "protocol/step_frame.h"

namespace prefixd {
namespace {

using wire::MessageType;

constexpr uint64_t Align(uint64_t n) {
  return (n + wire::kTensorAlignment - 1) / wire::kTensorAlignment * wire::kTensorAlignment;
}

uint64_t TotalBytes(const auto& tensors) {
  uint64_t total = 0;
  for (const auto& t : tensors) total += Align(t.size());
  return total;
}

// Lays tensors out one after another, starting at *offset, as [[offset, length], ...].
wire::Json Layout(const auto& tensors, uint64_t* offset, uint64_t alignment) {
  wire::Json list = wire::Json::array();
  for (const auto& t : tensors) {
    list.push_back(wire::Json::array({*offset, t.size()}));
    *offset += alignment > 1 ? Align(t.size()) : t.size();
  }
  return list;
}

Error Malformed(const std::string& why) {
  return {Code::kUnavailable, "the daemon sent a malformed answer: " + why};
}

}  // namespace

Result<std::shared_ptr<Connection>> Connection::Open(const Address& address,
                                                     const ConnectOptions& options) {
  const auto deadline =
      Socket::Clock::now() + std::chrono::milliseconds(options.connect_timeout_ms);
  std::shared_ptr<Connection> connection(new Connection);
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
  Call call{MessageType::kHello, {}, {}, {}, nullptr, {}};
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

void Connection::Interrupt() {
  std::lock_guard lock(socket_mutex_);
  socket_.Interrupt();
}

void Connection::CloseSocket() {
  std::lock_guard lock(socket_mutex_);
  socket_.Close();
}

std::shared_ptr<const SharedRegion> Connection::FindTierRegion(uint64_t id) const {
  std::lock_guard lock(tier_mutex_);
  const auto it = tier_regions_.find(id);
  return it == tier_regions_.end() ? nullptr : it->second;
}

std::vector<uint64_t> Connection::TierRegionIds() const {
  std::lock_guard lock(tier_mutex_);
  std::vector<uint64_t> ids;
  for (const auto& [id, region] : tier_regions_) ids.push_back(id);
  return ids;
}

std::shared_ptr<const SharedRegion> Connection::AddTierRegion(uint64_t id, SharedRegion region) {
  std::lock_guard lock(tier_mutex_);
  std::erase_if(tier_regions_, [](const auto& entry) { return entry.second.use_count() == 1; });
  auto& held = tier_regions_[id];
  if (!held) held = std::make_shared<const SharedRegion>(std::move(region));
  return held;
}

uint64_t Connection::chunk_bytes() const {
  const uint64_t inline_bytes = hello_.max_payload_bytes;
  return region_.empty() ? inline_bytes : std::max<uint64_t>(region_.bytes().size() / 2, 1);
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

Socket::Deadline Connection::DeadlineOf(Call& call) const {
  const Bound bound = BoundNow(/*timed=*/call.progress == nullptr);
  if (!bound.end || call.type == MessageType::kHello) return bound.end;
  call.control["deadline_ms"] = bound.deadline_ms;
  return *bound.end + kGrace;
}

std::span<std::byte> Connection::RegionPart(uint64_t at, uint64_t bytes) const {
  const std::span<std::byte> all = region_.bytes();
  PREFIXD_CHECK(at <= all.size() && bytes <= all.size() - at, at, bytes, all.size());
  return all.subspan(at, bytes);
}

Result<Connection::Reply> Connection::Do(Call call) {
  PREFIXD_ASSIGN(const CallLock turn, CallLock::Take(mutex_));
  PREFIXD_TRY(CheckCall());
  if (!broken_.empty()) return Error{Code::kUnavailable, broken_};
  if (!alive()) return Error{Code::kUnavailable, "the connection to the daemon is broken"};
  return DoLocked(call);
}

Result<Connection::Reply> Connection::DoLocked(Call& call) {
  const uint64_t id = next_id_++;
  const uint64_t tensor_bytes = TotalBytes(call.in) + TotalBytes(call.out);
  const bool shared =
      !region_.empty() && tensor_bytes > 0 && tensor_bytes <= region_.bytes().size();
  if (!shared && std::max(TotalBytes(call.in), TotalBytes(call.out)) >
                     std::max<uint64_t>(hello_.max_payload_bytes, 1)) {
    return InvalidArgument("a call of " + std::to_string(tensor_bytes) +
                           " tensor bytes is above the daemon's limit of " +
                           std::to_string(hello_.max_payload_bytes) + " (limits.max_frame_mib)");
  }
  const Socket::Deadline deadline = DeadlineOf(call);
  Status sent = SendRequest(call, id, shared, deadline);
  if (!sent.ok() && sent.error().code == Code::kInvalidArgument) return sent.error();  // unsent
  if (!sent.ok()) {
    // The daemon may have sent the reason before it closed the connection.
    const auto soon = Socket::Clock::now() + std::chrono::milliseconds(200);
    Result<Reply> last_words = ReceiveReply(call, id, shared, soon);
    if (!last_words.ok() && last_words.error().code != Code::kUnavailable) {
      if (broken_.empty()) (void)Break(last_words.error(), End::kOther);
      return last_words;
    }
    return Break(sent.error(), deadline);
  }
  return ReceiveReply(call, id, shared, deadline);
}

Status Connection::SendRequest(Call& call, uint64_t id, bool shared, Socket::Deadline deadline) {
  uint64_t offset = 0;
  const uint64_t alignment = shared ? wire::kTensorAlignment : 1;
  if (!call.in.empty()) call.control["in"] = Layout(call.in, &offset, alignment);
  const uint64_t payload_bytes = shared ? 0 : offset;
  if (!call.out.empty()) {
    if (!shared) offset = 0;  // offsets of outputs count in the reply's payload
    call.control["out"] = Layout(call.out, &offset, alignment);
  }
  if (shared) {
    uint64_t at = 0;
    for (const auto& t : call.in) {
      if (!t.empty()) std::memcpy(RegionPart(at, t.size()).data(), t.data(), t.size());
      at += Align(t.size());
    }
  }
  const std::vector<std::byte> control = wire::PackControl(call.control);
  wire::FrameHeader header;
  header.type = call.type;
  header.request_id = id;
  header.control_bytes = static_cast<uint32_t>(control.size());
  header.flags = shared ? wire::kFlagShared : 0;
  header.payload_bytes = payload_bytes;
  if (control.size() > wire::kMaxRequestControlBytes) {
    return InvalidArgument("the request's description is larger than 1 MiB; send fewer items");
  }
  const auto encoded = wire::EncodeHeader(header);
  std::vector<std::span<const std::byte>> parts = {encoded, control};
  if (!shared) parts.insert(parts.end(), call.in.begin(), call.in.end());
  return socket_.Send(parts, deadline);
}

Status Connection::SendCancel(uint64_t id, Socket::Deadline deadline) {
  Call cancel{MessageType::kCancel, {{"request", id}}, {}, {}, nullptr, {}};
  return SendRequest(cancel, next_id_++, false, deadline);
}

Status Connection::AwaitAnswer(const Call& call, uint64_t id, Socket::Deadline& deadline,
                               bool& cancelled) {
  const CallLimits* const own = CarriedScope::Current();
  if (own == nullptr && call.cancelled_by.empty()) return {};
  const auto is_cancelled = [](const CallLimits* limits) {
    const Status goes_on = limits->Check();
    return !goes_on.ok() && goes_on.error().code == Code::kCancelled;
  };
  while (true) {
    const auto now = Socket::Clock::now();
    PREFIXD_ASSIGN(const bool answers, socket_.Readable(now + kCallSlice));
    if (answers || (deadline && now >= *deadline)) return {};
    // A deadline is known to the daemon already.
    if (cancelled || !((own != nullptr && is_cancelled(own)) ||
                       std::ranges::any_of(call.cancelled_by, is_cancelled))) {
      continue;
    }
    cancelled = true;
    deadline = std::min(deadline.value_or(Socket::Clock::time_point::max()), now + kGrace);
    PREFIXD_TRY(SendCancel(id, deadline));
  }
}

Result<wire::FrameHeader> Connection::ReceiveHeader(Socket::Deadline deadline, Reply* reply) {
  std::array<std::byte, wire::kHeaderBytes> bytes{};
  auto descriptors = std::make_shared<Descriptors>();
  PREFIXD_TRY(socket_.ReceiveWith(bytes, deadline, descriptors.get()));
  auto header = wire::DecodeHeader(
      bytes, {wire::kMaxReplyControlBytes,
              hello_.max_payload_bytes ? hello_.max_payload_bytes : wire::kMaxPayloadBytes});
  if (!header.ok()) return header;
  const bool hello = hello_.server.empty();
  if (const int fd = (header->flags & wire::kFlagRegion) != 0 ? descriptors->Take() : -1; fd >= 0) {
    // The control part says how large it is; until it is read, the file's length counts.
    const off_t size = ::lseek(fd, 0, SEEK_END);
    if (size <= 0) {
      ::close(fd);
    } else {
      const auto length = static_cast<uint64_t>(size);
      PREFIXD_ASSIGN(reply->region,
                     hello ? SharedRegion::Map(fd, length) : SharedRegion::MapReadOnly(fd, length));
      reply->region.CloseFd();
    }
  }
  if (hello && (header->flags & wire::kFlagRing) != 0) reply->ring = std::move(descriptors);
  return header;
}

Result<Connection::Reply> Connection::ReceiveReply(Call& call, uint64_t id, bool shared,
                                                   Socket::Deadline deadline) {
  bool told = false;       // that the caller's limits ended the call
  bool cancelled = false;  // makes the call fail with kCancelled, even where it was finished
  const auto fail = [&](Error error) { return Break(std::move(error), deadline); };
  const auto malformed = [&](const std::string& why) { return Break(Malformed(why), End::kOther); };
  while (true) {
    Reply reply;
    if (Status s = AwaitAnswer(call, id, deadline, told); !s.ok()) return fail(s.error());
    auto header = ReceiveHeader(deadline, &reply);
    if (!header.ok()) return fail(header.error());
    std::vector<std::byte> control(header->control_bytes);
    if (Status s = socket_.Receive(control, deadline); !s.ok()) return fail(s.error());
    auto json = wire::UnpackControl(control);
    if (!json.ok()) return malformed(json.error().message);

    if (header->type == MessageType::kError) {
      const Error error = wire::ErrorFromJson(*json);
      if (header->request_id == id) return error;
      if (header->request_id != 0) continue;  // answers an earlier call that was given up
      (void)Break({error.code, "the daemon closed the connection: " + error.message}, End::kOther);
      return error;
    }
    if (header->type == MessageType::kProgress && header->request_id == id) {
      if (call.progress == nullptr || !*call.progress) continue;
      const auto done = wire::Field<uint64_t>(*json, "done");
      const auto total = wire::Field<uint64_t>(*json, "total");
      const auto unit = wire::Field<std::string>(*json, "unit");
      if (!done.ok() || !total.ok() || !unit.ok()) return malformed("progress");
      const bool go_on = (*call.progress)(*done, *total, *unit);
      if (go_on || cancelled) continue;
      cancelled = true;
      if (Status s = SendCancel(id, Socket::Clock::now() + kGrace); !s.ok()) return fail(s.error());
      continue;
    }
    if (header->type != MessageType::kReply) return malformed("unexpected frame");

    reply.control = *std::move(json);
    if (header->request_id != id || shared || call.out.empty()) {
      reply.payload.resize(header->payload_bytes);
      if (Status s = socket_.Receive(reply.payload, deadline); !s.ok()) return fail(s.error());
      if (header->request_id != id) continue;
    } else {
      uint64_t expected = 0;
      for (const auto& t : call.out) expected += t.size();
      if (header->payload_bytes != expected) return malformed("wrong amount of tensor bytes");
      for (const auto& t : call.out) {
        if (Status s = socket_.Receive(t, deadline); !s.ok()) return fail(s.error());
      }
    }
    if (shared) {
      uint64_t at = TotalBytes(call.in);
      for (const auto& t : call.out) {
        if (!t.empty()) std::memcpy(t.data(), RegionPart(at, t.size()).data(), t.size());
        at += Align(t.size());
      }
    }
    if (cancelled) return Error{Code::kCancelled, "cancelled by its progress function"};
    return reply;
  }
}

}  // namespace prefixd
