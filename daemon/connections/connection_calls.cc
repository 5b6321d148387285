// Runs a client's calls, in turn or beside one another, and answers them.
#include <utility>  // before Asio 1.74's coroutines, which forget it

#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>

#include "base/call_scope.h"
#include "base/capture_errors.h"
#include "daemon/calls/reply.h"
#include "daemon/connections/connection.h"
#include "daemon/process/log_event.h"

namespace prefixd::daemon {

namespace asio = boost::asio;
using wire::Json;
using wire::MessageType;

namespace {

// From here on what a control part really takes is found out before it is unpacked.
constexpr uint64_t kSmallControl = 16u << 10;
// The io thread unpacks a cancel message itself.
constexpr uint32_t kMaxCancelBytes = 256;
constexpr auto kProgressInterval = std::chrono::milliseconds(100);
constexpr size_t kMostProgress = 16;  // messages that wait to be sent
// Calls of one connection that read into shared memory at once: enough that the disk always has
// work, and few beside the workers of a tenant. More of them wait for their turn.
constexpr size_t kMostBeside = 4;

Runs RunsOf(const wire::FrameHeader& header) {
  switch (header.type) {
    case MessageType::kVerify:
    case MessageType::kWaitReady:
    case MessageType::kMatch:
    case MessageType::kExplain:
    case MessageType::kRewrite:
    case MessageType::kCompress:
    case MessageType::kPersist:
      return Runs::kLong;
    case MessageType::kReadLayer:
      // The disk reads for one while rows of another are checked and copied. Replies with rows in
      // them wait for the client to take them, one at a time.
      return (header.flags & wire::kFlagShared) != 0 ? Runs::kBeside : Runs::kInTurn;
    default:
      return Runs::kInTurn;
  }
}

// Returns until when the client waits for the call; max(): as long as it takes.
Result<CallLimits::Clock::time_point> DeadlineOf(const Json& control, const Frame& frame) {
  constexpr uint64_t kLongestMs = 1000ull * 3600 * 24 * 365;
  if (!control.contains("deadline_ms")) return CallLimits::Clock::time_point::max();
  PREFIXD_ASSIGN(const auto ms, wire::Field<uint64_t>(control, "deadline_ms"));
  return frame.received + std::chrono::milliseconds(std::min(ms, kLongestMs));
}

}  // namespace

void Connection::CancelCalls(const Frame& frame) {
  if (frame.control.size() > kMaxCancelBytes) {
    return Fatal(InvalidArgument("a cancel has at most " + std::to_string(kMaxCancelBytes) +
                                 " bytes of control part"));
  }
  Result<Json> control = wire::UnpackControl(frame.control);
  if (!control.ok()) return Fatal(control.error());
  const auto id = wire::Field<uint64_t>(*control, "request");
  if (!id.ok()) return Fatal(id.error());
  const Error cancelled{Code::kCancelled, "the call was cancelled before it began"};
  // A cancel has no answer: the call that it names ends with kCancelled, or was done already.
  for (const auto& call : calls_.Cancel(*id)) {
    call->response.error = cancelled;
    Answer(*call);
  }
  // One that waits for a thread ends now, too. What is left for the thread to find is bounded, or a
  // client that sends and cancels would fill the queue of the workers.
  while (abandoned_ < context_.config.max_calls) {
    const auto call = calls_.TakeUnbegun(*id);
    if (!call) break;
    ++abandoned_;
    call->response.error = cancelled;
    Finish(*call);
    call->frame = {};  // the thread may come late
  }
}

void Connection::Receive(Frame frame) {
  if (frame.header.type == MessageType::kCancel) return CancelCalls(frame);
  // It reads nothing, and whatever it sends would add an answer.
  if (writer_.size() > 2 * context_.config.max_calls + kMostProgress) return Close();
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
    ++calls_in_flight_;
    return Send(MessageType::kError, frame.header.request_id, wire::ErrorToJson(error), {}, true);
  }
  ++calls_in_flight_;
  const MessageType type = frame.header.type;
  Runs runs = RunsOf(frame.header);
  if (runs == Runs::kBeside && calls_.running(runs) >= kMostBeside) runs = Runs::kInTurn;
  reader_.Hold(frame.header.payload_bytes);
  const auto call = WithMemory([&] { return std::make_shared<Call>(std::move(frame), runs); });
  WithMemory([&] { calls_.Add(call); });
  if (runs == Runs::kInTurn) return RunNext();
  auto& pool = runs == Runs::kBeside         ? context_.workers
               : type == MessageType::kMatch ? context_.matches
                                             : context_.long_calls;
  pool.Post(tenant_, [self = shared_from_this(), call] { self->Work(call); });
}

void Connection::RunNext() {
  const uint64_t limit = context_.config.max_frame_mib << 20;
  if (closed_ || writer_.queued_bytes() > limit) return;
  if (const auto call = calls_.Next()) {
    context_.workers.Post(tenant_, [self = shared_from_this(), call] { self->Work(call); });
  }
}

void Connection::Work(const std::shared_ptr<Call>& call) {
  if (!call->Take()) {  // it was cancelled
    --abandoned_;
    return;
  }
  Frame& frame = call->frame;
  auto last = std::chrono::steady_clock::now() - kProgressInterval;
  const uint64_t request_id = frame.header.request_id;
  const ProgressFn progress = [&](uint64_t done, uint64_t total, std::string_view unit) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last >= kProgressInterval || done == total) {
      last = now;
      Json control = {{"done", done}, {"total", total}, {"unit", std::string(unit)}};
      asio::post(context_.io, [self = shared_from_this(), request_id, c = std::move(control)] {
        // A client that does not read misses some.
        if (self->writer_.size() >= kMostProgress) return;
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
    call->id = request.id = RequestId(id_, frame.header.request_id, request.control);
    CallLimits limits;
    PREFIXD_ASSIGN(limits.deadline, DeadlineOf(request.control, frame));
    limits.canceller = &call->canceller;
    if (call->gives_back()) limits = {};
    const CallScope scope(limits);
    PREFIXD_TRY(CheckCall());
    request.payload = std::move(frame.payload);
    call->response = handler_->Handle(request, progress);
    PackReply(account_, request.type, context_.config.max_frame_mib << 20, &call->response);
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
  const auto& error = response.error ? response.error : response.failed_step;
  const bool failed = error && !response.waits;
  if (failed) {
    ++context_.counters.calls_failed;
    WithMemory([&] {
      context_.watch.Failed(tenant_, wire::MessageName(frame.header.type), call.id, *error);
    });
  }
  Answering([&] {
    if (failed && Logs(LogLevel::kDebug)) {
      LogEvent(LogLevel::kDebug, "a call failed",
               {{"request", call.id},
                {"call", wire::MessageName(frame.header.type)},
                {"tenant", tenant_},
                {"error", error->ToString()}});
    }
    if (response.error) {
      Send(MessageType::kError, frame.header.request_id, wire::ErrorToJson(*response.error), {},
           true);
    } else {
      SendReply(frame.header.request_id, std::move(response));
    }
  });
}

}  // namespace prefixd::daemon
