#include "runtime/rates/measured_rates.h"

#include <string>

#include "runtime/rates/prefill_watch.h"
#include "tests/support/test.h"

namespace prefixd::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;

constexpr uint64_t kMiB = 1 << 20;

class Rates : public ::testing::Test {
 protected:
  // Any moment: what is noted has its time from the test.
  const MeasuredRates::Clock::time_point now_ = MeasuredRates::Clock::now();
  MeasuredRates rates_;
};

TEST_F(Rates, NothingIsKnownBeforeItWasMeasured) {
  EXPECT_FALSE(rates_.Host(now_).known());
  EXPECT_FALSE(rates_.Disk(now_).known());
  EXPECT_FALSE(rates_.Open(now_).known());
  EXPECT_FALSE(rates_.Step("t", "m", 1000).known());
  EXPECT_FALSE(rates_.Prefill("t", "m").known());
  EXPECT_FALSE(rates_.changed());
  rates_.NoteRead(0, 0, 1, now_);
  rates_.NoteRead(0, kMiB, 0, now_);
  rates_.NotePrefill("t", "m", 0, 0);
  EXPECT_FALSE(rates_.changed());
}

TEST_F(Rates, ReadsAreToldApartByTheirTier) {
  rates_.NoteRead(0, 100 * kMiB, 1, now_);
  EXPECT_DOUBLE_EQ(rates_.Disk(now_).value, 100 * kMiB);
  EXPECT_FALSE(rates_.Host(now_).known());
  // Half of it from memory, whose rate nobody knows: no slower than the disk.
  rates_.NoteRead(50 * kMiB, 50 * kMiB, 1, now_);
  EXPECT_DOUBLE_EQ(rates_.Disk(now_).value, 100 * kMiB);
  rates_.NoteRead(1000 * kMiB, 0, 1, now_);
  EXPECT_DOUBLE_EQ(rates_.Host(now_).value, 1000 * kMiB);
  // A tenth of a second for what came from memory, 0.9 s for the disk.
  for (int i = 0; i < 100; ++i) rates_.NoteRead(100 * kMiB, 180 * kMiB, 1, now_);
  EXPECT_NEAR(rates_.Disk(now_).value / kMiB, 200, 1e-3);
  // What came from memory for the most part says little of the disk.
  rates_.NoteRead(100 * kMiB, kMiB, 1, now_);
  EXPECT_NEAR(rates_.Disk(now_).value / kMiB, 200, 1e-3);
  EXPECT_DOUBLE_EQ(rates_.Host(now_).value, 1000 * kMiB);
}

TEST_F(Rates, LateReadsCountForMost) {
  rates_.NoteRead(0, 10 * kMiB, 1, now_);
  for (int i = 0; i < 100; ++i) rates_.NoteRead(0, 100 * kMiB, 1, now_);
  EXPECT_NEAR(rates_.Disk(now_).value / kMiB, 100, 1e-3);
}

TEST_F(Rates, OldReadsAreForgotten) {
  rates_.NoteRead(0, kMiB, 1, now_);
  rates_.NoteOpen(0.5, now_);
  EXPECT_TRUE(rates_.Disk(now_ + minutes(9)).known());
  EXPECT_FALSE(rates_.Disk(now_ + minutes(11)).known());
  EXPECT_FALSE(rates_.Open(now_ + minutes(11)).known());
  rates_.NoteRead(0, 5 * kMiB, 1, now_ + minutes(11));
  EXPECT_DOUBLE_EQ(rates_.Disk(now_ + minutes(11)).value, 5 * kMiB);
}

TEST_F(Rates, StepsAndPrefillsAreTheTenantsOwn) {
  rates_.NoteStep("a", "m", 1000, 0.25);
  rates_.NotePrefill("a", "m", 1000, 2);
  EXPECT_EQ(rates_.Step("a", "m", 900).value, 0.25);
  EXPECT_EQ(rates_.Prefill("a", "m").value, 500);
  EXPECT_EQ(rates_.Prefill("a", "m").source, EstimateSource::kLearnt);
  for (const auto& [tenant, model] : {std::pair("b", "m"), std::pair("a", "n")}) {
    EXPECT_FALSE(rates_.Step(tenant, model, 1000).known());
    EXPECT_FALSE(rates_.Prefill(tenant, model).known());
  }
  EXPECT_FALSE(rates_.Step("a", "m", 3000).known());  // of another length
}

TEST_F(Rates, AnEngineThatStoodStillDoesNotSpoilItsRate) {
  rates_.NotePrefill("a", "m", 9000, 9);
  rates_.NotePrefill("a", "m", 1000, 3600);
  EXPECT_GT(rates_.Prefill("a", "m").value, 890);
  EXPECT_LT(rates_.Prefill("a", "m").value, 1000);
}

TEST_F(Rates, WhoIsManyHasABound) {
  for (size_t i = 0; i < MeasuredRates::kMaxEntries + 10; ++i) {
    rates_.NotePrefill("t" + std::to_string(i), "m", 1, 1);
  }
  EXPECT_FALSE(rates_.Prefill("t9", "m").known());
  EXPECT_TRUE(rates_.Prefill("t10", "m").known());
}

TEST_F(Rates, TheNextProcessBeginsWithThemUntilItHasItsOwn) {
  rates_.NoteRead(0, 3 * kMiB, 1, now_);
  rates_.NoteOpen(0.5, now_);
  rates_.NoteStep("a", "m", 1000, 0.25);
  rates_.NotePrefill("a\xff\"", "m", 1000, 2);
  rates_.NotePrefill("a", "m", 1000, 2);
  const std::string saved = rates_.Save();
  EXPECT_FALSE(rates_.changed());
  MeasuredRates next;
  next.Load(saved, now_);
  EXPECT_FALSE(next.changed());
  EXPECT_DOUBLE_EQ(next.Disk(now_).value, 3 * kMiB);
  EXPECT_EQ(next.Disk(now_).source, EstimateSource::kEarlier);
  EXPECT_FALSE(next.Host(now_).known());
  EXPECT_EQ(next.Open(now_).value, 0.5);
  EXPECT_EQ(next.Step("a", "m", 1000).value, 0.25);
  EXPECT_EQ(next.Prefill("a", "m").source, EstimateSource::kEarlier);
  EXPECT_FALSE(next.Disk(now_ + minutes(11)).known());
  next.NoteRead(0, kMiB, 1, now_);
  next.NotePrefill("a", "m", 1000, 1);
  EXPECT_DOUBLE_EQ(next.Disk(now_).value, kMiB);
  EXPECT_EQ(next.Disk(now_).source, EstimateSource::kMeasured);
  EXPECT_EQ(next.Prefill("a", "m").value, 1000);
}

TEST_F(Rates, MalformedTextIsNoKnowledge) {
  for (const char* text :
       {"", "x", "[]", "{}", R"({"version":2,"disk_bytes_per_second":5})",
        R"({"version":1,"disk_bytes_per_second":-5,"host_bytes_per_second":"x","entries":5})",
        R"({"version":1,"entries":[5,{"value":"x"},{"value":0},{"value":2,"length":1e30}]})"}) {
    rates_.Load(text, now_);
    EXPECT_FALSE(rates_.Disk(now_).known()) << text;
    EXPECT_FALSE(rates_.Host(now_).known()) << text;
    EXPECT_FALSE(rates_.Prefill("", "").known()) << text;
  }
}

// The rows of a chunk of 100 tokens come layer by layer, each 10 ms behind the one before.
TEST(PrefillWatch, CountsWhatIsComputedBehindTheFirstLayer) {
  PrefillWatch watch;
  auto at = PrefillWatch::Clock::now();
  for (uint32_t layer = 0; layer < 4; ++layer) {
    for (int half = 0; half < 2; ++half) watch.Note(layer, 50, at, at + milliseconds(1));
    at += milliseconds(10);
  }
  EXPECT_DOUBLE_EQ(watch.tokens(4), 75);
  EXPECT_NEAR(watch.seconds(), 0.031, 1e-9);
  // The next chunk counts with all of its layers.
  for (uint32_t layer = 0; layer < 4; ++layer) {
    watch.Note(layer, 100, at, at);
    at += milliseconds(10);
  }
  EXPECT_DOUBLE_EQ(watch.tokens(4), 175);
  EXPECT_NEAR(watch.seconds(), 0.07, 1e-9);
}

TEST(PrefillWatch, OneLayerSaysNothing) {
  PrefillWatch watch;
  EXPECT_EQ(watch.tokens(1), 0);
  const auto at = PrefillWatch::Clock::now();
  watch.Note(0, 100, at, at + milliseconds(5));
  EXPECT_EQ(watch.tokens(1), 0);
}

}  // namespace
}  // namespace prefixd::testing
