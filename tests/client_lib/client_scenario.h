// Provides a client of each kind: embedded, over a Unix socket with and without shared memory, over
// TCP, over TLS. An embedded store beside it holds the same prompt and must give the same results.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client_lib/remote_store.h"
#include "tests/daemon/daemon_process.h"
#include "tests/daemon/put_prompt.h"
#include "tests/support/certificates.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::testing {

enum class Kind { kEmbedded, kUnixShared, kUnixSmallRegion, kUnixInline, kTcp, kTls };

inline constexpr uint32_t kTokens = 400;
inline constexpr uint32_t kQHeads = 4, kDim = 16;

inline RuntimeOptions SmallStore(const std::filesystem::path& dir) {
  RuntimeOptions o;
  o.dir = dir;
  o.min_free_bytes = 0;
  o.host_tier_bytes = 64 << 20;
  o.threads = 2;
  return o;
}

inline void ExpectNear(std::span<const float> a, std::span<const float> b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(std::isfinite(a[i]));
    ASSERT_NEAR(a[i], b[i], 1e-4) << i;
  }
}

class ClientScenario : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    prompt_ = MakePrompt(kTokens, Seed("ClientScenario"));
    RuntimeOptions own = SmallStore(dir_.path() / "own");
    RuntimeOptions beside = SmallStore(dir_.path() / "reference");
    std::vector<std::string> args = {"--listen", "127.0.0.1:0"};
    std::vector<std::string> same_args;
    Limit(own, args);
    Limit(beside, same_args);
    if (GetParam() == Kind::kEmbedded) {
      auto client = Open(own);
      ASSERT_TRUE(client.ok()) << client.error().message;
      client_ = *std::move(client);
    } else {
      if (GetParam() == Kind::kUnixSmallRegion) {  // rows need several messages
        args.insert(args.end(), {"--shared-memory-mib", "1"});
      }
      ConnectOptions options;
      if (GetParam() == Kind::kTls) {
        const Authority authority(dir_.path());
        authority.Issue("daemon");
        args.insert(args.end(), {"--tls-certificate", authority.certificate("daemon"), "--tls-key",
                                 authority.key("daemon")});
        options.tls_ca = authority.ca();
      }
      daemon_ = std::make_unique<DaemonProcess>(dir_.path(), args);
      ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
      options.shared_memory = GetParam() != Kind::kUnixInline;
      auto client =
          RemoteStore::Connect(Remote() ? daemon_->tcp_address() : daemon_->address(), options);
      ASSERT_TRUE(client.ok()) << client.error().message;
      EXPECT_EQ((*client)->shared_memory(),
                GetParam() == Kind::kUnixShared || GetParam() == Kind::kUnixSmallRegion);
      client_ = *std::move(client);
    }
    auto reference = Open(beside);
    ASSERT_TRUE(reference.ok()) << reference.error().message;
    reference_ = *std::move(reference);
    Put(*reference_);
  }

  // Whether the client is not the daemon's own user, as far as it can know.
  static bool Remote() { return GetParam() == Kind::kTcp || GetParam() == Kind::kTls; }

  // Bounds the stores: by options, and by the daemon's arguments that say the same.
  virtual void Limit(RuntimeOptions& /*options*/, std::vector<std::string>& /*args*/) const {}

  void Put(Store& client) {
    auto result = PutPrompt(client, prompt_, "scenario");
    ASSERT_TRUE(result.ok()) << result.error().message;
    EXPECT_EQ(result->n_tokens, kTokens);
    EXPECT_EQ(result->stored_tokens, kTokens);
    Status ready =
        client.WaitReady(result->prefix, [](uint64_t, uint64_t, std::string_view) { return true; });
    ASSERT_TRUE(ready.ok()) << ready.error().message;
    prefix_ = result->prefix;
  }

  // The default is a fixed K, because 2% of 400 tokens would not pay for the anchors.
  std::shared_ptr<Session> Attach(Store& client,
                                  StepPolicy policy = {.estimator = EstimatorKind::kMoment,
                                                       .k = 24},
                                  uint32_t own_memory_tokens = 0) {
    AttachSpec spec;
    spec.own_memory_tokens = own_memory_tokens;
    spec.model = prompt_.model.name;
    spec.tokens = prompt_.tokens;
    spec.policy = policy;
    auto session = client.Attach(spec);
    EXPECT_TRUE(session.ok()) << (session.ok() ? "" : session.error().message);
    return session.ok() ? *session : nullptr;
  }

  std::vector<float> Queries(uint32_t n, uint64_t salt) const {
    std::mt19937_64 rng(salt);
    std::normal_distribution<float> normal;
    std::vector<float> q(size_t{n} * kQHeads * kDim);
    for (float& x : q) x = normal(rng);
    return q;
  }

  DaemonDir dir_;
  Prompt prompt_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Store> client_, reference_;
  std::string prefix_;
};

inline std::string KindName(const ::testing::TestParamInfo<Kind>& param) {
  constexpr const char* kNames[] = {"Embedded",   "UnixShared", "UnixSmallRegion",
                                    "UnixInline", "Tcp",        "Tls"};
  return kNames[size_t(param.param)];
}

inline auto EveryKind() {
  return ::testing::Values(Kind::kEmbedded, Kind::kUnixShared, Kind::kUnixSmallRegion,
                           Kind::kUnixInline, Kind::kTcp, Kind::kTls);
}

}  // namespace prefixd::testing
