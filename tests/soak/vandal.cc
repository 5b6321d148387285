#include "tests/soak/vandal.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <utility>

#include "protocol/address.h"
#include "protocol/codec.h"
#include "protocol/frame.h"
#include "protocol/socket.h"
#include "tests/protocol/requests.h"

namespace prefixd::soak {
namespace {

using wire::Json;
using wire::MessageType;

constexpr size_t kHalfOpen = 12;  // held at a time
constexpr size_t kSlow = 6;

Socket::Deadline Soon() { return Socket::Clock::now() + std::chrono::milliseconds(300); }

class Vandal {
 public:
  Vandal(const VandalPlan& plan, Tally& tally) : plan_(plan), tally_(tally), rng_(plan.seed) {}

  void Run() {
    while (!tally_.stop) {
      tally_.Add(Op::kVandal);
      switch (Pick(7)) {
        case 0:
          Garbage();
          break;
        case 1:
          HalfFrame();
          break;
        case 2:
          HalfOpen();
          break;
        case 3:
          SlowReader();
          break;
        case 4:
          MadeUp();
          break;
        case 5:
          WrongToken();
          break;
        default:
          ReadALittle();
      }
      ::usleep(20000);
    }
  }

 private:
  size_t Pick(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(rng_); }

  Result<Socket> Open() { return OpenAt(Pick(2) == 0 ? plan_.address : plan_.tcp_address); }
  static Result<Socket> OpenAt(const std::string& at) {
    PREFIXD_ASSIGN(const Address address, Address::Parse(at));
    return Socket::Connect(address, Soon());
  }

  std::vector<std::byte> Random(size_t n) {
    std::vector<std::byte> bytes(n);
    for (std::byte& b : bytes) b = static_cast<std::byte>(rng_());
    return bytes;
  }
  static Status Send(Socket& socket, std::span<const std::byte> bytes) {
    return socket.Send(std::span(&bytes, 1), Soon());
  }
  static std::vector<std::byte> Frame(MessageType type, uint64_t id, const Json& control,
                                      std::span<const std::byte> payload = {}) {
    const auto packed = wire::PackControl(control);
    wire::FrameHeader header;
    header.type = type;
    header.request_id = id;
    header.control_bytes = static_cast<uint32_t>(packed.size());
    header.payload_bytes = payload.size();
    const auto encoded = wire::EncodeHeader(header);
    std::vector<std::byte> bytes(encoded.size() + packed.size() + payload.size());
    auto at = std::ranges::copy(encoded, bytes.begin()).out;
    at = std::ranges::copy(packed, at).out;
    std::ranges::copy(payload, at);
    return bytes;
  }
  Json HelloControl() const {
    return {{"tenant", plan_.tenant}, {"token", plan_.token}, {"shared_memory", false}};
  }

  // Reads a frame; its control part is returned.
  static Result<Json> Receive(Socket& socket) {
    std::array<std::byte, wire::kHeaderBytes> bytes{};
    PREFIXD_TRY(socket.Receive(bytes, Soon()));
    PREFIXD_ASSIGN(
        const wire::FrameHeader header,
        wire::DecodeHeader(bytes, {wire::kMaxReplyControlBytes, wire::kMaxPayloadBytes}));
    std::vector<std::byte> control(header.control_bytes), payload(header.payload_bytes);
    PREFIXD_TRY(socket.Receive(control, Soon()));
    PREFIXD_TRY(socket.Receive(payload, Soon()));
    return wire::UnpackControl(control);
  }
  Result<Socket> Welcomed() {
    PREFIXD_ASSIGN(Socket socket, Open());
    PREFIXD_TRY(Send(socket, Frame(MessageType::kHello, 1, HelloControl())));
    PREFIXD_ASSIGN(const Json welcome, Receive(socket));
    return socket;
  }

  void Garbage() {
    auto socket = Open();
    if (socket.ok()) (void)Send(*socket, Random(1 + Pick(4000)));
  }

  void HalfFrame() {
    auto socket = Pick(2) == 0 ? Open() : Welcomed();
    if (!socket.ok()) return;
    const auto whole = Frame(MessageType::kMatch, 2, {{"model", plan_.model}, {"tenant", ""}},
                             Random(Pick(100000)));
    (void)Send(*socket, std::span(whole).first(Pick(whole.size())));
  }

  // A token of nobody, or one with a letter changed: nobody may be let in over TCP. Over the Unix
  // socket the daemon's own user needs none.
  void WrongToken() {
    auto socket = OpenAt(plan_.tcp_address);
    if (!socket.ok()) return;
    Json hello = HelloControl();
    std::string token = Pick(2) == 0 ? "pfx_" + std::string(43, 'a') : plan_.token;
    token[4 + Pick(token.size() - 4)] ^= 1;
    hello["token"] = token;
    if (!Send(*socket, Frame(MessageType::kHello, 1, hello)).ok()) return;
    const auto answer = Receive(*socket);
    if (!answer.ok() || answer->contains("code")) return;
    ++tally_.wrong;
    tally_.Note("a wrong token was let in");
  }

  // Says nothing, or nothing more, and stays.
  void HalfOpen() {
    auto socket = Pick(2) == 0 ? Open() : Welcomed();
    if (!socket.ok()) return;
    half_open_.push_back(*std::move(socket));
    if (half_open_.size() > kHalfOpen) half_open_.pop_front();
  }

  // Asks for far more than it reads.
  void SlowReader() {
    auto socket = Welcomed();
    if (!socket.ok()) return;
    const auto ids = wire::BytesOf(std::span<const uint32_t>(plan_.tokens));
    Json attach = {{"attach", {{"model", plan_.model}, {"policy", {{"mode", "full"}}}}},
                   {"in", Json::array({Json::array({0, ids.size()})})}};
    if (!Send(*socket, Frame(MessageType::kAttach, 2, attach, ids)).ok()) return;
    const auto attached = Receive(*socket);
    if (!attached.ok() || !attached->contains("session")) return;
    const uint64_t n = plan_.tokens.size();
    const Json rows = {{"session", (*attached)["session"]},
                       {"layer", 0},
                       {"kv_head", 0},
                       {"begin", 0},
                       {"end", n},
                       {"out", Json::array({Json::array({0, n * plan_.row_bytes})})}};
    for (uint64_t id = 3; id < 23; ++id) {
      if (!Send(*socket, Frame(MessageType::kReadRange, id, rows)).ok()) break;
    }
    slow_.push_back(*std::move(socket));
    if (slow_.size() > kSlow) slow_.pop_front();
  }
  void ReadALittle() {
    std::array<std::byte, 1000> bytes{};
    for (Socket& socket : slow_) (void)socket.Receive(bytes, Socket::Clock::now());
  }

  Json Value(int depth = 0) {
    switch (Pick(depth > 2 ? 5 : 7)) {
      case 0:
        return rng_();
      case 1:
        return -static_cast<int64_t>(rng_() >> 33);
      case 2:
        return std::string(Pick(40), 'x');
      case 3:
        return nullptr;
      case 4:
        return Pick(8);
      case 5: {
        Json list = Json::array();
        for (size_t i = Pick(4); i > 0; --i) list.push_back(Value(depth + 1));
        return list;
      }
      default: {
        static constexpr const char* kKeys[] = {"session", "put",    "prefix", "tokens",
                                                "model",   "policy", "in",     "out",
                                                "layer",   "n",      "attach", "steps"};
        Json map = Json::object();
        for (size_t i = Pick(6); i > 0; --i) map[kKeys[Pick(std::size(kKeys))]] = Value(depth + 1);
        return map;
      }
    }
  }

  // Well-formed frames of every type, with contents made up.
  void MadeUp() {
    static const std::vector<MessageType> kAll = testing::AllRequests();
    auto socket = Welcomed();
    if (!socket.ok()) return;
    for (uint64_t id = 2; id < 40; ++id) {
      Json control = Value();
      if (!control.is_object()) control = {{"session", 1}, {"put", control}};
      const MessageType type = kAll[Pick(kAll.size())];
      // Registered models stay for ever, and nothing of the others may be removed.
      if (type == MessageType::kRegisterModel) continue;
      if (!Send(*socket, Frame(type, id, control, Random(Pick(500)))).ok()) return;
      if (Pick(2) == 0 && !Receive(*socket).ok()) return;
    }
  }

  const VandalPlan& plan_;
  Tally& tally_;
  std::mt19937_64 rng_;
  std::deque<Socket> half_open_, slow_;
};

}  // namespace

void RunVandal(const VandalPlan& plan, Tally& tally) { Vandal(plan, tally).Run(); }

}  // namespace prefixd::soak
