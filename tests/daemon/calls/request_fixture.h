// Provides handlers of requests without a transport, over a store of their own.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "daemon/calls/request_handler.h"
#include "runtime/store/local_store.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::daemon {

using wire::Json;
using wire::MessageType;

class RequestHandlerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    RuntimeOptions options;
    options.dir = dir_.path() / "store";
    options.min_free_bytes = 0;
    options.host_tier_bytes = 16 << 20;
    options.threads = 1;
    auto store = LocalStore::Open(options);
    ASSERT_TRUE(store.ok()) << store.error().message;
    store_ = *std::move(store);
    prompt_ = prefixd::testing::MakePrompt(100, prefixd::testing::Seed("RequestHandler"));
    ASSERT_TRUE(store_->RegisterModel(prompt_.model).ok());
  }

  std::unique_ptr<RequestHandler> Handler(const Peer& peer) {
    return std::make_unique<RequestHandler>(*store_, peer, std::span(region_),
                                            HandlerLimits{1 << 20, 2},
                                            [] { return wire::ServerStats{}; });
  }

  // Returns the prompt with n more tokens.
  static prefixd::testing::Prompt Longer(prefixd::testing::Prompt p, uint32_t n) {
    const auto more = prefixd::testing::MakePrompt(n, p.tokens.size());
    p.tokens.insert(p.tokens.end(), more.tokens.begin(), more.tokens.end());
    for (size_t layer = 0; layer < p.k.size(); ++layer) {
      p.k[layer].insert(p.k[layer].end(), more.k[layer].begin(), more.k[layer].end());
      p.v[layer].insert(p.v[layer].end(), more.v[layer].begin(), more.v[layer].end());
    }
    return p;
  }

  // Puts the prompt for a tenant, straight into the store.
  std::string Put(const std::string& tenant) {
    auto put = store_->BeginPut({prompt_.model.name, tenant, prompt_.tokens, ""});
    EXPECT_TRUE(put.ok() && prefixd::testing::WriteRows(**put, prompt_).ok());
    auto result = (*put)->Commit();
    EXPECT_TRUE(result.ok());
    return result.ok() ? result->prefix : "";
  }

  static Response Ask(RequestHandler& handler, MessageType type, Json control,
                      std::vector<std::byte> payload = {}, bool shared = false) {
    return handler.Handle({type, shared, std::move(control), std::move(payload)},
                          [](uint64_t, uint64_t, std::string_view) { return true; });
  }
  static Code CodeOf(const Response& r) { return r.error ? r.error->code : Code::kInternal; }

  std::vector<std::byte> Tokens() const {
    const auto bytes = wire::BytesOf(std::span<const uint32_t>(prompt_.tokens));
    return {bytes.begin(), bytes.end()};
  }
  Json AttachControl(const std::string& tenant) const {
    return {{"attach",
             {{"model", prompt_.model.name}, {"tenant", tenant}, {"policy", {{"mode", "full"}}}}},
            {"in", {{0, prompt_.tokens.size() * 4}}}};
  }

  prefixd::testing::TempDir dir_;
  std::unique_ptr<LocalStore> store_;
  prefixd::testing::Prompt prompt_;
  std::vector<std::byte> region_ = std::vector<std::byte>(4096);
};

}  // namespace prefixd::daemon
