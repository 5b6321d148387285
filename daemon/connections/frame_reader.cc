#include <utility>  // before Asio 1.74's coroutines, which forget it

#include "daemon/connections/frame_reader.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <span>
#include <string>

#include "base/check.h"
#include "daemon/calls/message.h"

namespace prefixd::daemon {

namespace asio = boost::asio;

namespace {

constexpr size_t kFirstChunk = 1 << 20;  // memory follows the bytes that really arrive
// A control part takes up to so many times its bytes once it is unpacked.
constexpr uint64_t kControlMemory = 16;
constexpr uint64_t kBytesPerSecond = 1u << 20;  // of a slow sender
constexpr auto kLookForPeer = std::chrono::milliseconds(100);

// Whether the peer has closed its end, also where bytes that it sent before are still unread.
bool PeerGone(int socket) {
  pollfd p{socket, POLLRDHUP, 0};
  return ::poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

// Whether this is the beginning of a handshake.
bool SpeaksTls(std::span<const std::byte, wire::kHeaderBytes> bytes) {
  return bytes[0] == std::byte{0x16} && bytes[1] == std::byte{3};
}

}  // namespace

FrameReader::FrameReader(ServerContext& context, Stream& stream)
    : context_(context),
      stream_(stream),
      room_timer_(context.io, asio::steady_timer::time_point::max()) {}

asio::awaitable<bool> FrameReader::ReadInto(std::vector<std::byte>* out, uint64_t bytes) {
  boost::system::error_code ec;
  size_t filled = 0;
  while (filled < bytes) {
    const size_t target = std::min<uint64_t>(bytes, std::max(kFirstChunk, filled * 2));
    out->resize(target);
    filled +=
        co_await asio::async_read(stream_, asio::buffer(out->data() + filled, target - filled),
                                  asio::redirect_error(asio::use_awaitable, ec));
    if (ec) co_return false;
  }
  context_.counters.bytes_in += bytes;
  co_return true;
}

asio::awaitable<bool> FrameReader::Skip(uint64_t bytes) {
  std::array<std::byte, 16384> nowhere;
  boost::system::error_code ec;
  for (uint64_t left = bytes; left > 0 && !ec;) {
    const size_t n = std::min<uint64_t>(left, nowhere.size());
    left -= co_await asio::async_read(stream_, asio::buffer(nowhere.data(), n),
                                      asio::redirect_error(asio::use_awaitable, ec));
  }
  context_.counters.bytes_in += bytes;
  co_return !ec;
}

void FrameReader::GiveTimeFor(uint64_t bytes) {
  due_ = std::chrono::steady_clock::now() +
         std::chrono::seconds(context_.config.frame_timeout_s + bytes / kBytesPerSecond);
}

asio::awaitable<Result<Frame>> FrameReader::Read(uint64_t max_payload, uint32_t max_control) {
  const Error gone{Code::kUnavailable, "the client closed the connection"};
  std::array<std::byte, wire::kHeaderBytes> bytes{};
  boost::system::error_code ec;
  GiveAllTime();  // between frames
  const size_t begun = co_await asio::async_read(stream_, asio::buffer(bytes.data(), bytes.size()),
                                                 asio::transfer_at_least(1),
                                                 asio::redirect_error(asio::use_awaitable, ec));
  if (ec) co_return gone;
  GiveTimeFor(0);
  co_await asio::async_read(stream_, asio::buffer(bytes.data() + begun, bytes.size() - begun),
                            asio::redirect_error(asio::use_awaitable, ec));
  if (ec) co_return gone;
  context_.counters.bytes_in += bytes.size();
  const uint64_t limit = context_.config.max_frame_mib << 20;
  Result<wire::FrameHeader> header =
      wire::DecodeHeader(bytes, {max_control, std::min(limit, max_payload)});
  if (!header.ok() && SpeaksTls(bytes)) {
    co_return Error{Code::kFailedPrecondition,
                    "the client speaks TLS, and this port does not (tls.certificate is not set): "
                    "its address begins with tcp:"};
  }
  if (!header.ok()) co_return header.error();
  Frame frame;
  frame.header = *header;
  frame.received = std::chrono::steady_clock::now();
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
    GiveTimeFor(rest);
    if (!co_await Skip(rest)) co_return gone;
    co_return frame;
  }
  frame.memory = *std::move(memory);
  const bool control_read = co_await ReadInto(&frame.control, frame.header.control_bytes);
  if (!control_read) co_return gone;
  GiveAllTime();  // it is the daemon that makes it wait
  const bool room = co_await AwaitRoom(frame.header.payload_bytes);
  if (!room) co_return gone;
  GiveTimeFor(frame.header.payload_bytes);
  const bool payload_read = co_await ReadInto(&frame.payload, frame.header.payload_bytes);
  if (!payload_read) co_return gone;
  co_return frame;
}

// The reader does not see the end of the stream while it waits, so it looks for it: the calls of a
// client that is gone are to end.
asio::awaitable<bool> FrameReader::AwaitRoom(uint64_t payload_bytes) {
  boost::system::error_code ec;
  while (!HasRoomFor(payload_bytes)) {
    if (closed_ || PeerGone(stream_.native_handle())) co_return false;
    room_timer_.expires_after(kLookForPeer);
    co_await room_timer_.async_wait(asio::redirect_error(asio::use_awaitable, ec));
  }
  co_return !closed_;
}

// Payloads of unfinished calls count against one limit, answers not yet sent against another.
bool FrameReader::HasRoomFor(uint64_t payload_bytes) const {
  const uint64_t limit = context_.config.max_frame_mib << 20;
  return held_bytes_ == 0 || held_bytes_ + payload_bytes <= limit;
}

void FrameReader::Release(uint64_t payload_bytes) {
  PREFIXD_CHECK(held_bytes_ >= payload_bytes, held_bytes_, payload_bytes);
  held_bytes_ -= payload_bytes;
  room_timer_.cancel();
}

void FrameReader::Close() {
  closed_ = true;
  room_timer_.cancel();
}

}  // namespace prefixd::daemon
