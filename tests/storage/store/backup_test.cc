// Tests snapshots, backups and restoring: what is copied, what is not copied again, backups of a
// store that changes meanwhile, damage on both sides, and backups that were killed.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "storage/backup/backup.h"
#include "storage/backup/manifest.h"
#include "storage/io/crash_point.h"
#include "tests/storage/open_store.h"
#include "tests/storage/prompts.h"

namespace prefixd::storage {
namespace {

namespace fs = std::filesystem;

class BackupTest : public OpenStoreTest {
 protected:
  BackupTest() { Open(); }

  Result<BackupReport> BackUp(const Progress& progress = nullptr, bool verify = false) {
    PREFIXD_ASSIGN(const auto snapshot, store_->TakeSnapshot());
    return WriteBackup(snapshot->dir(), backup_, progress, nullptr, verify);
  }
  // Opens what the backup restores, and hands it on.
  std::unique_ptr<PrefixStore> Restored() {
    static std::atomic<int> n{0};
    StoreOptions options = options_;
    options.dir = dir_.path() / ("restored" + std::to_string(n++));
    const auto restored = RestoreBackup(backup_, options.dir, nullptr);
    EXPECT_TRUE(restored.ok()) << restored.error().ToString();
    if (!restored.ok()) return nullptr;
    auto store = PrefixStore::Open(options);
    EXPECT_TRUE(store.ok()) << store.error().ToString();
    if (!store.ok()) return nullptr;
    const auto report = (*store)->Verify(nullptr, nullptr);
    EXPECT_TRUE(report.ok() && report->damaged.empty());
    return *std::move(store);
  }
  void ExpectHolds(PrefixStore& store, const Tokens& tokens) {
    const auto match = store.LongestMatch(model_.name, "t", tokens);
    ASSERT_OK(match);
    ASSERT_EQ(match->n_tokens, tokens.size());
    const auto prefix = store.OpenPrefix(match->id, match->n_tokens);
    ASSERT_OK(prefix);
    EXPECT_EQ(*Compare(**prefix, tokens), "");
  }

  const fs::path backup_ = dir_.path() / "backup";
};

TEST_F(BackupTest, HoldsAllOfAStoreAndOnlyCopiesWhatIsNew) {
  const SegmentId first = Stored(Prompt(1));
  ASSERT_OK(store_->PutBlob(first, "note", "maker/1", std::vector<std::byte>(5000)));
  ASSERT_OK(store_->SetLifetime(first, {true, {}}));
  Stored(Join(Prompt(1), Prompt(2)));
  const auto full = BackUp();
  ASSERT_OK(full);
  EXPECT_EQ(full->generation, 1u);
  EXPECT_EQ(full->new_files, full->files);
  EXPECT_EQ(full->new_bytes, full->bytes);
  const SegmentId removed = Stored(Prompt(3));
  ASSERT_OK(BackUp());
  ASSERT_OK(store_->Remove(removed));
  Stored(Prompt(4));
  const auto next = BackUp();
  ASSERT_OK(next);
  EXPECT_EQ(next->generation, 3u);
  EXPECT_GT(next->dropped_files, 0u);
  EXPECT_LT(next->new_bytes, next->bytes);
  EXPECT_FALSE(fs::exists(options_.dir / "snapshot"));
  const auto store = Restored();
  ASSERT_TRUE(store);
  ExpectHolds(*store, Join(Prompt(1), Prompt(2)));
  ExpectHolds(*store, Prompt(4));
  EXPECT_EQ(store->LongestMatch(model_.name, "t", Prompt(3))->n_tokens, 0u);
  EXPECT_TRUE(store->GetPrefix(first)->pinned);
  ASSERT_OK(store->GetBlob(first, "note", "maker/1"));
  EXPECT_EQ(store->stats().recovered_orphans, 0u);
}

TEST_F(BackupTest, OneSnapshotAtATimeAndNoneIsLeftBehind) {
  Stored(Prompt(1));
  auto snapshot = store_->TakeSnapshot();
  ASSERT_OK(snapshot);
  EXPECT_CODE(store_->TakeSnapshot(), Code::kFailedPrecondition);
  // Its files outlive their segments.
  ASSERT_OK(store_->Remove(store_->ListPrefixes()[0].id));
  EXPECT_EQ(FilesIn(options_.dir / "segments"), 0u);
  EXPECT_EQ(FilesIn((*snapshot)->dir() / "segments"), 1u);
  snapshot->reset();
  EXPECT_FALSE(fs::exists(options_.dir / "snapshot"));
  fs::create_directories(options_.dir / "snapshot" / "segments");  // as a killed process leaves it
  Open();
  EXPECT_FALSE(fs::exists(options_.dir / "snapshot"));
}

TEST_F(BackupTest, OfAStoreThatChanges) {
  const Tokens kept = Prompt(1, 400);
  const SegmentId kept_id = Stored(kept);
  ASSERT_OK(store_->SetLifetime(kept_id, {true, {}}));
  options_.quota_bytes = store_->GetPrefix(kept_id)->own_bytes * 6;  // so that puts evict
  Open();
  std::atomic<bool> stop{false};
  std::atomic<uint32_t> puts{0}, failed{0};
  std::thread writer([&] {
    for (uint32_t n = 2; !stop; ++n) {
      const Tokens prompt = Prompt(n);
      failed += !Put(*store_, model_, prompt).ok();
      failed += !Put(*store_, model_, Join(prompt, Prompt(n + 5000, 100))).ok();
      const auto match = store_->LongestMatch(model_.name, "t", prompt);
      if (match.ok() && match->n_tokens > 200) (void)store_->Compact(match->id, 4096);
      ++puts;
    }
  });
  for (int round = 0; round < 4; ++round) {
    const uint32_t before = puts;
    while (puts < before + 3) std::this_thread::yield();
    const auto report = BackUp();
    EXPECT_TRUE(report.ok() && report->damaged.empty());
    const auto store = Restored();
    if (!store) break;
    ExpectHolds(*store, kept);
    for (const PrefixInfo& info : store->ListPrefixes()) EXPECT_FALSE(info.quarantined);
  }
  stop = true;
  writer.join();
  EXPECT_EQ(failed, 0u);
  EXPECT_GT(store_->stats().evictions, 0u);
}

TEST_F(BackupTest, SaysWhichSegmentsAreDamagedAndKeepsOlderCopies) {
  const SegmentId a = Stored(Prompt(1));
  ASSERT_OK(BackUp());
  const SegmentId b = Stored(Prompt(2));
  Stored(Prompt(3));
  FlipByte(FileOf(a), 4096 * 2 + 100);
  FlipByte(FileOf(b), 4096 * 2 + 100);
  // The file is the same but for its bytes, as after damage of the disk.
  const auto report = BackUp();
  ASSERT_OK(report);
  const bool a_is_new = report->damaged.size() == 2;  // the test's write moved its time
  EXPECT_TRUE(a_is_new || report->damaged.size() == 1u);
  EXPECT_NE(report->damaged.back().find(".seg"), std::string::npos);
  StoreOptions options = options_;
  options.dir = dir_.path() / "restored";
  ASSERT_OK(RestoreBackup(backup_, options.dir, nullptr));
  const auto store = PrefixStore::Open(options);
  ASSERT_OK(store);
  ExpectHolds(**store, Prompt(3));
  EXPECT_EQ((*store)->LongestMatch(model_.name, "t", Prompt(2))->n_tokens, 0u);
}

// The damaged file is another one to the backup, as after a move to another disk.
TEST_F(BackupTest, KeepsTheEarlierCopyOfASegmentThatIsDamagedNow) {
  const fs::path file = FileOf(Stored(Prompt(1)));
  ASSERT_OK(BackUp());
  fs::copy_file(file, dir_.path() / "moved");
  FlipByte(dir_.path() / "moved", 4096 * 2 + 100);
  fs::rename(dir_.path() / "moved", file);
  for (int round = 0; round < 2; ++round) {
    const auto report = BackUp();
    ASSERT_OK(report);
    ASSERT_EQ(report->damaged.size(), 1u);
    EXPECT_NE(report->damaged[0].find("keeps its earlier copy"), std::string::npos);
  }
  const auto store = Restored();
  ASSERT_TRUE(store);
  ExpectHolds(*store, Prompt(1));
}

TEST_F(BackupTest, KeepsTheEarlierCopyOfASegmentThatIsGone) {
  const fs::path file = FileOf(Stored(Prompt(1)));
  ASSERT_OK(BackUp());
  fs::remove(file);
  const fs::path unknown = FileOf(Stored(Prompt(2)));
  fs::remove(unknown);
  for (int round = 0; round < 2; ++round) {
    const auto report = BackUp();
    ASSERT_OK(report);
    ASSERT_EQ(report->damaged.size(), 2u);
    const auto kept = std::ranges::count_if(report->damaged, [](const std::string& what) {
      return what.find("keeps its earlier copy") != what.npos;
    });
    EXPECT_EQ(kept, 1);
  }
  StoreOptions options = options_;
  options.dir = dir_.path() / "restored";
  ASSERT_OK(RestoreBackup(backup_, options.dir, nullptr));
  const auto store = PrefixStore::Open(options);
  ASSERT_OK(store);
  ExpectHolds(**store, Prompt(1));
}

TEST_F(BackupTest, VerifiesAndCopiesAgainWhatHasRotted) {
  Stored(Prompt(1));
  ASSERT_OK(BackUp());
  const auto manifest = ReadBackup(backup_);
  ASSERT_OK(manifest);
  const auto segment = std::ranges::find_if(
      manifest->files, [](const BackupFile& f) { return f.name.ends_with(".seg"); });
  ASSERT_NE(segment, manifest->files.end());
  FlipByte(backup_ / "data" / segment->kept_as, segment->bytes / 2);
  ASSERT_OK(BackUp());
  StoreOptions options = options_;
  options.dir = dir_.path() / "without";
  EXPECT_EQ(RestoreBackup(backup_, options.dir, nullptr)->damaged.size(), 1u);
  const auto store = PrefixStore::Open(options);
  ASSERT_OK(store);
  const auto listed = (*store)->ListPrefixes();
  ASSERT_EQ(listed.size(), 1u);
  EXPECT_TRUE(listed[0].quarantined);
  const auto report = BackUp(nullptr, /*verify=*/true);
  ASSERT_OK(report);
  EXPECT_GE(report->new_files, 1u);
  const auto whole = Restored();
  ASSERT_TRUE(whole);
  ExpectHolds(*whole, Prompt(1));
}

TEST_F(BackupTest, ADirectoryThatIsRestoredIntoIsNoNewStore) {
  Stored(Prompt(1));
  ASSERT_OK(BackUp());
  StoreOptions options = options_;
  options.dir = dir_.path() / "restored";
  bool refused = false;
  ASSERT_OK(RestoreBackup(backup_, options.dir, [&](auto...) {
    const auto daemon = PrefixStore::Open(options);
    refused = !daemon.ok() && daemon.error().code == Code::kFailedPrecondition;
    return true;
  }));
  EXPECT_TRUE(refused);
  const auto store = PrefixStore::Open(options);
  ASSERT_OK(store);
  ExpectHolds(**store, Prompt(1));
}

TEST_F(BackupTest, NeverRemovesFilesOfOthers) {
  Stored(Prompt(1));
  // A directory of somebody else's, who keeps files where a backup has its own.
  fs::create_directories(backup_ / "data");
  for (const char* name : {"data/thesis.txt", "manifest-draft"}) std::ofstream(backup_ / name) << 1;
  EXPECT_CODE(BackUp(), Code::kFailedPrecondition);
  EXPECT_TRUE(fs::exists(backup_ / "data/thesis.txt") && fs::exists(backup_ / "manifest-draft"));
  // What an interrupted first backup left is its own.
  fs::remove_all(backup_);
  fs::create_directories(backup_ / "data");
  for (const char* name : {"lock", "data/1-0", "manifest-1.tmp"}) std::ofstream(backup_ / name);
  {
    const auto snapshot = store_->TakeSnapshot();
    ASSERT_OK(snapshot);
    ASSERT_OK(WriteBackup((*snapshot)->dir(), backup_ / "", nullptr));
  }
  for (const char* name : {"data/thesis.txt", "manifest-draft"}) std::ofstream(backup_ / name) << 1;
  ASSERT_OK(BackUp());
  EXPECT_TRUE(fs::exists(backup_ / "data/thesis.txt") && fs::exists(backup_ / "manifest-draft"));
  // A head that cannot be read is not taken for one that is missing.
  fs::rename(backup_ / "BACKUP", backup_ / "aside");
  fs::create_symlink("BACKUP", backup_ / "BACKUP");
  EXPECT_CODE(BackUp(), Code::kIo);
  fs::rename(backup_ / "aside", backup_ / "BACKUP");
  const auto store = Restored();
  ASSERT_TRUE(store);
  ExpectHolds(*store, Prompt(1));
}

TEST_F(BackupTest, RefusesWhatIsNotItsOwn) {
  Stored(Prompt(1));
  ASSERT_OK(BackUp());
  options_.dir = dir_.path() / "other";
  Open();
  EXPECT_CODE(BackUp(), Code::kFailedPrecondition);
  const fs::path to = dir_.path() / "new";
  EXPECT_CODE(RestoreBackup(dir_.path() / "none", to, nullptr), Code::kNotFound);
  fs::create_directories(to / "something");
  EXPECT_CODE(RestoreBackup(backup_, to, nullptr), Code::kFailedPrecondition);
  fs::remove_all(to);
  std::ofstream(backup_ / "BACKUP") << "prefixd-backup\nformat 2\n";
  EXPECT_CODE(RestoreBackup(backup_, to, nullptr), Code::kFailedPrecondition);
}

// The root of a disk that was just formatted as ext4 is empty, but for lost+found, which stays.
TEST_F(BackupTest, RestoresIntoTheRootOfAFreshDisk) {
  Stored(Prompt(1));
  ASSERT_OK(BackUp());
  const fs::path disk = dir_.path() / "disk";
  fs::create_directories(disk / "lost+found");
  const auto stopped = RestoreBackup(backup_, disk, [](auto...) { return false; });
  EXPECT_CODE(stopped, Code::kCancelled);
  EXPECT_TRUE(fs::exists(disk / "lost+found"));
  EXPECT_EQ(std::distance(fs::directory_iterator(disk), {}), 1);  // all else is gone again
  ASSERT_OK(RestoreBackup(backup_, disk, nullptr));
  StoreOptions options = options_;
  options.dir = disk;
  const auto store = PrefixStore::Open(options);
  ASSERT_OK(store);
  ExpectHolds(**store, Prompt(1));
  EXPECT_CODE(RestoreBackup(backup_, disk, nullptr), Code::kFailedPrecondition);
}

TEST_F(BackupTest, RestoringChecksEveryByte) {
  Stored(Prompt(1));
  ASSERT_OK(BackUp());
  const auto manifest = ReadBackup(backup_);
  ASSERT_OK(manifest);
  const fs::path to = dir_.path() / "new";
  for (const BackupFile& file : manifest->files) {
    if (file.bytes == 0) continue;
    const fs::path kept = backup_ / "data" / file.kept_as;
    FlipByte(kept, file.bytes / 2);
    const auto restored = RestoreBackup(backup_, to, nullptr);
    if (file.name.starts_with("segments/")) {  // the store does without it
      ASSERT_OK(restored);
      ASSERT_EQ(restored->damaged.size(), 1u);
      EXPECT_TRUE(restored->damaged[0].starts_with(file.name));
      EXPECT_FALSE(fs::exists(to / file.name));
      fs::remove_all(to);
    } else {
      EXPECT_CODE(restored, Code::kCorrupt);
      EXPECT_TRUE(fs::is_empty(to));
    }
    FlipByte(kept, file.bytes / 2);
  }
  FlipByte(BackupManifestPath(backup_, 1), 20);
  EXPECT_CODE(RestoreBackup(backup_, to, nullptr), Code::kCorrupt);
  FlipByte(BackupManifestPath(backup_, 1), 20);
  ASSERT_OK(RestoreBackup(backup_, to, nullptr));
}

TEST_F(BackupTest, StoppedOnRequestThePreviousOneStays) {
  Stored(Prompt(1));
  ASSERT_OK(BackUp());
  Stored(Prompt(2));
  EXPECT_CODE(BackUp([](uint64_t, uint64_t, std::string_view) { return false; }), Code::kCancelled);
  const auto store = Restored();
  ASSERT_TRUE(store);
  ExpectHolds(*store, Prompt(1));
  EXPECT_EQ(store->LongestMatch(model_.name, "t", Prompt(2))->n_tokens, 0u);
}

// What KilledAtAnyMomentThereIsAWholeBackup runs in a process of its own, a fresh one: what was
// forked from a process with threads may start none under the thread sanitizer.
std::atomic<int> left_until_kill{0};
const char* kill_at = nullptr;

TEST(BackupProcess, DISABLED_IsKilled) {
  kill_at = std::getenv("PREFIXD_TEST_KILL_AT");
  const char* from = std::getenv("PREFIXD_TEST_SNAPSHOT");
  const char* to = std::getenv("PREFIXD_TEST_BACKUP");
  const char* nth = std::getenv("PREFIXD_TEST_KILL_NTH");
  ASSERT_TRUE(kill_at && from && to && nth) << "is started by another test";
  left_until_kill = std::atoi(nth);
  crash_point_hook = [](const char* name) {
    if (std::string_view(name) == kill_at && --left_until_kill == 0) ::kill(::getpid(), 9);
  };
  ASSERT_OK(WriteBackup(from, to, nullptr));
}

// Starts that process and returns what waitpid tells of it.
int RunKilledBackup(const fs::path& from, const fs::path& to, const char* point, int nth) {
  const std::string program = fs::read_symlink("/proc/self/exe");
  // The process runs its one test whatever part of them this one runs.
  for (const char* part : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) ::unsetenv(part);
  ::setenv("PREFIXD_TEST_SNAPSHOT", from.c_str(), 1);
  ::setenv("PREFIXD_TEST_BACKUP", to.c_str(), 1);
  ::setenv("PREFIXD_TEST_KILL_AT", point, 1);
  ::setenv("PREFIXD_TEST_KILL_NTH", std::to_string(nth).c_str(), 1);
  char filter[] = "--gtest_filter=BackupProcess.DISABLED_IsKilled";
  char disabled[] = "--gtest_also_run_disabled_tests";
  char brief[] = "--gtest_brief=1";
  std::string name = program;
  char* const argv[] = {name.data(), filter, disabled, brief, nullptr};
  pid_t child = 0;
  if (::posix_spawn(&child, program.c_str(), nullptr, nullptr, argv, environ) != 0) return -1;
  int status = -1;
  return ::waitpid(child, &status, 0) == child ? status : -1;
}

TEST_F(BackupTest, KilledAtAnyMomentThereIsAWholeBackup) {
  Stored(Prompt(1));
  ASSERT_OK(BackUp());
  for (const char* point : {"backup.file", "backup.copied", "backup.manifest", "file.before_rename",
                            "file.before_directory_sync", "backup.counts"}) {
    for (const int nth : {1, 2}) {
      const uint32_t fresh = 10 + static_cast<uint32_t>(store_->stats().puts);
      Stored(Prompt(fresh));
      const auto snapshot = store_->TakeSnapshot();
      ASSERT_OK(snapshot);
      const int status = RunKilledBackup((*snapshot)->dir(), backup_, point, nth);
      ASSERT_NE(status, -1);
      const bool killed = WIFSIGNALED(status);
      EXPECT_TRUE(killed || WEXITSTATUS(status) == 0) << point;
      EXPECT_TRUE(killed || nth > 1) << point;
      const auto store = Restored();
      ASSERT_TRUE(store) << point;
      ExpectHolds(*store, Prompt(1));
    }
  }
  ASSERT_OK(BackUp());
  const auto manifest = ReadBackup(backup_);
  ASSERT_OK(manifest);
  EXPECT_EQ(FilesIn(backup_ / "data"), manifest->files.size());  // nothing is left of the others
}

TEST(BackupManifest, RefusesNamesThatLeadOut) {
  BackupManifest m;
  m.generation = 1;
  const auto with = [&](const std::string& name, const std::string& kept_as) {
    BackupManifest changed = m;
    changed.files.push_back({name, kept_as, 1, {}, 0, 0});
    return DecodeBackupManifest(EncodeBackupManifest(changed));
  };
  ASSERT_OK(with("segments/a.seg", "1-0"));
  EXPECT_EQ(with("segments/a.seg", "1-0")->files[0].name, "segments/a.seg");
  for (const char* name :
       {"../a", "/etc/passwd", "segments/../../a", "catalog/", "", "..", "x/y"}) {
    EXPECT_CODE(with(name, "1-0"), Code::kCorrupt);
    EXPECT_CODE(with("STORE", name), Code::kCorrupt);
  }
  for (const char* text : {"", "[]", "{}", R"({"store": 5})"}) {
    EXPECT_CODE(DecodeBackupManifest(text), Code::kCorrupt);
  }
}

}  // namespace
}  // namespace prefixd::storage
