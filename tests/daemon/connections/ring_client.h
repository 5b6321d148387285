// A client of a ring that says anything in it, for tests of the daemon.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "protocol/codec.h"
#include "protocol/frame.h"
#include "protocol/socket.h"
#include "protocol/step_frame.h"
#include "protocol/step_ring.h"
#include "tests/daemon/connections/stepping_store.h"
#include "tests/support/test.h"

namespace prefixd::testing {

class RingClient {
 public:
  // Says hello and attaches one session.
  explicit RingClient(const std::string& path, uint32_t version = wire::kStepFrameVersion) {
    auto connected = Socket::Connect(*Address::Parse("unix:" + path), Deadline());
    if (!connected.ok()) return;
    socket_ = *std::move(connected);
    wire::Hello hello{"ring_client", "", "", false, false, version};
    auto reply = Call(wire::MessageType::kHello, wire::ToJson(hello));
    if (!reply) return;
    const auto said = wire::FromJson<wire::HelloReply>(*reply, "hello");
    EXPECT_TRUE(said.ok());
    if (!said.ok() || said->ring_slots == 0) return;
    const int memory = descriptors_.Take(), bell = descriptors_.Take();
    auto mapped = StepRing::Map(memory, bell, {said->ring_slots, said->ring_slot_bytes});
    EXPECT_TRUE(mapped.ok());
    if (mapped.ok()) ring_ = *std::move(mapped);
    session_ = Attach();
  }

  bool has_ring() const { return !ring_.empty(); }
  const StepRing& ring() const { return ring_; }
  uint64_t session() const { return session_; }
  // Whether the daemon still answers on the connection.
  bool alive() {
    return Call(wire::MessageType::kListModels, {{"list", wire::ToJson(ListSpec{})}}).has_value();
  }
  void Close() { socket_.Close(); }

  uint64_t Attach() {
    const auto reply = Call(wire::MessageType::kAttach,
                            {{"attach", wire::ToJson(AttachSpec{"m", "", {}, "prefix"})}});
    return reply ? reply->value("session", uint64_t{0}) : 0;
  }

  // Returns a request of n equal steps.
  std::vector<std::byte> Request(uint32_t n, uint32_t layer, float q = 1) const {
    constexpr uint32_t kFloats = SteppingStore::kHeads * SteppingStore::kDim;
    const wire::StepEntry entry{session_, layer, false, kFloats, kFloats, SteppingStore::kHeads,
                                64};
    wire::StepLayout layout(n);
    std::vector<uint64_t> at;
    for (uint32_t i = 0; i < n; ++i) at.push_back(layout.Add(entry).q);
    std::vector<std::byte> request(layout.request_bytes());
    const std::span bytes(request);
    const auto size = static_cast<uint32_t>(request.size());
    wire::EncodeStepHeader({n, size, 0, 0}, bytes.first<wire::kStepHeaderBytes>());
    for (uint32_t i = 0; i < n; ++i) {
      wire::EncodeStepEntry(entry, bytes.subspan(wire::kStepHeaderBytes + i * wire::kStepEntryBytes)
                                       .first<wire::kStepEntryBytes>());
      const std::vector<float> values(kFloats, q);
      std::memcpy(&request[at[i]], values.data(), kFloats * sizeof(float));
    }
    return request;
  }
  void Ask(uint32_t slot, std::span<const std::byte> request) const {
    std::ranges::copy(request, ring_.slot(slot).begin());
    ring_.Ask(slot);
  }
  void Await(uint32_t slot) const {
    while (!ring_.answered(slot)) ring_.Sleep(slot, std::chrono::milliseconds(100));
  }
  // What became of a call of n steps; nullopt: the answer makes no sense.
  std::optional<wire::StepOutcome> Outcome(uint32_t slot, uint32_t n) const {
    const auto outcome = wire::DecodeAnswer(ring_.slot(slot).first<wire::kStepHeaderBytes>(), n);
    return outcome.ok() ? std::optional(*outcome) : std::nullopt;
  }
  std::string Message(uint32_t slot, const wire::StepOutcome& outcome) const {
    return wire::DecodeError(outcome, ring_.slot(slot).subspan(wire::kStepHeaderBytes)).ToString();
  }

 private:
  static Socket::Deadline Deadline() { return Socket::Clock::now() + std::chrono::seconds(60); }

  std::optional<wire::Json> Call(wire::MessageType type, const wire::Json& control) {
    const auto packed = wire::PackControl(control);
    wire::FrameHeader header;
    header.type = type;
    header.request_id = ++request_;
    header.control_bytes = static_cast<uint32_t>(packed.size());
    const auto encoded = wire::EncodeHeader(header);
    const std::vector<std::span<const std::byte>> parts = {encoded, packed};
    if (!socket_.Send(parts, Deadline()).ok()) return std::nullopt;
    std::array<std::byte, wire::kHeaderBytes> bytes{};
    if (!socket_.ReceiveWith(bytes, Deadline(), &descriptors_).ok()) return std::nullopt;
    const auto answer = wire::DecodeHeader(bytes, {wire::kMaxReplyControlBytes});
    if (!answer.ok() || answer->type != wire::MessageType::kReply) return std::nullopt;
    std::vector<std::byte> answered(answer->control_bytes);
    if (!socket_.Receive(answered, Deadline()).ok()) return std::nullopt;
    const auto json = wire::UnpackControl(answered);
    return json.ok() ? std::optional(*json) : std::nullopt;
  }

  Socket socket_;
  Descriptors descriptors_;
  StepRing ring_;
  uint64_t session_ = 0, request_ = 0;
};

}  // namespace prefixd::testing
