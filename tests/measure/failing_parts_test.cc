// Tests that a part of a run that fails is left out with its reason, and the rest is measured.
#include <sys/stat.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "measure/break_even/run.h"
#include "measure/io/run.h"
#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

bool Has(const std::vector<std::string>& lines, const std::string& part) {
  for (const std::string& line : lines) {
    if (line.find(part) != std::string::npos) return true;
  }
  return false;
}

class FailingPartsTest : public ::testing::Test {
 protected:
  LengthSpec Length(const char* name) const {
    LengthSpec spec;
    spec.model = *ModelShapeOf("SmolLM2-135M");
    spec.tokens = 2048;
    spec.steps = 2;
    spec.restores = 1;
    spec.stored_features = false;
    spec.tiers = {{"rows in host memory", true, "cpu"}};
    spec.dir = dir_ / name;
    return spec;
  }
  testing::TempDir dir_;
};

TEST_F(FailingPartsTest, ATierThatFailsIsLeftOut) {
  LengthSpec spec = Length("length");
  spec.tiers.insert(spec.tiers.begin(), {"rows nowhere", true, "abacus"});
  LengthSeconds seconds;
  const auto begun = std::chrono::steady_clock::now();
  const auto length = MeasureLength(spec, &seconds);
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  ASSERT_TRUE(length.ok()) << length.error().message;
  ASSERT_EQ(length->tiers.size(), 1u);
  EXPECT_EQ(length->tiers[0].name, "rows in host memory");
  EXPECT_GT(length->tiers[0].full_ms.median, 0);
  EXPECT_TRUE(Has(length->skipped, "rows nowhere: ")) << length->skipped.size();
  // What is done once is not multiplied by the steps: the parts are what the run took, and each
  // further step adds its own time alone.
  EXPECT_NEAR(seconds.Total(spec.steps), took, 0.05 * took + 0.05);
  EXPECT_GT(seconds.once, 0);
  EXPECT_NEAR(seconds.Total(12) - seconds.Total(2), 10 * seconds.step, 1e-9);
  spec.tiers.pop_back();
  EXPECT_FALSE(MeasureLength(spec, nullptr).ok());
}

TEST_F(FailingPartsTest, ALengthThatFailsIsLeftOut) {
  testing::WriteFile(dir_ / "in the way", "");
  BreakEvenPlan plan;
  plan.model = *ModelShapeOf("SmolLM2-135M");
  plan.prefill_rate = 1000;
  plan.lengths = {Length("in the way"), Length("length")};
  const auto outcome = MeasureBreakEven(plan, nullptr);
  ASSERT_TRUE(outcome.ok()) << outcome.error().message;
  EXPECT_EQ(outcome->lengths.size(), 1u);
  EXPECT_TRUE(Has(outcome->skipped, "2,048 tokens: cannot create"));
  testing::WriteFile(dir_ / "in the way", "");  // the run removed it
  plan.lengths.pop_back();
  EXPECT_FALSE(MeasureBreakEven(plan, nullptr).ok());
}

// A fio that says its version and fails at everything, or at everything from its `good`-th run on.
class FakeFio {
 public:
  FakeFio(const testing::TempDir& dir, int good) : before_(std::getenv("PATH")) {
    const std::string file = dir / "fio", count = dir / "runs";
    testing::WriteFile(count, "");
    testing::WriteFile(file,
                       "#!/bin/sh\n[ \"$1\" = --version ] && { echo fio-9; exit 0; }\n"
                       "echo >> '" +
                           count +
                           "'\n"
                           "[ $(wc -l < '" +
                           count + "') -gt " + std::to_string(good) +
                           " ] && exit 1\nexec /usr/bin/fio \"$@\"\n");
    ::chmod(file.c_str(), 0755);
    ::setenv("PATH", (dir.path().string() + ":" + before_).c_str(), 1);
  }
  ~FakeFio() { ::setenv("PATH", before_.c_str(), 1); }

 private:
  const std::string before_;
};

IoOptions SmallIo() {
  IoOptions options;
  options.model = "SmolLM2-135M";
  options.layers = 1;
  options.pairs = 1;
  options.quick = true;
  return options;
}

TEST_F(FailingPartsTest, AFioThatCannotMeasureIsFoundBeforehand) {
  const testing::TempDir bin;
  const FakeFio fio(bin, 0);
  const auto plan = PlanIo(SmallIo(), dir_.path(), nullptr);
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  EXPECT_TRUE(plan->fio.empty());
  EXPECT_TRUE(Has(plan->skipped, "fio beside put, restore and rows: fio failed"));
}

TEST_F(FailingPartsTest, AFioThatFailsLaterLeavesTheLineWithoutAFloor) {
  if (!std::filesystem::exists("/usr/bin/fio")) GTEST_SKIP() << "there is no fio";
  const testing::TempDir bin;
  const FakeFio fio(bin, 3);  // to try it takes two; the first pair's floor is the third
  const auto plan = PlanIo(SmallIo(), dir_.path(), nullptr);
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  ASSERT_FALSE(plan->fio.empty());
  const auto outcome = MeasureIo(*plan, nullptr);
  ASSERT_TRUE(outcome.ok()) << outcome.error().message;
  EXPECT_EQ(outcome->speed.lines.size(), 8u);
  for (const auto& [part, line] : outcome->speed.lines) {
    EXPECT_GT(line.ours.median, 0) << part;
    EXPECT_EQ(line.floor.median > 0, line.floor_name == "memcpy") << part;
  }
  EXPECT_TRUE(Has(outcome->skipped, "fio write beside durable put: fio failed"));
  EXPECT_TRUE(Has(outcome->skipped, "fio randread beside random rows, cold: fio failed"));
  // Rows of 256 bytes, one in a page each: 16 times what is wanted is read.
  EXPECT_NEAR(outcome->speed.row_amplification, 16, 0.1);
}

}  // namespace
}  // namespace prefixd::bench
