// Tests recovery from catalogs that are lost, damaged or cut short.
#include <unistd.h>

#include "tests/storage/recover/recover_fixture.h"

namespace prefixd::storage {
namespace {

TEST_F(RecoverTest, WithoutACatalog) {
  Fill();
  store_.reset();
  fs::remove_all(catalog());
  const auto refused = PrefixStore::Open(options_);
  EXPECT_CODE(refused, Code::kCorrupt);
  EXPECT_NE(refused.error().message.find("prefixctl recover --dir"), std::string::npos);
  const RecoverReport report = Recovered(true);
  EXPECT_EQ(report.segments, 5u);
  EXPECT_EQ(report.names, 6u);
  EXPECT_EQ(report.models, 1u);
  EXPECT_TRUE(report.quarantined.empty() && report.set_aside.empty());
  EXPECT_EQ(report.old_catalog, fs::path());
  // Which keys blobs need is in STORE: their files are not looked at.
  EXPECT_EQ(units_, std::vector<std::string>{"pages"});
  Open();
  ExpectAll();
  EXPECT_EQ(store_->stats().recovered_orphans, 0u);
  Stored(Join(Iota(25), Iota(30, 3000)));  // the recovered store takes new puts
  Open();
  ExpectAll();
}

// Matches tell by them which of many segments they need not open.
TEST_F(RecoverTest, FirstTokensAreKnownAgain) {
  Fill();
  store_.reset();
  const auto leads = [this] {
    std::map<SegmentId, Tokens> out;
    const CatalogMeta meta{kStoreFormatVersion, 16, ReadIdentityFile(options_.dir).value().store};
    const auto opened = Catalog::Open(catalog(), meta);
    const auto segments = opened.value()->LoadSegments().value();
    for (const CatalogSegment& s : segments) out[s.record.id] = s.record.lead;
    return out;
  };
  const auto before = leads();
  ASSERT_EQ(std::ranges::count_if(before, [](const auto& l) { return !l.second.empty(); }), 3);
  fs::remove_all(catalog());
  Recovered();
  EXPECT_EQ(leads(), before);
}

// What root makes in the directory of the daemon's user, the daemon could not open.
TEST_F(RecoverTest, NotAsRootForAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives directories away";
  Fill();
  store_.reset();
  const fs::path& dir = options_.dir;
  ASSERT_EQ(::chown(dir.c_str(), 12345, 12345), 0);
  const auto recovered = RecoverCatalog({.dir = dir}, nullptr);
  ASSERT_FALSE(recovered.ok());
  EXPECT_EQ(recovered.error().code, Code::kFailedPrecondition);
  EXPECT_NE(recovered.error().message.find("--reuid 12345"), std::string::npos)
      << recovered.error().message;
  ASSERT_EQ(::chown(dir.c_str(), 0, 0), 0);
  EXPECT_OK(RecoverCatalog({.dir = dir}, nullptr));
}

TEST_F(RecoverTest, WithoutStoreFileOrWithOneWrittenAfterTheLoss) {
  Fill();
  store_.reset();
  const fs::path identity = options_.dir / "STORE";
  fs::remove(identity);
  EXPECT_CODE(PrefixStore::Open(options_), Code::kCorrupt);
  EXPECT_TRUE(Recovered().identity_rebuilt);
  EXPECT_EQ(units_, (std::vector<std::string>{"pages", "files"}));
  Open();
  ExpectAll();
  store_.reset();
  std::ofstream(identity) << "prefixd-store\nformat 2\nuuid " << std::string(32, '7') << "\n";
  EXPECT_CODE(PrefixStore::Open(options_), Code::kCorrupt);
  EXPECT_TRUE(Recovered().identity_rebuilt);
  Open();
  ExpectAll();
  store_.reset();
  std::ofstream(identity) << "garbage";
  EXPECT_CODE(PrefixStore::Open(options_), Code::kCorrupt);
  EXPECT_TRUE(Recovered().identity_rebuilt);
  Open();
  ExpectAll();
  EXPECT_TRUE(fs::exists(options_.dir / "catalog.lost-3"));
}

// Whatever a flipped byte of the catalog does to opening it, no wrong bytes are served, and
// recovering brings everything back.
TEST_F(RecoverTest, FlippedBytesInTheCatalog) {
  std::mt19937_64 rng(Seed("RecoverTest.FlippedBytesInTheCatalog"));
  Fill();
  store_.reset();
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(catalog())) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".log") || name.starts_with("MANIFEST") || name == "CURRENT") {
      files.push_back(name);
    }
  }
  fs::copy(options_.dir, dir_.path() / "whole", fs::copy_options::recursive);
  uint32_t refused = 0;
  for (int i = 0; i < 12; ++i) {
    fs::remove_all(options_.dir);
    fs::copy(dir_.path() / "whole", options_.dir, fs::copy_options::recursive);
    const fs::path path = catalog() / files[rng() % files.size()];
    FlipByte(path, rng() % fs::file_size(path));
    auto opened = PrefixStore::Open(options_);
    if (!opened.ok()) {
      ++refused;
      // Damage to the log costs commits, and opening makes those again.
      EXPECT_NE(path.extension(), ".log") << opened.error().message;
      EXPECT_NE(opened.error().message.find("prefixctl recover"), std::string::npos)
          << opened.error().message;
    } else {
      for (const auto& [id, tokens] : prompts_) {
        const auto prefix = (*opened)->OpenPrefix(id, 0);
        if (!prefix.ok()) continue;
        EXPECT_EQ(Compare(**prefix, tokens).value(), "");
      }
      opened->reset();
    }
    Recovered();
    Open();
    ExpectAll();
    store_.reset();
  }
  std::printf("[ INFO     ] %u of 12 were refused\n", refused);
}

// The log loses its tail: acknowledged puts are committed again, removed prefixes stay away.
TEST_F(RecoverTest, CommitsLostWithTheEndOfTheLog) {
  const SegmentId gone = Stored(Iota(50, 700));
  const fs::path file = FileOf(gone);
  fs::copy_file(file, dir_.path() / "gone.seg");
  ASSERT_OK(store_->Remove(gone));
  prompts_.clear();
  const auto log = [&] {
    fs::path last;
    for (const auto& entry : fs::directory_iterator(catalog())) {
      if (entry.path().extension() == ".log" && entry.path() > last) last = entry.path();
    }
    return last;
  };
  const uint64_t before = fs::file_size(log());
  Fill();
  const fs::path cut = log();
  store_.reset();
  fs::copy_file(dir_.path() / "gone.seg", file);  // a power cut may undo the unlink
  fs::copy(options_.dir, dir_.path() / "whole", fs::copy_options::recursive);
  const uint64_t bytes = fs::file_size(cut);
  std::mt19937_64 rng(Seed("RecoverTest.CommitsLostWithTheEndOfTheLog"));
  uint64_t again = 0;
  for (int i = 0; i < 12; ++i) {
    fs::remove_all(options_.dir);
    fs::copy(dir_.path() / "whole", options_.dir, fs::copy_options::recursive);
    fs::resize_file(cut, before + rng() % (bytes - before));
    Open();
    again += store_->stats().recovered_commits;
    ExpectAll();
    EXPECT_FALSE(fs::exists(file)) << "a removed prefix came back";
    EXPECT_EQ(store_->LongestMatch("m", "t", Iota(50, 700))->n_tokens, 0u);
    Open();  // the result survives an opening
    EXPECT_EQ(store_->stats().recovered_commits, 0u);
    ExpectAll();
    store_.reset();
  }
  EXPECT_GT(again, 5u);
  // Negative control: a whole log needs nothing.
  fs::remove_all(options_.dir);
  fs::copy(dir_.path() / "whole", options_.dir, fs::copy_options::recursive);
  Open();
  EXPECT_EQ(store_->stats().recovered_commits, 0u);
  EXPECT_EQ(store_->stats().recovered_orphans, 1u);
  ExpectAll();
}

TEST_F(RecoverTest, TwinsOfOneSegmentAndCompactedOnes) {
  Fill();
  const fs::path segments = options_.dir / "segments";
  fs::copy(segments, dir_.path() / "before", fs::copy_options::recursive);
  ASSERT_OK(store_->Recluster(b_, Reversed(row_bytes_)));
  const SegmentId f = Stored(Iota(30, 20'000)), g = Stored(Join(Iota(30, 20'000), Iota(20, 1)));
  for (const SegmentId& id : {f, g})
    fs::copy_file(FileOf(id), dir_.path() / "before" / FileOf(id).filename());
  ASSERT_OK(store_->Compact(g, 1000));
  const size_t files = FilesIn(segments);
  store_.reset();
  // This restores the files as if neither rewrite had removed the ones that it replaced.
  fs::copy(dir_.path() / "before", segments,
           fs::copy_options::recursive | fs::copy_options::skip_existing);
  fs::remove_all(catalog());
  const RecoverReport report = Recovered();
  EXPECT_EQ(report.freed, 3u);
  EXPECT_EQ(report.segments, 6u);
  EXPECT_EQ(FilesIn(segments), files);
  Open();
  EXPECT_TRUE(store_->GetPrefix(b_)->reclustered);
  ExpectAll();
}

TEST_F(RecoverTest, DamagedSegmentsAreNeverTrusted) {
  Fill();
  store_.reset();
  fs::remove_all(catalog());
  // `a_`, which `b_` and `c_` continue, loses its footer, the other tenant's its header; a row page
  // of the compacted one goes bad.
  const auto entries = ListDirectory(options_.dir / "segments");
  ASSERT_OK(entries);
  for (const auto& entry : *entries) {
    std::string page(kPageBytes, 0);
    std::ifstream(entry.path(), std::ios::binary).read(page.data(), kPageBytes);
    const auto header = SegmentHeader::Decode(
        ConstPageBytes(reinterpret_cast<const std::byte*>(page.data()), kPageBytes));
    if (!header.ok()) continue;  // a blob
    if (header->segment == a_.bytes) FlipByte(entry.path(), entry.file_size() - 100);
    if (header->parent == Uuid{} && header->segment != a_.bytes &&
        header->segment != compacted_.bytes) {
      FlipByte(entry.path(), 100);
    }
  }
  FlipByte(FileOf(compacted_), kPageBytes + 5);
  std::ofstream(options_.dir / "segments" / "notes.txt") << "a stranger's";
  const RecoverReport report = Recovered(true);
  EXPECT_EQ(report.segments, 3u);
  ASSERT_EQ(report.set_aside.size() + report.quarantined.size(), 5u);
  uint32_t lacking = 0;
  for (const std::string& what : report.quarantined) {
    lacking += what.find("lacks the segment it continues") != std::string::npos;
  }
  EXPECT_EQ(lacking, 2u);
  EXPECT_EQ(FilesIn(options_.dir / "damaged"), report.set_aside.size());
  Open();
  for (const SegmentId& id : {b_, c_, d_, e_}) {
    EXPECT_CODE(store_->OpenPrefix(id, 0), Code::kCorrupt);
    EXPECT_EQ(store_->LongestMatch("m", "t", prompts_.at(id))->n_tokens, 0u);
    const auto info = store_->GetPrefix(id);
    ASSERT_OK(info);
    EXPECT_TRUE(info->quarantined);
    EXPECT_NE(info->quarantine, "");
  }
  // The prompts can be stored anew beside the damaged files.
  for (const SegmentId& id : {b_, d_}) {
    const Tokens tokens = prompts_.at(id);
    const auto anew = Put(*store_, model_, tokens);
    ASSERT_OK(anew);
    EXPECT_EQ(Compare(**store_->OpenPrefix(*anew, 0), tokens).value(), "");
  }
}

TEST_F(RecoverTest, InterruptedAnywhereItCanBeDoneAgain) {
  Fill();
  store_.reset();
  FlipByte(catalog() / "CURRENT", 3);
  fs::remove(options_.dir / "STORE");
  fs::copy(options_.dir, dir_.path() / "whole", fs::copy_options::recursive);
  for (int stop = 0;; ++stop) {
    ASSERT_LT(stop, 20);
    fs::remove_all(options_.dir);
    fs::copy(dir_.path() / "whole", options_.dir, fs::copy_options::recursive);
    RecoverOptions options;
    options.dir = options_.dir;
    options.encryption_key_file = options_.encryption_key_file;
    int steps = 0;
    options.before_step = [&](std::string_view) { return steps++ < stop; };
    const auto first = RecoverCatalog(options, nullptr);
    if (first.ok()) {
      EXPECT_GE(steps, 5);
      break;
    }
    EXPECT_CODE(first, Code::kCancelled);
    // The store either opens and is whole, or refuses and says how to recover.
    if (auto opened = PrefixStore::Open(options_); opened.ok()) {
      store_ = std::move(*opened);
      ExpectAll();
      store_.reset();
    } else {
      EXPECT_NE(opened.error().message.find("prefixctl recover"), std::string::npos);
    }
    Recovered();
    Open();
    ExpectAll();
    store_.reset();
  }
}

TEST_F(RecoverTest, RefusesWhatItMustNotTouch) {
  Fill();
  RecoverOptions options;
  options.dir = options_.dir;
  options.encryption_key_file = options_.encryption_key_file;
  EXPECT_CODE(RecoverCatalog(options, nullptr), Code::kFailedPrecondition);  // in use
  store_.reset();
  EXPECT_CODE(RecoverCatalog(options, [](auto, auto, auto) { return false; }), Code::kCancelled);
  EXPECT_FALSE(fs::exists(options_.dir / "catalog.new"));
  RecoverOptions nowhere;
  nowhere.dir = dir_.path() / "nowhere";
  EXPECT_CODE(RecoverCatalog(nowhere, nullptr), Code::kNotFound);
  EXPECT_FALSE(fs::exists(nowhere.dir));
  std::ofstream(options_.dir / "STORE") << "prefixd-store\nformat 9\nuuid 00\n";
  EXPECT_CODE(RecoverCatalog(options, nullptr), Code::kFailedPrecondition);
}

TEST_F(RecoverTest, WhatANewerPrefixdWroteIsLeftAlone) {
  const SegmentId id = Stored(Iota(64));
  store_.reset();
  std::string bytes(fs::file_size(FileOf(id)), 0);
  std::ifstream(FileOf(id), std::ios::binary).read(bytes.data(), std::streamsize(bytes.size()));
  auto header = SegmentHeader::Decode(
      ConstPageBytes(reinterpret_cast<const std::byte*>(bytes.data()), kPageBytes));
  ASSERT_OK(header);
  header->incompat = 1ull << 40;  // an unknown bit
  header->Encode(PageBytes(reinterpret_cast<std::byte*>(bytes.data()), kPageBytes));
  const fs::path newer = options_.dir / "segments" / (std::string(32, '2') + ".seg");
  std::ofstream(newer, std::ios::binary) << bytes;
  Open();
  EXPECT_TRUE(fs::exists(newer));
  EXPECT_EQ(store_->stats().recovered_orphans, 0u);
  store_.reset();
  RecoverOptions options;
  options.dir = options_.dir;
  options.encryption_key_file = options_.encryption_key_file;
  EXPECT_CODE(RecoverCatalog(options, nullptr), Code::kFailedPrecondition);
  EXPECT_TRUE(fs::exists(newer));
  EXPECT_FALSE(fs::exists(options_.dir / "catalog.lost-1"));

  const fs::path other = dir_.path() / "newer-catalog";
  ASSERT_OK(Catalog::Open(other, {kStoreFormatVersion + 1, 16, Uuid{}}));
  EXPECT_CODE(Catalog::Open(other, {kStoreFormatVersion, 16, Uuid{}}), Code::kFailedPrecondition);
  const std::string record("\x81\xa1v\x09", 4);  // a map with v = 9
  EXPECT_CODE(DecodeSegment(record), Code::kFailedPrecondition);
  EXPECT_CODE(DecodeModel(record), Code::kFailedPrecondition);
  EXPECT_CODE(DecodeAlias(record), Code::kFailedPrecondition);
  EXPECT_CODE(DecodeManifest(record), Code::kFailedPrecondition);
}

TEST_F(RecoverTest, UnfinishedFilesAreToldFromDamagedOnes) {
  const SegmentId id = Stored(Iota(64));
  store_.reset();
  // A put that dies leaves this: header written, the rest allocated.
  const fs::path file = options_.dir / "segments" / (std::string(32, '1') + ".seg");
  fs::copy_file(FileOf(id), file);
  const uint64_t bytes = fs::file_size(file);
  fs::resize_file(file, kPageBytes);
  fs::resize_file(file, bytes);
  EXPECT_EQ(Recovered().unfinished, 1u);
  EXPECT_TRUE(fs::exists(file));
  RecoverOptions options;
  options.dir = options_.dir;
  options.encryption_key_file = options_.encryption_key_file;
  options.prune = true;
  EXPECT_EQ(RecoverCatalog(options, nullptr)->unfinished, 1u);
  EXPECT_FALSE(fs::exists(file));
  EXPECT_FALSE(fs::exists(options_.dir / "damaged"));
}

// More files than are looked at together; what is damaged is told apart by file.
TEST_F(RecoverTest, ManyFilesAmongThemDamagedOnes) {
  constexpr uint32_t kMany = 300;
  std::vector<SegmentId> ids;
  for (uint32_t i = 0; i < kMany; ++i) ids.push_back(Stored(Iota(20, 100 * i)));
  store_.reset();
  const std::vector<uint32_t> damaged = {0, 127, 128, 255, 256, kMany - 1};
  for (const uint32_t i : damaged) FlipByte(FileOf(ids[i]), 8);  // in its header

  const auto expect_the_others = [&](bool known) {
    for (uint32_t i = 0; i < kMany; ++i) {
      const bool sound = std::ranges::find(damaged, i) == damaged.end();
      const auto info = store_->GetPrefix(ids[i]);
      if (known || sound) {
        ASSERT_OK(info);
        EXPECT_EQ(info->quarantined, !sound) << i;
      } else {
        EXPECT_CODE(info, Code::kNotFound);
      }
      EXPECT_EQ(store_->LongestMatch("m", "t", Iota(20, 100 * i))->n_tokens, sound ? 20u : 0u) << i;
    }
  };
  Open();
  ASSERT_OK(store_->CheckEnds([] { return true; }));
  expect_the_others(/*known=*/true);
  store_.reset();
  const RecoverReport report = Recovered();
  EXPECT_EQ(report.segments, kMany - damaged.size());
  EXPECT_EQ(report.names, kMany - damaged.size());
  EXPECT_EQ(report.set_aside.size(), damaged.size());
  Open();
  expect_the_others(/*known=*/false);
}

}  // namespace
}  // namespace prefixd::storage
