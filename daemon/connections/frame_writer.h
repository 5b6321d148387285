// Writes the frames of one connection in the order in which they were handed over, descriptors with
// their first byte, and gives up on a peer that takes none for a while.
//
// Thread-safety: the io thread alone uses it. The owner given to Push is kept alive until the frame
// has been written or dropped.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/memory_budget.h"
#include "daemon/connections/stream.h"
#include "protocol/frame.h"

namespace prefixd::daemon {

// Returns header and packed control part of a frame; fills in header.control_bytes.
std::vector<std::byte> EncodeFrame(wire::FrameHeader header, std::span<const std::byte> packed);

// Sends as many of `bytes` as fit without waiting, and descriptors with the first one, at most
// Descriptors::kMost. Returns sendmsg's result and leaves its errno.
ssize_t SendWithDescriptors(int socket, std::span<const std::byte> bytes, std::span<const int> fds);

class FrameWriter {
 public:
  struct Frame {
    std::vector<std::byte> head;  // header and control part
    std::vector<std::byte> payload;
    bool ends_call = false;
    int fd = -1;                       // goes with the first byte
    std::shared_ptr<const void> held;  // keeps fd open
    MemoryCharge memory;               // the payload's
    MemoryCharge head_memory;
  };
  struct Events {
    // Called when a frame left the queue, sent or dropped.
    std::function<void(const Frame&)> done;
    // Called when the peer is gone or took nothing for `stall`; must close the connection.
    std::function<void(const std::string& why)> failed;
    std::function<void(size_t)> sent;  // bytes
  };

  FrameWriter(Stream& stream, std::chrono::seconds stall, Events events);

  void Push(std::shared_ptr<void> owner, Frame frame);
  // Drops the queued frames; a write under way ends with the socket.
  void Close();

  bool empty() const { return frames_.empty(); }
  size_t size() const { return frames_.size(); }
  uint64_t queued_bytes() const { return queued_bytes_; }

 private:
  void WriteSome(const std::shared_ptr<void>& owner);
  void Wrote(const std::shared_ptr<void>& owner, size_t bytes);
  void WatchForStall(const std::shared_ptr<void>& owner);
  template <typename Work>
  void Handle(const Work& work);
  void Fail(const std::string& why);
  void PopFront();

  Stream& stream_;
  const std::chrono::seconds stall_;
  const Events events_;
  boost::asio::steady_timer timer_;
  std::deque<Frame> frames_;
  size_t written_ = 0;  // bytes of the first frame
  uint64_t queued_bytes_ = 0;
  bool closed_ = false;
};

}  // namespace prefixd::daemon
