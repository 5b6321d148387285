// Admits a client, or refuses it, by its first message.
#include <utility>  // before Asio 1.74's coroutines, which forget it

#include <spdlog/spdlog.h>

#include <array>
#include <span>

#include "daemon/connections/admission.h"
#include "daemon/connections/connection.h"
#include "protocol/socket.h"

namespace prefixd::daemon {

namespace asio = boost::asio;
using wire::Json;
using wire::MessageType;

namespace {

// What a peer may send before it is admitted: the io thread unpacks it itself.
constexpr uint32_t kMaxHelloBytes = 16u << 10;

}  // namespace

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
  Result<Admission> admission = Admit(context_, *hello, local_, stream_.native_handle(), id_);
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
  credential_ = std::move(admission->credential);
  const Peer& peer = admission->peer;
  tenant_ = peer.tenant;
  handler_ = std::make_unique<RequestHandler>(
      *context_.store, peer, region_.bytes(),
      HandlerLimits{context_.config.max_frame_mib << 20, context_.config.max_puts, account_,
                    &context_.puts, &context_.sessions, &context_.watch, &context_.slow_steps, id_},
      context_.stats);
  spdlog::debug("connection {}: {} for tenant '{}'{}", id_, hello->client, peer.tenant,
                peer.admin ? " (admin)" : "");
  if (!SendHelloReply(frame->header.request_id, admission->reply, ring)) {
    Close();
    co_return false;
  }
  if (!ring.empty()) {
    admission->ring.CloseMemoryFd();
    auto served = context_.steps.Serve(std::move(admission->ring), *handler_, tenant_);
    if (!served.ok()) {
      Fatal(served.error());
      co_return false;
    }
    ring_ = *std::move(served);
    ring_running_ = true;
  }
  co_return true;
}

// To a local client the reply is small and the first thing sent here, so it fits the socket's
// buffer and sending does not wait. The descriptors of the shared memory travel with the first
// byte.
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
  if (!local_) {
    Send(MessageType::kReply, request_id, wire::ToJson(reply), {}, false);
    return !closed_;
  }
  const std::vector<std::byte> bytes = EncodeFrame(header, wire::PackControl(wire::ToJson(reply)));
  const ssize_t sent =
      SendWithDescriptors(stream_.native_handle(), bytes, std::span(fds).first(n_fds));
  region_.CloseFd();
  context_.counters.bytes_out += bytes.size();
  return sent == static_cast<ssize_t>(bytes.size());
}

}  // namespace prefixd::daemon
