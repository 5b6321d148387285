// Speaks the protocol without the client library, and waits for what a test expects.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "protocol/codec.h"
#include "protocol/frame.h"
#include "protocol/socket.h"

namespace prefixd::testing {

// Waits until `done`, for at most 20 s.
inline bool Eventually(const std::function<bool()>& done) {
  for (int i = 0; i < 400; ++i) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return done();
}

// A connection that sends requests and reads an answer only when Receive is called.
class RawClient {
 public:
  explicit RawClient(const std::string& address)
      : socket_(*Socket::Connect(*Address::Parse(address), Soon())) {}

  // id: the request's id; 0: the next free one.
  Status Send(wire::MessageType type, const wire::Json& control, uint64_t id = 0,
              std::span<const std::byte> payload = {}) {
    return SendBytes(type, wire::PackControl(control), payload, payload.size(), id);
  }
  // What is sent says from here on that its tensors lie in shared memory.
  void UseSharedMemory() { flags_ = wire::kFlagShared; }
  // Announces `payload_bytes`, whatever is sent.
  Status SendBytes(wire::MessageType type, std::span<const std::byte> control,
                   std::span<const std::byte> payload, uint64_t payload_bytes, uint64_t id = 0) {
    wire::FrameHeader header;
    header.type = type;
    header.request_id = id > 0 ? id : next_id_++;
    header.control_bytes = uint32_t(control.size());
    header.payload_bytes = payload_bytes;
    header.flags = flags_;
    const auto head = wire::EncodeHeader(header);
    const std::array<std::span<const std::byte>, 3> parts = {std::span(head), control, payload};
    return socket_.Send(parts, Soon());
  }
  // Returns the control part of the next reply; its payload is read and dropped.
  Result<wire::Json> Receive() {
    std::array<std::byte, wire::kHeaderBytes> bytes{};
    PREFIXD_TRY(socket_.Receive(bytes, Soon()));
    PREFIXD_ASSIGN(
        const wire::FrameHeader header,
        wire::DecodeHeader(bytes, {wire::kMaxReplyControlBytes, wire::kMaxPayloadBytes}));
    std::vector<std::byte> control(header.control_bytes), payload(header.payload_bytes);
    PREFIXD_TRY(socket_.Receive(control, Soon()));
    PREFIXD_TRY(socket_.Receive(payload, Soon()));
    PREFIXD_ASSIGN(wire::Json json, wire::UnpackControl(control));
    if (header.type == wire::MessageType::kProgress) return Receive();
    if (header.type == wire::MessageType::kError) return wire::ErrorFromJson(json);
    return json;
  }
  Result<wire::Json> Call(wire::MessageType type, const wire::Json& control) {
    PREFIXD_TRY(Send(type, control));
    return Receive();
  }

  // Ends the connection, whatever another thread does with it.
  void Interrupt() { socket_.Interrupt(); }

 private:
  static Socket::Deadline Soon() { return Socket::Clock::now() + std::chrono::seconds(20); }
  Socket socket_;
  uint64_t next_id_ = 1;
  uint16_t flags_ = 0;
};

}  // namespace prefixd::testing
