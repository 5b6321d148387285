#include "daemon/connections/frame_writer.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/capture_errors.h"
#include "base/check.h"
#include "protocol/codec.h"
#include "protocol/socket.h"

namespace prefixd::daemon {

namespace asio = boost::asio;

std::vector<std::byte> EncodeFrame(wire::FrameHeader header, std::span<const std::byte> packed) {
  header.control_bytes = static_cast<uint32_t>(packed.size());
  const auto encoded = wire::EncodeHeader(header);
  std::vector<std::byte> head(encoded.size() + packed.size());
  std::copy(packed.begin(), packed.end(), std::copy(encoded.begin(), encoded.end(), head.begin()));
  return head;
}

ssize_t SendWithDescriptors(int socket, std::span<const std::byte> bytes,
                            std::span<const int> fds) {
  PREFIXD_CHECK(fds.size() <= Descriptors::kMost, fds.size());
  iovec iov{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(Descriptors::kMost * sizeof(int))> control{};
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(c), fds.data(), fds.size_bytes());
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

FrameWriter::FrameWriter(Stream& stream, std::chrono::seconds stall, Events events)
    : stream_(stream), stall_(stall), events_(std::move(events)), timer_(stream.get_executor()) {}

void FrameWriter::Push(std::shared_ptr<void> owner, Frame frame) {
  if (closed_) return events_.done(frame);
  const uint64_t bytes = frame.head.size() + frame.payload.size();
  frames_.push_back(std::move(frame));
  queued_bytes_ += bytes;
  if (frames_.size() == 1) WriteSome(owner);
}

void FrameWriter::WriteSome(const std::shared_ptr<void>& owner) {
  Frame& frame = frames_.front();
  WatchForStall(owner);
  if (frame.fd >= 0) {
    const ssize_t sent =
        SendWithDescriptors(stream_.native_handle(), frame.head, std::span(&frame.fd, 1));
    if (sent >= 0) {
      frame.fd = -1;
      frame.held.reset();
      return Wrote(owner, static_cast<size_t>(sent));
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      return Fail(std::strerror(errno));
    }
    return stream_.socket().async_wait(
        Stream::Socket::wait_write, [this, owner](boost::system::error_code ec) {
          if (closed_) return;
          Handle([&] { ec ? Fail(ec.message()) : WriteSome(owner); });
        });
  }
  const size_t of_head = std::min(written_, frame.head.size());
  const size_t of_payload = written_ - of_head;
  const std::array<asio::const_buffer, 2> rest = {
      asio::buffer(frame.head.data() + of_head, frame.head.size() - of_head),
      asio::buffer(frame.payload.data() + of_payload, frame.payload.size() - of_payload)};
  stream_.async_write_some(rest, [this, owner](boost::system::error_code ec, size_t bytes) {
    if (closed_) return;
    Handle([&] { ec ? Fail(ec.message()) : Wrote(owner, bytes); });
  });
}

void FrameWriter::Wrote(const std::shared_ptr<void>& owner, size_t bytes) {
  events_.sent(bytes);
  written_ += bytes;
  const Frame& frame = frames_.front();
  if (written_ == frame.head.size() + frame.payload.size()) PopFront();
  if (closed_) return;  // the callback `done` may have closed the writer
  if (frames_.empty()) {
    timer_.cancel();
  } else {
    WriteSome(owner);
  }
}

void FrameWriter::PopFront() {
  const Frame frame = std::move(frames_.front());
  frames_.pop_front();
  written_ = 0;
  const uint64_t bytes = frame.head.size() + frame.payload.size();
  PREFIXD_CHECK(queued_bytes_ >= bytes, queued_bytes_, bytes);
  queued_bytes_ -= bytes;
  events_.done(frame);
}

// A peer may read as slowly as it likes, but one that takes no byte for `stall_` is given up.
void FrameWriter::WatchForStall(const std::shared_ptr<void>& owner) {
  timer_.expires_after(stall_);
  timer_.async_wait([this, owner](boost::system::error_code ec) {
    const bool stale = timer_.expiry() > asio::steady_timer::clock_type::now();
    if (ec || stale || closed_ || frames_.empty()) return;
    Fail("the client took no byte of an answer for " + std::to_string(stall_.count()) +
         " s (limits.write_timeout_s)");
  });
}

// Without memory to go on the connection is given up: its client must not wait for ever.
template <typename Work>
void FrameWriter::Handle(const Work& work) {
  const Status handled = CaptureErrors([&]() -> Status {
    work();
    return {};
  });
  if (!handled.ok()) Fail(handled.error().message);
}

void FrameWriter::Fail(const std::string& why) {
  if (!closed_) events_.failed(why);
}

void FrameWriter::Close() {
  if (std::exchange(closed_, true)) return;
  timer_.cancel();
  while (!frames_.empty()) PopFront();
}

}  // namespace prefixd::daemon
