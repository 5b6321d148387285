// Carries out the calls of a connection: one in flight, or several of a series.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"
#include "client_lib/connection.h"

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

uint64_t TensorBytes(const Connection::Call& call) {
  return TotalBytes(call.in) + TotalBytes(call.out);
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

// Whether the daemon carries the call out to its end once it has begun, and answers it then,
// however late and cancelled it is.
bool RunsToItsEnd(MessageType type) {
  return type == MessageType::kPutCommit || type == MessageType::kPersist;
}

bool IsCancelled(const CallLimits* limits) {
  const Status goes_on = limits->Check();
  return !goes_on.ok() && goes_on.error().code == Code::kCancelled;
}

}  // namespace

struct Connection::Landing {
  explicit Landing(Connection& c) : connection(c) {}
  // After an exception the daemon still reads and writes the tensors of what was in flight, where
  // the next call's would lie.
  ~Landing() {
    if (connection.flights_.empty()) return;
    connection.EndAs(End::kOther);
    connection.CloseSocket();
    connection.flights_.clear();
  }
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;
  Connection& connection;
};

Status Connection::CheckUsable() const {
  PREFIXD_TRY(CheckCall());
  if (!broken_.empty()) return Error{Code::kUnavailable, broken_};
  if (!alive()) return Error{Code::kUnavailable, "the connection to the daemon is broken"};
  return {};
}

Result<CallLock> Connection::TakeTurn(bool timed) {
  PREFIXD_TRY(CheckProcess());  // before a lock that the parent may have held
  const CallScope scope(CallLimits::Of(timed ? call_timeout_ms_ : 0, nullptr));
  return CallLock::Take(mutex_);
}

void Connection::EndAtDaemon(Call call) {
  if (!CheckProcess().ok()) return;
  const MessageType type = call.type;
  const wire::Json named = call.control;
  auto done = Do(std::move(call));
  if (done.ok() || !EndedEarly(done.error())) return;
  {
    std::lock_guard lock(to_end_mutex_);
    to_end_.push_back({type, named, {}, {}, nullptr, {}});
  }
  // Whoever has the turn sends it when its call is over; nobody may have it any more.
  const CarriedScope no_other(nullptr);
  const CallScope soon(CallLimits::Of(1, nullptr));
  if (const auto turn = CallLock::Take(mutex_); turn.ok()) SendEnds();
}

void Connection::SendEnds() {
  std::vector<Call> calls;
  {
    std::lock_guard lock(to_end_mutex_);
    calls.swap(to_end_);
  }
  for (Call& call : calls) {
    if (!broken_.empty()) return;  // what it had has ended with it
    Flight end{
        .call = std::move(call), .id = next_id_++, .deadline = Socket::Clock::now() + kGrace};
    if (Status sent = SendRequest(end); !sent.ok()) (void)Break(sent.error(), end.deadline);
  }
}

Result<Connection::Reply> Connection::Do(Call call) {
  PREFIXD_ASSIGN(const CallLock turn, TakeTurn(/*timed=*/call.progress == nullptr));
  PREFIXD_TRY(CheckUsable());
  Flight flight{.call = std::move(call)};
  const Landing landing(*this);
  PREFIXD_TRY(Launch(flight));
  while (!flight.answer) PREFIXD_TRY(Receive());
  SendEnds();
  return *std::move(flight.answer);
}

Status Connection::DoSeries(std::vector<Call> calls, const std::function<bool(size_t)>& done) {
  PREFIXD_ASSIGN(const CallLock turn, TakeTurn(/*timed=*/true));
  PREFIXD_TRY(CheckUsable());
  uint64_t part = 1;  // of the region, for each call in flight
  for (const Call& call : calls) part = std::max(part, TensorBytes(call));
  const uint64_t parts = region_.empty() ? kInFlight : region_.bytes().size() / part;
  const size_t depth =
      std::clamp<uint64_t>(std::min<uint64_t>(parts, hello_.max_calls), 1, kInFlight);
  std::array<Flight, kInFlight> flights;
  const Landing landing(*this);
  Status failed;
  for (size_t begun = 0, ended = 0; ended < begun || (begun < calls.size() && failed.ok());) {
    if (begun < calls.size() && failed.ok() && begun - ended < depth) {
      failed = CheckCall();
      if (!failed.ok()) continue;
      Flight& flight = flights[begun % depth];
      flight = Flight{.call = std::move(calls[begun]), .at = begun % depth * part};
      failed = Launch(flight);
      if (failed.ok()) ++begun;
      if (!broken_.empty()) return failed;
      continue;
    }
    Flight& oldest = flights[ended % depth];
    while (!oldest.answer) PREFIXD_TRY(Receive());
    if (failed.ok() && !oldest.answer->ok()) failed = oldest.answer->error();
    if (failed.ok() && !done(ended)) {
      failed = Error{Code::kCancelled, "the rest of the call was not wanted any more"};
    }
    ++ended;
  }
  ReleaseCopied();
  SendEnds();
  return failed;
}

Status Connection::Launch(Flight& flight) {
  flight.id = next_id_++;
  const Call& call = flight.call;
  const uint64_t tensor_bytes = TensorBytes(call);
  flight.shared =
      !region_.empty() && tensor_bytes > 0 && tensor_bytes <= region_.bytes().size() - flight.at;
  if (!flight.shared && std::max(TotalBytes(call.in), TotalBytes(call.out)) >
                            std::max<uint64_t>(hello_.max_payload_bytes, 1)) {
    return InvalidArgument("a call of " + std::to_string(tensor_bytes) +
                           " tensor bytes is above the daemon's limit of " +
                           std::to_string(hello_.max_payload_bytes) + " (limits.max_frame_mib)");
  }
  if (flight.shared && call.in_place) {
    flight.call.control["regions"] = TierRegionIds();
    flight.releases = std::exchange(copied_, {});
    if (!flight.releases.empty()) flight.call.control["release"] = flight.releases;
  }
  flight.deadline = DeadlineOf(flight.call);
  flights_.reserve(flights_.size() + 1);  // what was sent is always listed
  Status sent = SendRequest(flight);
  if (!sent.ok() && sent.error().code == Code::kInvalidArgument) return sent;  // unsent
  flights_.push_back(&flight);
  if (!sent.ok()) return LastWords(flight, sent.error());
  if (RunsToItsEnd(call.type) && !call.gives_up) flight.deadline.reset();
  return {};
}

Error Connection::LastWords(Flight& flight, const Error& sent) {
  const Socket::Deadline deadline = flight.deadline;
  flight.deadline = Socket::Clock::now() + std::chrono::milliseconds(200);
  Status heard;
  while (heard.ok() && !flight.answer) heard = Receive();
  if (heard.ok() && !flight.answer->ok()) heard = flight.answer->error();
  if (!heard.ok() && heard.error().code != Code::kUnavailable) {
    if (broken_.empty()) (void)Break(heard.error(), End::kOther);
    return heard.error();
  }
  return Break(sent, deadline);
}

std::span<std::byte> Connection::RegionPart(uint64_t at, uint64_t bytes) const {
  const std::span<std::byte> all = region_.bytes();
  PREFIXD_CHECK(at <= all.size() && bytes <= all.size() - at, at, bytes, all.size());
  return all.subspan(at, bytes);
}

Status Connection::SendRequest(Flight& flight) {
  Call& call = flight.call;
  const bool shared = flight.shared;
  uint64_t offset = shared ? flight.at : 0;
  const uint64_t alignment = shared ? wire::kTensorAlignment : 1;
  if (!call.in.empty()) call.control["in"] = Layout(call.in, &offset, alignment);
  const uint64_t payload_bytes = shared ? 0 : offset;
  if (!call.out.empty()) {
    if (!shared) offset = 0;  // offsets of outputs count in the reply's payload
    call.control["out"] = Layout(call.out, &offset, alignment);
  }
  if (shared) {
    uint64_t at = flight.at;
    for (const auto& t : call.in) {
      if (!t.empty()) std::memcpy(RegionPart(at, t.size()).data(), t.data(), t.size());
      at += Align(t.size());
    }
  }
  const std::vector<std::byte> control = wire::PackControl(call.control);
  wire::FrameHeader header;
  header.type = call.type;
  header.request_id = flight.id;
  header.control_bytes = static_cast<uint32_t>(control.size());
  header.flags = shared ? wire::kFlagShared : 0;
  header.payload_bytes = payload_bytes;
  if (control.size() > wire::kMaxRequestControlBytes) {
    return InvalidArgument("the request's description is larger than 1 MiB; send fewer items");
  }
  const auto encoded = wire::EncodeHeader(header);
  std::vector<std::span<const std::byte>> parts = {encoded, control};
  if (!shared) parts.insert(parts.end(), call.in.begin(), call.in.end());
  return socket_.Send(parts, flight.deadline);
}

Status Connection::SendCancel(uint64_t id, Socket::Deadline deadline) {
  Flight cancel{.call = {MessageType::kCancel, {{"request", id}}, {}, {}, nullptr, {}},
                .id = next_id_++,
                .deadline = deadline};
  return SendRequest(cancel);
}

Socket::Deadline Connection::DeadlineOf(Call& call) const {
  const Bound bound = BoundNow(/*timed=*/call.progress == nullptr);
  if (!bound.end || call.type == MessageType::kHello) return bound.end;
  call.control["deadline_ms"] = bound.deadline_ms;
  return *bound.end + kGrace;
}

Socket::Deadline Connection::Earliest() const {
  Socket::Deadline earliest;
  for (const Flight* flight : flights_) {
    if (flight->deadline && (!earliest || *flight->deadline < *earliest)) {
      earliest = flight->deadline;
    }
  }
  return earliest;
}

Socket::Deadline Connection::NextLate() const {
  Socket::Deadline next;
  for (const Flight* flight : flights_) {
    if (flight->told || !flight->deadline || flight->call.type == MessageType::kHello) continue;
    const auto late = flight->late_from();
    if (!next || late < *next) next = late;
  }
  return next;
}

Status Connection::AwaitMessage() {
  const CallLimits* const own = CarriedScope::Current();
  const bool looks = own != nullptr || std::ranges::any_of(flights_, [](const Flight* flight) {
                       return !flight->call.cancelled_by.empty();
                     });
  while (true) {
    auto now = Socket::Clock::now();
    const Socket::Deadline deadline = Earliest(), late = NextLate();
    if (!looks && !late) return {};
    auto until = looks ? now + kCallSlice : Socket::Clock::time_point::max();
    if (late) until = std::clamp(*late, now, until);
    PREFIXD_ASSIGN(const bool answers, socket_.Readable(until));
    if (answers || (deadline && now >= *deadline)) return {};
    now = Socket::Clock::now();
    const bool ended = own != nullptr && IsCancelled(own);
    for (Flight* flight : flights_) {
      if (flight->told) continue;
      // The daemon knows the deadline of a call that it carries out, not of one that waits for a
      // thread; a cancel has both answered at once.
      flight->late = flight->deadline && flight->call.type != MessageType::kHello &&
                     now >= flight->late_from();
      if (!(flight->late || ended || std::ranges::any_of(flight->call.cancelled_by, IsCancelled))) {
        continue;
      }
      flight->told = true;
      if (!RunsToItsEnd(flight->call.type)) {
        flight->deadline =
            std::min(flight->deadline.value_or(Socket::Clock::time_point::max()), now + kGrace);
      }
      PREFIXD_TRY(SendCancel(flight->id, flight->deadline.value_or(now + kGrace)));
    }
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

Connection::Flight* Connection::FindFlight(uint64_t id) const {
  const auto it = std::ranges::find(flights_, id, [](const Flight* flight) { return flight->id; });
  return it == flights_.end() ? nullptr : *it;
}

void Connection::Answer(Flight& flight, Result<Reply> answer) {
  if (answer.ok() && flight.cancelled) {
    answer = Error{Code::kCancelled, "cancelled by its progress function"};
  } else if (!answer.ok() && answer.error().code == Code::kCancelled && flight.late) {
    answer = Error{Code::kDeadlineExceeded,
                   "the call did not end by its deadline (call_timeout_ms); it may be repeated"};
  }
  // A call that failed may not have released anything.
  if (!answer.ok()) copied_.insert(copied_.end(), flight.releases.begin(), flight.releases.end());
  flight.answer = std::move(answer);
  std::erase(flights_, &flight);
}

// Messages for no flight answer earlier calls that were given up.
Status Connection::Receive() {
  const auto malformed = [&](const std::string& why) { return Break(Malformed(why), End::kOther); };
  Reply reply;
  if (Status s = AwaitMessage(); !s.ok()) return Break(s.error(), Earliest());
  const Socket::Deadline deadline = Earliest();
  auto header = ReceiveHeader(deadline, &reply);
  if (!header.ok()) return Break(header.error(), deadline);
  std::vector<std::byte> control(header->control_bytes);
  if (Status s = socket_.Receive(control, deadline); !s.ok()) return Break(s.error(), deadline);
  auto json = wire::UnpackControl(control);
  if (!json.ok()) return malformed(json.error().message);

  Flight* const flight = FindFlight(header->request_id);
  switch (header->type) {
    case MessageType::kError: {
      Error error = wire::ErrorFromJson(*json);
      if (flight != nullptr) {
        Answer(*flight, std::move(error));
      } else if (header->request_id == 0) {
        (void)Break({error.code, "the daemon closed the connection: " + error.message},
                    End::kOther);
        return error;
      }
      return {};
    }
    case MessageType::kProgress:
      return flight != nullptr ? Progress(*flight, *json) : malformed("unexpected frame");
    case MessageType::kReply:
      break;
    default:
      return malformed("unexpected frame");
  }
  reply.control = *std::move(json);
  PREFIXD_TRY(ReceiveOutputs(*header, flight, &reply, deadline));
  if (flight != nullptr) Answer(*flight, std::move(reply));
  return {};
}

Status Connection::ReceiveOutputs(const wire::FrameHeader& header, Flight* flight, Reply* reply,
                                  Socket::Deadline deadline) {
  const auto receive = [&](std::span<std::byte> bytes) -> Status {
    if (Status s = socket_.Receive(bytes, deadline); !s.ok()) return Break(s.error(), deadline);
    return {};
  };
  if (flight == nullptr || flight->shared || flight->call.out.empty()) {
    reply->payload.resize(header.payload_bytes);
    PREFIXD_TRY(receive(reply->payload));
  } else {
    uint64_t expected = 0;
    for (const auto& t : flight->call.out) expected += t.size();
    if (header.payload_bytes != expected) {
      return Break(Malformed("wrong amount of tensor bytes"), End::kOther);
    }
    for (const auto& t : flight->call.out) PREFIXD_TRY(receive(t));
  }
  if (flight == nullptr || !flight->shared) return {};
  if (flight->call.in_place && reply->control.contains("hold")) {
    if (Status s = CopyInPlace(*flight, reply); !s.ok()) return Break(s.error(), End::kOther);
    return {};
  }
  uint64_t at = flight->at + TotalBytes(flight->call.in);
  for (const auto& t : flight->call.out) {
    if (!t.empty()) std::memcpy(t.data(), RegionPart(at, t.size()).data(), t.size());
    at += Align(t.size());
  }
  return {};
}

Status Connection::Progress(Flight& flight, const wire::Json& control) {
  const ProgressFn* const progress = flight.call.progress;
  if (progress == nullptr || !*progress) return {};
  const auto done = wire::Field<uint64_t>(control, "done");
  const auto total = wire::Field<uint64_t>(control, "total");
  const auto unit = wire::Field<std::string>(control, "unit");
  if (!done.ok() || !total.ok() || !unit.ok()) return Break(Malformed("progress"), End::kOther);
  if ((*progress)(*done, *total, *unit) || flight.cancelled) return {};
  flight.cancelled = true;
  const auto deadline = Socket::Clock::now() + kGrace;
  if (Status s = SendCancel(flight.id, deadline); !s.ok()) return Break(s.error(), flight.deadline);
  return {};
}

}  // namespace prefixd
