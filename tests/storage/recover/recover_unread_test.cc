// Tests recovery of segments that cannot be read, now or for good: they are not damaged.
#include <system_error>

#include "storage/recover/recover_scan.h"
#include "tests/storage/io/faulty_engine.h"
#include "tests/storage/recover/recover_fixture.h"

namespace prefixd::storage {
namespace {

class RecoverUnreadTest : public RecoverTest {
 protected:
  // Scans the store with reads spoilt as `plan` says.
  Result<SegmentScan> Scan(const std::shared_ptr<FaultPlan>& plan, bool verify_data) {
    FaultyEngine engine(NewInlineEngine(), plan);
    std::shared_ptr<const KeyRing> keys;
    if (!options_.encryption_key_file.empty()) {
      PREFIXD_ASSIGN(keys, KeyRing::Read(options_.encryption_key_file));
    }
    return ScanSegments(engine, options_.dir, verify_data, keys.get(), nullptr);
  }
};

TEST_F(RecoverUnreadTest, AReadThatFailsOnceIsDoneAgain) {
  Stored(Iota(300));
  store_.reset();
  for (const bool verify_data : {false, true}) {
    for (const Fault fault : {Fault::kEio, Fault::kShort}) {
      const auto plan = std::make_shared<FaultPlan>();
      for (uint64_t op = 1;; ++op) {
        plan->Arm(fault, op, /*until_disarmed=*/false);
        const auto scan = Scan(plan, verify_data);
        ASSERT_OK(scan);
        ASSERT_EQ(scan->found.size(), 1u) << op;
        EXPECT_EQ(scan->found.front().damage, "");
        EXPECT_TRUE(scan->damaged.empty() && scan->unfinished.empty());
        if (plan->injected == 0) {
          EXPECT_GT(op, 4u);
          break;
        }
      }
    }
  }
}

TEST_F(RecoverUnreadTest, WhatIsNeverReadIsNotDamaged) {
  const SegmentId id = Stored(Iota(300));
  store_.reset();
  for (const bool verify_data : {false, true}) {
    const auto plan = std::make_shared<FaultPlan>();
    for (uint64_t op = 1;; ++op) {
      plan->Arm(Fault::kEio, op, /*until_disarmed=*/true);
      const auto scan = Scan(plan, verify_data);
      if (plan->injected == 0) {
        ASSERT_OK(scan);
        EXPECT_GT(op, 4u);
        break;
      }
      ASSERT_FALSE(scan.ok()) << op;
      EXPECT_CODE(scan, Code::kIo);
      EXPECT_NE(scan.error().message.find(FileOf(id).string()), std::string::npos)
          << scan.error().message;
      EXPECT_NE(scan.error().message.find("recover again"), std::string::npos);
    }
  }
}

// The open fails, as it does without the right to read the file or without a free descriptor.
TEST_F(RecoverUnreadTest, AFileThatCannotBeOpenedEndsTheRecoveryBeforeItsFirstChange) {
  Fill();
  store_.reset();
  const fs::path file = FileOf(b_), away = dir_.path() / "away.seg";
  fs::rename(file, away);
  fs::create_symlink(away, file);
  fs::remove_all(catalog());
  RecoverOptions options;
  options.dir = options_.dir;
  options.encryption_key_file = options_.encryption_key_file;
  options.before_step = [](std::string_view step) {
    ADD_FAILURE() << step;
    return true;
  };
  for (const bool verify_data : {false, true}) {
    options.verify_data = verify_data;
    const auto refused = RecoverCatalog(options, nullptr);
    EXPECT_CODE(refused, Code::kIo);
    EXPECT_NE(refused.error().message.find(file.string()), std::string::npos)
        << refused.error().message;
    EXPECT_FALSE(fs::exists(options_.dir / "damaged"));
    EXPECT_FALSE(fs::exists(options_.dir / "catalog.new"));
  }
  fs::remove(file);
  fs::rename(away, file);
  EXPECT_TRUE(Recovered().set_aside.empty());
  Open();
  ExpectAll();
}

// No more of them are looked at together than their checksum tables allow.
TEST_F(RecoverUnreadTest, LargeFilesAmongSmallOnes) {
  constexpr uint32_t kSmall = 20, kLarge = 5;
  for (uint32_t i = 0; i < kSmall; ++i) Stored(Iota(20, 100 * i));
  store_.reset();
  for (uint32_t i = 0; i < kLarge; ++i) {
    const fs::path path =
        options_.dir / "segments" / (std::string(31, '4') + std::to_string(i) + ".seg");
    std::ofstream(path) << "no header";
    std::error_code error;
    fs::resize_file(path, 20ull << 30, error);
    if (error) GTEST_SKIP() << "no sparse files here: " << error.message();
  }
  const RecoverReport report = Recovered();
  EXPECT_EQ(report.segments, kSmall);
  EXPECT_EQ(report.set_aside.size(), kLarge);
}

}  // namespace
}  // namespace prefixd::storage
