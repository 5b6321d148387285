// Reads the frames of one connection, as far as there is memory for them and room among the
// payloads of its unfinished calls.
//
// Thread-safety: the io thread alone uses it; the socket's owner keeps it alive while it reads.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/memory_budget.h"
#include "daemon/connections/server_context.h"
#include "daemon/connections/stream.h"
#include "prefixd/result.h"
#include "protocol/frame.h"

namespace prefixd::daemon {

struct Frame {
  wire::FrameHeader header;
  std::vector<std::byte> control, payload;
  MemoryCharge memory;           // of both
  std::optional<Error> refused;  // there was no memory for the payload, which was skipped
  std::chrono::steady_clock::time_point received;
};

class FrameReader {
 public:
  FrameReader(ServerContext& context, Stream& stream);
  // The tenant's, once it is known.
  void TakeMemoryFrom(MemoryAccount account) { account_ = std::move(account); }

  // Reads a request. kUnavailable: the client has gone; any other error breaks the protocol.
  boost::asio::awaitable<Result<Frame>> Read(uint64_t max_payload, uint32_t max_control);
  // Whether a frame that has begun did not arrive in limits.frame_timeout_s, and more by its size.
  bool late() const { return std::chrono::steady_clock::now() >= due_; }
  // Payloads count from Hold until Release; Read waits for room among them.
  void Hold(uint64_t payload_bytes) { held_bytes_ += payload_bytes; }
  void Release(uint64_t payload_bytes);
  // Read ends. The owner has closed the socket.
  void Close();

 private:
  boost::asio::awaitable<bool> ReadInto(std::vector<std::byte>* out, uint64_t bytes);
  // Reads and forgets so many bytes.
  boost::asio::awaitable<bool> Skip(uint64_t bytes);
  // False: the client has gone, or the connection is closed.
  boost::asio::awaitable<bool> AwaitRoom(uint64_t payload_bytes);
  bool HasRoomFor(uint64_t payload_bytes) const;
  void GiveTimeFor(uint64_t bytes);
  void GiveAllTime() { due_ = std::chrono::steady_clock::time_point::max(); }

  ServerContext& context_;
  Stream& stream_;
  boost::asio::steady_timer room_timer_;  // wakes the reader when there is room again
  MemoryAccount account_;
  uint64_t held_bytes_ = 0;
  std::chrono::steady_clock::time_point due_ = std::chrono::steady_clock::time_point::max();
  bool closed_ = false;
};

}  // namespace prefixd::daemon
