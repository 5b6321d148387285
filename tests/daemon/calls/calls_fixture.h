// Provides sessions over a disk that the test holds, embedded and through a daemon, and the calls
// of a session with their undisturbed answers.
#pragma once

#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "storage/store/open_store.h"
#include "storage/store/prefix_store.h"
#include "tests/daemon/connections/raw_client.h"
#include "tests/daemon/daemon_in_process.h"
#include "tests/runtime/runtime_fixture.h"
#include "tests/runtime/wait_checked.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/support/ends.h"

namespace prefixd::testing {

class CallsFixture : public RuntimeTest {
 protected:
  using Answer = Result<std::vector<float>>;
  struct Call {
    std::string name;
    std::function<Answer(Session&)> run;
  };

  CallsFixture() {
    options_.recluster = false;
    options_.host_tier_bytes = 0;  // every call reads the disk
    options_.scrub_bytes_per_second = 0;
    full_.mode = StepMode::kFull;
  }
  // Nothing may be held when the store closes; the engine goes with it.
  void TearDown() override {
    Release();
    engine_ = nullptr;
  }

  // Puts the prompt into a store, and opens it anew over a disk that the test holds.
  void OpenCold(const SyntheticPrompt& prompt, uint64_t max_inflight_bytes = 16u << 20) {
    Open();
    prompt_ = prompt;
    prefix_ = PutReady(prompt_);
    store_.reset();
    auto opened = LocalStore::Open(options_, [&](const storage::StoreOptions& at) {
      storage::StoreOptions own = at;
      own.max_inflight_bytes = max_inflight_bytes;
      return storage::OpenStoreWithEngine(own, [this](std::unique_ptr<storage::IoEngine> inner) {
        auto engine = std::make_unique<storage::FaultyEngine>(std::move(inner), plan_);
        engine_ = engine.get();
        return engine;
      });
    });
    ASSERT_OK(opened);
    store_ = *std::move(opened);
    WaitChecked(*store_);
  }

  // From now on the disk answers no operation (no read, if `reads`).
  void HoldDisk(bool reads = true) {
    plan_->reads_only = reads;
    plan_->Arm(storage::Fault::kHang, 1, true);
  }
  // Lets the disk answer, what it holds and what comes.
  void Release() {
    plan_->Disarm();
    if (engine_ != nullptr) engine_->Release();
  }
  // Whether `call` ends while the disk is held.
  bool EndsWhileHeld(const std::function<void()>& call) {
    return Ends(call, [this] { Release(); });
  }

  AttachSpec Spec(const StepPolicy& policy, uint32_t call_timeout_ms = 0) const {
    AttachSpec spec;
    spec.model = spec_.name;
    spec.prefix = prefix_;
    spec.policy = policy;
    spec.call_timeout_ms = call_timeout_ms;
    return spec;
  }

  // The calls of a session that read rows.
  std::vector<Call> Calls() const {
    const KvGeometry g = spec_.geometry;
    const uint32_t n = prompt_.n_tokens;
    std::vector<Call> calls;
    const auto add = [&](const char* name, auto run) { calls.push_back({name, run}); };
    const auto outputs = [g](uint32_t m, const auto& attend) -> Answer {
      std::vector<float> y(size_t{m} * g.n_q_heads * g.value_dim), lse(size_t{m} * g.n_q_heads);
      PREFIXD_TRY(attend(y, lse));
      y.insert(y.end(), lse.begin(), lse.end());
      return y;
    };
    const auto bytes = [](size_t n_bytes, const auto& read) -> Answer {
      std::vector<float> out((n_bytes + 3) / 4);
      PREFIXD_TRY(read(std::as_writable_bytes(std::span(out)).first(n_bytes)));
      return out;
    };
    const size_t row = g.row(0).bytes(), key = g.row(0).key_bytes(), value = g.row(0).value_bytes();
    add("step", [=, this](Session& s) {
      return outputs(1, [&](auto& y, auto& lse) {
        return s.Step(1, prompt_.Q(1, n - 1, 1), y, lse, nullptr);
      });
    });
    // A call that was ended has appended nothing. On a layer that no other of these calls attends
    // over.
    add("step and append", [=, this](Session& s) -> Answer {
      PREFIXD_TRY(s.Truncate(0));
      Answer answer = outputs(1, [&](auto& y, auto& lse) {
        return s.StepAppend(0, prompt_.Q(0, n - 1, 1), prompt_.K(0, 7, 1), prompt_.V(0, 7, 1), y,
                            lse, nullptr);
      });
      EXPECT_EQ(s.report()->own_tokens, answer.ok() ? 1u : 0u);
      return answer;
    });
    add("exact", [=, this](Session& s) {
      return outputs(8, [&](auto& y, auto& lse) {
        return s.AttendExact(1, 8, prompt_.Q(1, n - 8, 8), y, lse);
      });
    });
    add("rows", [=](Session& s) {
      const std::vector<uint32_t> ids = {3, 50, n / 2, n - 1};
      return bytes(ids.size() * row, [&](auto out) { return s.ReadRows(0, 1, ids, out); });
    });
    add("range", [=](Session& s) {
      return bytes(n * row, [&](auto out) { return s.ReadRange(1, 0, {0, n}, out); });
    });
    add("layer", [=](Session& s) {
      const size_t k = size_t{n} * g.n_kv_heads * key, v = size_t{n} * g.n_kv_heads * value;
      return bytes(k + v, [&](auto out) {
        return s.ReadLayer({.layer = 1, .tokens = {0, n}}, out.first(k), out.subspan(k));
      });
    });
    return calls;
  }

  static void ExpectSame(const Answer& answer, const Answer& want, const std::string& name) {
    ASSERT_TRUE(answer.ok()) << name << ": " << answer.error().ToString();
    ASSERT_OK(want);
    ASSERT_EQ(answer->size(), want->size()) << name;
    EXPECT_EQ(std::memcmp(answer->data(), want->data(), want->size() * sizeof(float)), 0) << name;
  }

  // The memory that is taken for what calls need, and nothing else.
  static uint64_t CallMemory(Store& store) {
    const auto stats = store.Stats();
    EXPECT_TRUE(stats.ok());
    uint64_t bytes = 0;
    for (const MemoryOfKind& kind : stats->memory_kinds) {
      if (kind.kind == "sessions" || kind.kind == "puts" || kind.kind == "summaries") {
        bytes += kind.bytes;
      }
    }
    return bytes;
  }

  std::shared_ptr<storage::FaultPlan> plan_ = std::make_shared<storage::FaultPlan>();
  storage::FaultyEngine* engine_ = nullptr;  // owned by the store
  SyntheticPrompt prompt_;
  std::string prefix_;
  StepPolicy full_;
};

enum class Way { kEmbedded, kUnix, kTcp };

// The same store in this process, or behind a daemon.
class CallsTest : public CallsFixture, public ::testing::WithParamInterface<Way> {
 protected:
  void OpenWay(const SyntheticPrompt& prompt, uint64_t max_inflight_bytes = 16u << 20) {
    OpenCold(prompt, max_inflight_bytes);
    if (GetParam() == Way::kEmbedded) return;
    daemon_ = std::make_unique<daemon::DaemonInProcess>(std::move(store_));
    client_ = Another();
    ASSERT_TRUE(client_);
  }
  std::unique_ptr<Store> Another() const {
    auto store = Connect(GetParam() == Way::kUnix ? daemon_->address() : daemon_->tcp_address());
    EXPECT_TRUE(store.ok());
    return store.ok() ? *std::move(store) : nullptr;
  }
  Store& store() { return client_ ? *client_ : *store_; }

  // Attaches with a bound on calls, larger where the machine is too slow for it.
  std::shared_ptr<Session> AttachBounded(const StepPolicy& policy, uint32_t call_timeout_ms) {
    for (;; call_timeout_ms *= 2) {
      auto session = store().Attach(Spec(policy, call_timeout_ms));
      if (session.ok()) return *session;
      EXPECT_CODE(session, Code::kDeadlineExceeded);
    }
  }
  static Answer Patiently(const Call& call, Session& session) {
    auto answer = call.run(session);
    while (!answer.ok() && answer.error().code == Code::kDeadlineExceeded) {
      answer = call.run(session);
    }
    return answer;
  }

  std::unique_ptr<daemon::DaemonInProcess> daemon_;
  std::unique_ptr<Store> client_;
};

}  // namespace prefixd::testing
