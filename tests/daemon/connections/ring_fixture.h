// A daemon in this process whose store only steps, and clients of its rings.
#pragma once

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/daemon/connections/ring_client.h"
#include "tests/daemon/connections/stepping_store.h"
#include "tests/daemon/daemon_in_process.h"
#include "tests/support/ends.h"
#include "tests/support/expect_ok.h"

namespace prefixd::testing {

class RingTest : public ::testing::Test {
 protected:
  void SetUp() override { Start({}); }
  void TearDown() override { control_->Release(); }

  void Start(const daemon::Config& config) {
    daemon_.reset();
    daemon_ = std::make_unique<daemon::DaemonInProcess>(std::make_unique<SteppingStore>(control_),
                                                        config);
    client_ = daemon_->Connect();
    ASSERT_TRUE(client_);
  }

  static std::shared_ptr<Session> Attach(Store& store) {
    auto session = store.Attach({.model = "m", .prefix = "prefix"});
    EXPECT_TRUE(session.ok()) << (session.ok() ? "" : session.error().message);
    return session.ok() ? *session : nullptr;
  }

  // One step's tensors; `right` after a step that succeeded.
  struct Tensors {
    std::vector<float> q = std::vector<float>(SteppingStore::kHeads * SteppingStore::kDim, 1.5f);
    std::vector<float> y = std::vector<float>(q.size());
    std::vector<float> lse = std::vector<float>(SteppingStore::kHeads);
    bool right(uint32_t layer, uint64_t session) const {
      return y == std::vector<float>(q.size(), 1.5f + float(layer)) &&
             lse == std::vector<float>(lse.size(), float(session));
    }
  };
  static Status Step(Session& session, uint32_t layer) {
    Tensors t;
    PREFIXD_TRY(session.Step(layer, t.q, t.y, t.lse, nullptr));
    if (t.right(layer, session.info().id)) return {};
    return Error{Code::kInternal, "wrong answer"};
  }
  // A thread that steps the layer that can be held.
  static std::thread HeldStep(Session& session, Status* status) {
    return std::thread([&session, status] { *status = Step(session, SteppingStore::kHeldLayer); });
  }
  bool EndsWhileHeld(const std::function<void()>& call) {
    return Ends(call, [this] { control_->Release(); });
  }

  const std::shared_ptr<SteppingStore::Control> control_ =
      std::make_shared<SteppingStore::Control>();
  std::unique_ptr<daemon::DaemonInProcess> daemon_;
  std::unique_ptr<RemoteStore> client_;
};

}  // namespace prefixd::testing
