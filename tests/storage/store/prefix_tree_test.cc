// Tests what the tree finds without a look at all of its segments (what is unneeded, expired, or
// verified the longest ago) against a look at all of them, over random changes, some refused.
#include "storage/catalog/prefix_tree.h"

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>

#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::storage {
namespace {

constexpr int64_t kNow = 1000;

class PrefixTreeTest : public ::testing::Test {
 protected:
  struct Known {
    SegmentRecord record;
    int64_t verified = 0;
  };

  uint32_t Draw(uint32_t n) { return static_cast<uint32_t>(rng_() % n); }
  // Never, long ago, in a while: few, so that many are equal.
  int64_t DrawExpiry() { return std::array<int64_t, 4>{0, kNow - 500, kNow, kNow + 500}[Draw(4)]; }
  SegmentId NewId() {
    SegmentId id;
    for (uint8_t& byte : id.bytes) byte = static_cast<uint8_t>(rng_());
    return id;
  }
  SegmentId AnySegment() { return std::next(segments_.begin(), Draw(segments_.size()))->first; }
  PrefixTree::Commit AnyCommit(bool* refused) {
    *refused = Draw(4) == 0;
    return [refused]() -> Status {
      if (*refused) return Error{Code::kIo, "refused"};
      return {};
    };
  }
  uint32_t Children(const SegmentId& id) const {
    return static_cast<uint32_t>(std::ranges::count_if(
        segments_, [&](const auto& s) { return s.second.record.parent == id; }));
  }
  bool HasAlias(const SegmentId& id) const {
    return std::ranges::any_of(aliases_, [&](const auto& a) { return a.second.segment == id; });
  }

  void Insert() {
    SegmentRecord record;
    record.id = NewId();
    record.model = "m", record.tenant = "t";
    record.tokens = {0, 16};
    if (!segments_.empty() && Draw(2) == 0) {
      record.parent = AnySegment();
      const uint32_t begin = segments_.at(record.parent).record.tokens.end;
      record.tokens = {begin, begin + 16};
    }
    record.listed = Draw(3) > 0;
    record.expires_unix_ms = record.listed ? DrawExpiry() : 0;
    const int64_t verified = Draw(20);
    tree_.Insert({{record, "", 0, 1, verified}});
    segments_[record.id] = {record, verified};
  }
  void Update() {
    SegmentRecord& known = segments_.at(AnySegment()).record;
    SegmentRecord next = known;
    next.listed = Draw(2) == 0;
    next.expires_unix_ms = Draw(3) == 0 ? known.expires_unix_ms : DrawExpiry();
    bool refused = false;
    const Status done = tree_.Update(next, known.file, AnyCommit(&refused));
    EXPECT_EQ(done.ok(), !refused);
    if (!refused) known = next;
  }
  void Erase() {
    const SegmentId id = AnySegment();
    bool refused = false;
    const auto erased = tree_.Erase(id, AnyCommit(&refused));
    EXPECT_EQ(erased.ok(), Children(id) == 0 && !refused);
    if (!erased.ok()) return;
    std::erase_if(aliases_, [&](const auto& alias) { return alias.second.segment == id; });
    segments_.erase(id);
  }
  void Compact() {
    const SegmentId leaf = AnySegment();
    const SegmentId parent = segments_.at(leaf).record.parent;
    if (!segments_.contains(parent)) return;
    SegmentRecord joined = segments_.at(leaf).record;
    const SegmentRecord before = segments_.at(parent).record;
    joined.id = NewId();
    joined.parent = before.parent;
    joined.tokens.begin = before.tokens.begin;
    joined.listed = Draw(2) == 0;
    joined.expires_unix_ms = DrawExpiry();
    const AliasRecord alias{parent, joined.id, before.tokens.end, "", 0, false, DrawExpiry()};
    bool refused = false;
    const bool may = Children(leaf) == 0 && Children(parent) == 1;
    const Status done = tree_.Compact(leaf, joined, {&alias, 1}, AnyCommit(&refused));
    EXPECT_EQ(done.ok(), may && !refused);
    if (!done.ok()) return;
    const int64_t verified = std::min(segments_.at(leaf).verified, segments_.at(parent).verified);
    std::erase_if(aliases_, [&](const auto& a) {
      return a.second.segment == leaf || a.second.segment == parent;
    });
    segments_.erase(leaf);
    segments_.erase(parent);
    segments_[joined.id] = {joined, verified};
    aliases_[alias.id] = alias;
  }
  void ChangeAlias() {
    if (aliases_.empty()) return;
    AliasRecord& known = std::next(aliases_.begin(), Draw(aliases_.size()))->second;
    bool refused = false;
    if (Draw(2) == 0) {
      AliasRecord next = known;
      next.expires_unix_ms = DrawExpiry();
      const Status done = tree_.UpdateAlias(next, AnyCommit(&refused));
      EXPECT_EQ(done.ok(), !refused);
      if (!refused) known = next;
    } else {
      const auto erased = tree_.EraseAlias(known.id, AnyCommit(&refused));
      EXPECT_EQ(erased.ok(), !refused);
      if (!refused) aliases_.erase(SegmentId(known.id));
    }
  }
  void Verify() {
    Known& known = segments_.at(AnySegment());
    known.verified = Draw(100);
    EXPECT_TRUE(tree_.SetVerified(known.record.id, known.verified));
  }

  void Compare() {
    std::set<SegmentId> unneeded, expired;
    std::optional<int64_t> oldest;
    for (const auto& [id, known] : segments_) {
      const SegmentRecord& r = known.record;
      if (!r.listed && Children(id) == 0 && !HasAlias(id)) unneeded.insert(id);
      if (r.listed && Expired(r.expires_unix_ms, kNow)) expired.insert(id);
      oldest = std::min(oldest.value_or(known.verified), known.verified);
    }
    for (const auto& [id, alias] : aliases_) {
      if (Expired(alias.expires_unix_ms, kNow)) expired.insert(id);
    }
    const auto found = tree_.Unneeded(), names = tree_.ExpiredNames(kNow);
    EXPECT_EQ(std::set(found.begin(), found.end()), unneeded);
    EXPECT_EQ(found.size(), unneeded.size());
    EXPECT_EQ(std::set(names.begin(), names.end()), expired);
    EXPECT_EQ(names.size(), expired.size());
    const auto due = tree_.LeastRecentlyVerified();
    ASSERT_EQ(due.has_value(), oldest.has_value());
    if (!due) return;
    EXPECT_EQ(due->second, *oldest);
    EXPECT_EQ(segments_.at(due->first.id).verified, *oldest);
    EXPECT_EQ(segments_.at(due->first.id).record, due->first);
  }

  std::mt19937_64 rng_{testing::Seed("PrefixTreeTest")};
  PrefixTree tree_;
  std::map<SegmentId, Known> segments_;
  std::map<SegmentId, AliasRecord> aliases_;
};

TEST_F(PrefixTreeTest, FindsWithoutALookAtAll) {
  for (int i = 0; i < 4000; ++i) {
    const uint32_t kind = Draw(12);
    if (segments_.size() < 3 || (kind < 4 && segments_.size() < 60)) {
      Insert();
    } else if (kind < 6) {
      Update();
    } else if (kind < 8) {
      Erase();
    } else if (kind < 9) {
      Compact();
    } else if (kind < 10) {
      ChangeAlias();
    } else {
      Verify();
    }
    Compare();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace prefixd::storage
