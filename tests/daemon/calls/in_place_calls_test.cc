// Tests layers that are answered with where they lie.
#include <sys/mman.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/rows/copy_rows.h"
#include "protocol/row_copies.h"
#include "tests/daemon/calls/request_fixture.h"

namespace prefixd::daemon {
namespace {

// A layer in memory is answered with where it lies, if the client can map that, and only then.
TEST_F(RequestHandlerTest, LayersInMemoryAreAnsweredInPlace) {
  Put("alice");
  const Peer peer{"alice", false, true, true};
  region_.resize(64 << 10);
  auto alice = Handler(peer);
  const Response attached = Ask(*alice, MessageType::kAttach, AttachControl("alice"), Tokens());
  ASSERT_FALSE(attached.error) << attached.error->message;
  const LayerShape shape = prompt_.model.geometry.layer(1);
  const auto n = static_cast<uint32_t>(prompt_.tokens.size());
  const size_t k_bytes = prompt_.k[1].size(), v_bytes = prompt_.v[1].size();
  const Json plain = {{"session", attached.control["session"]},
                      {"layer", 1},
                      {"begin", 0},
                      {"end", n},
                      {"first_head", 0},
                      {"n_heads", shape.n_kv_heads},
                      {"head_major", false},
                      {"out", {{0, k_bytes}, {k_bytes, v_bytes}}}};
  const auto ask = [&](RequestHandler& handler, const Json& control) {
    return Ask(handler, MessageType::kReadLayer, control, {}, /*shared=*/true);
  };
  const auto came = [&] {
    return std::ranges::equal(std::span(region_).first(k_bytes), prompt_.k[1]) &&
           std::ranges::equal(std::span(region_).subspan(k_bytes, v_bytes), prompt_.v[1]);
  };
  Json mapping = plain;
  mapping["regions"] = Json::array();
  // Nothing is in memory yet, or it is not asked for.
  const Response read = ask(*alice, mapping);
  ASSERT_FALSE(read.error) << read.error->message;
  EXPECT_FALSE(read.control.contains("hold"));
  EXPECT_TRUE(came());
  std::ranges::fill(region_, std::byte{0});
  EXPECT_FALSE(ask(*alice, plain).control.contains("hold"));
  EXPECT_TRUE(came());
  EXPECT_EQ(store_->Stats().value().host_tier_pinned, 0u);

  std::ranges::fill(region_, std::byte{0xA5});
  const Response found = ask(*alice, mapping);
  ASSERT_FALSE(found.error) << found.error->message;
  ASSERT_TRUE(found.control.contains("hold"));
  EXPECT_GE(found.fd, 0);
  EXPECT_TRUE(std::ranges::all_of(region_, [](std::byte b) { return b == std::byte{0xA5}; }));
  EXPECT_GT(store_->Stats().value().host_tier_pinned, 0u);
  const uint64_t bytes = found.control["region_bytes"];
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, found.fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const std::span tier(static_cast<const std::byte*>(mapped), bytes);
  std::vector<std::byte> k(k_bytes), v(v_bytes);
  const auto copies = wire::DecodeCopies(found.payload, tier, {.k = k, .v = v});
  ASSERT_TRUE(copies.ok()) << copies.error().message;
  CopyRows(copies->copies, CopyMode::kCached);
  EXPECT_EQ(k, prompt_.k[1]);
  EXPECT_EQ(v, prompt_.v[1]);

  // The next read releases it; one that nobody holds is no reason to fail, and no number is.
  Json next = mapping;
  next["regions"] = Json::array({found.control["region"]});
  next["release"] = Json::array({found.control["hold"], 77});
  const Response again = ask(*alice, next);
  ASSERT_FALSE(again.error) << again.error->message;
  EXPECT_EQ(again.fd, -1);
  EXPECT_NE(again.control["hold"], found.control["hold"]);
  next["release"] = "all";
  EXPECT_EQ(CodeOf(ask(*alice, next)), Code::kInvalidArgument);
  next.erase("release");
  next["regions"] = Json::array({"x"});
  EXPECT_EQ(CodeOf(ask(*alice, next)), Code::kInvalidArgument);
  const Json last = {{"release", {again.control["hold"]}}};
  EXPECT_FALSE(Ask(*alice, MessageType::kReleaseRows, last).error);
  // Over TCP nothing can be mapped.
  Peer far = peer;
  far.local = false;
  auto remote = Handler(far);
  ASSERT_FALSE(Ask(*remote, MessageType::kAttach, AttachControl("alice"), Tokens()).error);
  EXPECT_FALSE(ask(*remote, mapping).control.contains("hold"));
  EXPECT_TRUE(came());
  alice->ReleaseAll();
  ::munmap(mapped, bytes);
}

}  // namespace
}  // namespace prefixd::daemon
