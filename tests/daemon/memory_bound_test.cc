// Tests the daemon's one bound on memory: every kind of it is filled until calls are refused, and
// the process stays within the bound; what was refused is served later.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client_lib/remote_store.h"
#include "tests/daemon/connections/connect.h"
#include "tests/daemon/daemon_process.h"
#include "tests/support/expect_ok.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::DaemonProcess;

constexpr uint64_t kMebi = 1ull << 20;
constexpr uint32_t kTokens = 2500, kPrompts = 4;

uint64_t ResidentBytes(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("VmRSS:")) return std::stoull(line.substr(6)) << 10;
  }
  return 0;
}

class DaemonMemory : public ::testing::Test {
 protected:
  DaemonMemory() {
    KvGeometry& g = model_.geometry;
    g.n_layers = 4, g.n_q_heads = 8, g.n_kv_heads = 4, g.key_dim = g.value_dim = 64;
    g.dtype = DType::kBf16;
    g.layers.assign(g.n_layers, {0.125f, 0, 0});
    model_.name = "test-model";
    model_.identity = {{"weights", "random"}};
    testing::Random random(testing::Seed("DaemonMemory"));
    for (std::vector<std::byte>* rows : {&k_, &v_}) {
      const auto values = random.Normals(size_t{kTokens} * g.n_kv_heads * g.key_dim);
      rows->resize(values.size() * 2);
      FromFloat(DType::kBf16, values, rows->data());
    }
    q_ = random.Normals(size_t{g.n_q_heads} * g.key_dim);
  }

  void Start(const std::string& memory) {
    daemon_ = std::make_unique<DaemonProcess>(
        dir_.path(),
        std::vector<std::string>{"--memory", memory, "--estimators", "moment/full/cov",
                                 "--codes-min-tokens", "1024", "--shared-memory-mib", "4"});
    ASSERT_TRUE(daemon_->ready()) << daemon_->Stderr();
  }

  static std::string TenantOf(uint32_t prompt) { return prompt % 2 ? "team-b" : "team-a"; }
  std::vector<uint32_t> Tokens(uint32_t prompt) const {
    std::vector<uint32_t> tokens(kTokens);
    for (uint32_t i = 0; i < kTokens; ++i) tokens[i] = prompt * 100'000 + i;
    return tokens;
  }
  std::unique_ptr<RemoteStore> Connect(const std::string& tenant, bool shared) {
    ConnectOptions options;
    options.tenant = tenant;
    options.shared_memory = shared;
    return testing::ConnectTo(*daemon_, options);
  }

  Status PutAll(Store& client, uint32_t prompt) {
    PREFIXD_ASSIGN(auto put, client.BeginPut({model_.name, "", Tokens(prompt), ""}));
    for (uint32_t layer = 0; layer < model_.geometry.n_layers; ++layer) {
      PREFIXD_TRY(put->Write(layer, 0, kTokens, k_, v_));
    }
    PREFIXD_ASSIGN(const PutResult result, put->Commit());
    return client.WaitReady(result.prefix, nullptr);
  }

  // Counts what is refused; everything else that fails is a failure of the test.
  bool Took(const Status& status, const char* what) {
    if (status.ok()) return true;
    EXPECT_CODE(status, Code::kResourceExhausted);
    EXPECT_GT(status.error().retry_after_ms, 0u) << what << ": " << status.error().message;
    ++refused_[what];
    return false;
  }
  template <typename T>
  bool Took(const Result<T>& result, const char* what) {
    return Took(result.ok() ? Status() : Status(result.error()), what);
  }

  struct Answer {
    std::vector<float> y, lse;
  };
  Result<Answer> Step(Session& session, uint32_t layer, float turn = 1) {
    const KvGeometry& g = model_.geometry;
    Answer out{std::vector<float>(size_t{g.n_q_heads} * g.value_dim),
               std::vector<float>(g.n_q_heads)};
    std::vector<float> q = q_;
    for (size_t i = 0; i < q.size(); i += 2) q[i] *= turn;
    PREFIXD_TRY(session.Step(layer, q, out.y, out.lse, nullptr));
    return out;
  }

  // A policy that needs summaries of its own: every head keeps a rank of its own, and covariances.
  StepPolicy OwnSummaries(uint32_t shift) const {
    StepPolicy policy;
    policy.estimator = EstimatorKind::kNone;
    policy.k = 64;
    const KvGeometry& g = model_.geometry;
    for (uint32_t head = 0; head < g.n_layers * g.n_kv_heads; ++head) {
      EstimatorVariant variant = EstimatorKind::kMoment;
      variant.rank = 1 + (head + shift) % 60;
      variant.covariance = true;
      policy.fixed.push_back({head / g.n_kv_heads, head % g.n_kv_heads, variant});
    }
    return policy;
  }

  uint64_t Kind(const RuntimeStats& stats, std::string_view kind) const {
    for (const MemoryOfKind& m : stats.memory_kinds) {
      if (m.kind == kind) return m.bytes;
    }
    return 0;
  }

  testing::DaemonDir dir_;
  ModelSpec model_;
  std::vector<std::byte> k_, v_;  // the same in every layer
  std::vector<float> q_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::map<std::string, int> refused_;
};

// Of the quarter for shared memory a tenant that only connects has three quarters.
TEST_F(DaemonMemory, OneTenantsRegionsLeaveOthersTheirs) {
  Start("512MiB");
  std::vector<std::unique_ptr<RemoteStore>> greedy;
  for (int i = 0; i < 24; ++i) {
    greedy.push_back(Connect("greedy", true));
    ASSERT_TRUE(greedy.back());
  }
  EXPECT_TRUE(greedy.front()->shared_memory());
  EXPECT_FALSE(greedy.back()->shared_memory());
  EXPECT_LE(greedy.front()->Server()->shared_memory_bytes, 96u << 20);
  EXPECT_NE(daemon_->Stderr().find("no ring for a client: "), std::string::npos);
  const auto other = Connect("other", true);
  ASSERT_TRUE(other);
  EXPECT_TRUE(other->shared_memory());
}

TEST_F(DaemonMemory, StaysWithinItsBoundWhateverIsAskedOfIt) {
  constexpr uint64_t kMemory = 512 * kMebi;
  Start("512MiB");
  std::map<std::string, std::unique_ptr<RemoteStore>> clients;
  for (const char* tenant : {"team-a", "team-b"}) {
    clients[tenant] = Connect(tenant, true);
    ASSERT_TRUE(clients[tenant]);
    ASSERT_OK(clients[tenant]->RegisterModel(model_));
  }
  for (uint32_t p = 0; p < kPrompts; ++p) ASSERT_OK(PutAll(*clients[TenantOf(p)], p));

  StepPolicy first;
  first.estimator = EstimatorKind::kMoment;
  first.k = 64;
  const auto attach = [&](uint32_t p, const StepPolicy& policy) {
    return clients[TenantOf(p)]->Attach({model_.name, "", Tokens(p), "", 0, policy});
  };
  std::vector<Answer> before;
  {
    const auto session = attach(0, first);
    ASSERT_OK(session);
    for (uint32_t layer = 0; layer < 4; ++layer) {
      const auto answer = Step(**session, layer);
      ASSERT_OK(answer);
      before.push_back(*answer);
    }
    ASSERT_OK((*session)->Detach());
  }

  // Clients that hold shared memory, and clients that take large answers through the socket all the
  // time.
  std::vector<std::unique_ptr<RemoteStore>> idle;
  for (int i = 0; i < 6; ++i) idle.push_back(Connect(TenantOf(i), true));
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> answers{0};
  std::vector<std::thread> readers;
  for (uint32_t i = 0; i < 4; ++i) {
    readers.emplace_back([&, i] {
      const auto client = Connect(TenantOf(i), false);
      if (!client) return;
      std::vector<std::byte> k(k_.size()), v(v_.size());
      while (!stop) {
        const auto session = client->Attach({model_.name, "", Tokens(i % kPrompts), "", 0, first});
        Status read = session.ok() ? Status() : Status(session.error());
        if (session.ok()) {
          LayerSlice slice;
          slice.layer = i % 4;
          slice.tokens = {0, kTokens};
          slice.heads = {0, 4};
          read = (*session)->ReadLayer(slice, k, v);
          (void)(*session)->Detach();
        }
        EXPECT_TRUE(read.ok() || (read.error().code == Code::kResourceExhausted &&
                                  read.error().retry_after_ms > 0))
            << read.error().ToString();
        if (read.ok()) ++answers;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
  }

  // The host tier, keys and indexes.
  std::vector<std::shared_ptr<Session>> sessions;
  for (const char* selector : {"codes", "exact"}) {
    for (uint32_t p = 0; p < kPrompts; ++p) {
      StepPolicy policy = first;
      policy.selector = selector;
      auto session = attach(p, policy);
      if (!Took(session, "attach")) continue;
      sessions.push_back(*session);
      for (uint32_t layer = 0; layer < 4; ++layer) Took(Step(**session, layer), "step");
      policy.mode = StepMode::kFull;
      if (!Took((*session)->SetPolicy(policy), "set_policy")) continue;
      for (uint32_t layer = 0; layer < 4; ++layer) Took(Step(**session, layer), "step");
    }
  }
  // Sets that steps leave to later ones.
  StepPolicy sharing = first;
  sharing.k = 1000;
  sharing.sharing.block = 256;
  sharing.sharing.similarity = 0.999;
  if (auto session = attach(1, sharing); Took(session, "attach")) {
    for (int i = 0; i < 200; ++i) {
      Took(Step(**session, i % 4, i % 20 < 10 ? 1.0f : 1 + float(i)), "step");
    }
    sessions.push_back(*session);
  }
  // Puts whose rows come so scattered that they wait in memory.
  std::vector<std::unique_ptr<PutStream>> puts;
  const size_t token = 4 * 64 * 2;
  for (uint32_t i = 0; i < 10; ++i) {
    auto put = clients[TenantOf(i)]->BeginPut({model_.name, "", Tokens(50 + i), ""});
    if (!Took(put, "begin_put")) continue;
    for (uint32_t t = 0; t < kTokens; t += 16) {
      for (uint32_t layer = 0; layer < 4; ++layer) {
        const auto rows = [&](const std::vector<std::byte>& all) {
          return std::span<const std::byte>(all).subspan(t * token, token);
        };
        Took((*put)->Write(layer, t, 1, rows(k_), rows(v_)), "put_write");
      }
    }
    puts.push_back(*std::move(put));
  }
  // Summaries of every policy's own, and sessions.
  for (uint32_t shift = 0; shift < 60; ++shift) {
    for (uint32_t p = 0; p < kPrompts; ++p) {
      auto session = attach(p, OwnSummaries(shift));
      if (Took(session, "summaries")) sessions.push_back(*std::move(session));
    }
    if (refused_["summaries"] > 10) break;
  }

  const auto admin = [&] {
    ConnectOptions options;
    options.admin = true;
    return testing::ConnectTo(*daemon_, options);
  }();
  ASSERT_TRUE(admin);
  const RuntimeStats full = admin->Stats().value();
  const uint64_t resident = ResidentBytes(daemon_->pid());
  std::string table;
  for (const MemoryOfKind& m : full.memory_kinds) {
    table += m.kind + " " + std::to_string(m.bytes >> 20) + " MiB\n";
  }
  EXPECT_LE(resident, kMemory + kMemory / 10 + 200 * kMebi) << table;
  EXPECT_LE(full.memory_bytes, kMemory + kMemory / 20) << table;
  EXPECT_GE(full.memory_bytes, kMemory - kMemory / 8) << table;
  EXPECT_EQ(full.memory_capacity, kMemory);
  for (const char* kind : {"tables", "sessions", "summaries", "indexes", "keys", "shared_sets",
                           "reads", "puts", "regions", "catalog", "reserve"}) {
    EXPECT_GT(Kind(full, kind), 0u) << kind << "\n" << table;
  }
  EXPECT_GT(full.memory_refused, 0u);
  EXPECT_GT(refused_["summaries"], 0);
  for (const MemoryOfTenant& tenant : full.memory_tenants) {
    EXPECT_LE(tenant.bytes, tenant.capacity + kMebi) << tenant.tenant;
  }

  stop = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_GT(answers, 0u);
  puts.clear();
  sessions.clear();
  idle.clear();
  const auto session = attach(0, first);
  ASSERT_OK(session);
  for (uint32_t layer = 0; layer < 4; ++layer) {
    const auto answer = Step(**session, layer);
    ASSERT_OK(answer);
    EXPECT_EQ(answer->y, before[layer].y) << layer;
    EXPECT_EQ(answer->lse, before[layer].lse) << layer;
  }
  ASSERT_OK(PutAll(*clients["team-a"], 90));
}

}  // namespace
}  // namespace prefixd
