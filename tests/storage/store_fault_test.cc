// The N-th operation fails, for every N, once and for good. Then a put fails cleanly or a read
// gives an error; nothing wrong is served, nothing acknowledged is lost, and the store works on.
#include "storage/store_core.h"
#include "tests/storage/faulty_engine.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

struct Param {
  Fault fault;
  bool sticky;
  const char* name;
};

class FaultTest : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    options_ = TestOptions(dir_.path());
    options_.host_tier_bytes = 0;  // every read goes to the disk
    Open();
    ASSERT_OK(store_->PutModel(model_));
  }

  void Open() {
    store_.reset();
    auto opened = OpenStoreWithEngine(options_, [this](std::unique_ptr<IoEngine> inner) {
      return std::make_unique<FaultyEngine>(std::move(inner), plan_);
    });
    ASSERT_OK(opened);
    store_ = std::move(*opened);
  }

  // What was acknowledged is there and right, or (while faults last) says that it cannot be read.
  void CheckAcknowledged(bool faults) {
    for (const auto& [id, tokens] : acknowledged_) {
      const auto prefix = store_->OpenPrefix(id, static_cast<uint32_t>(tokens.size()));
      if (!prefix.ok() && faults) continue;
      ASSERT_OK(prefix);
      const auto difference = Compare(**prefix, tokens);
      if (!difference.ok() && faults) continue;
      ASSERT_OK(difference);
      ASSERT_EQ(*difference, "");
    }
  }

  // One put, one blob, one read, under faults.
  void Story(uint32_t n) {
    std::vector<uint32_t> tokens(150);
    for (uint32_t i = 0; i < tokens.size(); ++i) tokens[i] = n * 1000 + i;
    const auto id = Put(*store_, model_, tokens, "t", 40, n % 2 == 0);
    if (id.ok()) {
      acknowledged_[*id] = tokens;
      const std::vector<std::byte> blob(5000, std::byte(n));
      const bool stored = store_->PutBlob(*id, "b", "p", blob).ok();
      const auto back = store_->GetBlob(*id, "b", "p");
      if (back.ok()) {
        EXPECT_EQ(*back, blob);
      } else if (stored) {
        EXPECT_TRUE(back.error().code == Code::kIo || back.error().code == Code::kCorrupt);
      }
    } else {
      EXPECT_TRUE(id.error().code == Code::kIo || id.error().code == Code::kResourceExhausted ||
                  id.error().code == Code::kCorrupt)
          << id.error().ToString();
      if (plan_->fault == Fault::kEnospc && id.error().message.find("writing") == 0) {
        EXPECT_EQ(CodeName(id.error().code), CodeName(Code::kResourceExhausted));
      }
    }
    CheckAcknowledged(true);
  }

  TempDir dir_;
  StoreOptions options_;
  ModelRecord model_ = TestModel();
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  std::unique_ptr<PrefixStore> store_;
  std::map<SegmentId, std::vector<uint32_t>> acknowledged_;
};

TEST_P(FaultTest, EveryOperationInTurn) {
  const Param param = GetParam();
  uint32_t n = 1, faults = 0;
  for (;; ++n) {
    ASSERT_LT(n, 500u) << "the story never ends";
    plan_->Arm(param.fault, n, param.sticky);
    Story(n);
    const bool injected = plan_->injected > 0;
    plan_->Disarm();
    if (HasFatalFailure()) return;
    if (!injected) break;
    ++faults;
    // A read that lied twice has condemned its segment; the bytes are sound, and verifying shows
    // it.
    const auto report = store_->Verify(nullptr, nullptr);
    ASSERT_OK(report);
    ASSERT_EQ(report->damaged, std::vector<std::string>{}) << "fault at operation " << n;
    CheckAcknowledged(false);
    if (HasFatalFailure()) return;
    // Keep the story short, and show that removal works after a fault.
    while (acknowledged_.size() > 2) {
      ASSERT_OK(store_->Remove(acknowledged_.begin()->first));
      acknowledged_.erase(acknowledged_.begin());
    }
  }
  EXPECT_GT(faults, 15u);
  Open();
  EXPECT_EQ(store_->ListPrefixes().size(), acknowledged_.size());
  CheckAcknowledged(false);
  std::vector<uint32_t> tokens{1, 2, 3};
  ASSERT_OK(Put(*store_, model_, tokens));
}

INSTANTIATE_TEST_SUITE_P(Faults, FaultTest,
                         ::testing::Values(Param{Fault::kEio, false, "EioOnce"},
                                           Param{Fault::kEio, true, "EioForGood"},
                                           Param{Fault::kEnospc, false, "EnospcOnce"},
                                           Param{Fault::kEnospc, true, "EnospcForGood"},
                                           Param{Fault::kShort, false, "ShortOnce"},
                                           Param{Fault::kShort, true, "ShortForGood"},
                                           Param{Fault::kFlip, false, "FlipOnce"},
                                           Param{Fault::kFlip, true, "FlipForGood"}),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace prefixd::storage
