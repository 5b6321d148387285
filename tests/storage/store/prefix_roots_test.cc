// Tests that the tree finds the roots that a prompt may begin with in the right order, without a
// look at all of those that share its first tokens, against a look at all of them.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "storage/catalog/prefix_tree.h"
#include "tests/support/expect_ok.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::storage {
namespace {

class PrefixRootsTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kBlock = 40;  // of what is longer, so much is known

  uint32_t Draw(uint32_t n) { return static_cast<uint32_t>(rng_() % n); }
  // Many have a beginning in common, of a length that differs.
  std::vector<uint32_t> DrawTokens() {
    return DrawTokens(Draw(3) == 0 ? kBlock : 1 + Draw(kBlock));
  }
  std::vector<uint32_t> DrawTokens(uint32_t n) {
    std::vector<uint32_t> tokens(n);
    const uint32_t header = Draw(30);
    for (uint32_t t = 0; t < tokens.size(); ++t) tokens[t] = t < header ? t : Draw(3);
    return tokens;
  }
  SegmentId NewId() {
    SegmentId id;
    for (uint8_t& byte : id.bytes) byte = static_cast<uint8_t>(rng_());
    return id;
  }
  void InsertRoot(std::vector<uint32_t> tokens, bool knows_lead = true) {
    SegmentRecord record;
    record.id = NewId();
    record.first_token = tokens.front();
    const auto n = static_cast<uint32_t>(tokens.size());
    record.tokens = {0, n < kBlock ? n : kBlock + Draw(2) * 100};
    if (knows_lead) record.lead = std::move(tokens);
    tree_.Insert({{record, "", 0, 1, 0}, scope_});
    roots_[record.id] = record;
  }
  void InsertChild() {
    const SegmentRecord& parent = std::next(roots_.begin(), Draw(roots_.size()))->second;
    SegmentRecord record;
    record.id = NewId();
    record.parent = parent.id;
    const uint32_t begin = 1 + Draw(parent.tokens.end);
    record.tokens = {begin, begin + 10};
    record.first_token = Draw(3);
    tree_.Insert({{record, "", 0, 1, 0}, scope_});
    children_[record.id] = record;
  }
  uint32_t Bound(const SegmentRecord& root, const std::vector<uint32_t>& tokens) const {
    uint32_t common = 0;
    while (common < std::min(root.lead.size(), tokens.size()) &&
           root.lead[common] == tokens[common]) {
      ++common;
    }
    const bool branches = std::ranges::any_of(children_, [&](const auto& child) {
      return child.second.parent == root.id && child.second.tokens.begin <= common;
    });
    const bool goes_on = common == root.lead.size() && root.lead.size() < root.tokens.size();
    return branches || goes_on ? static_cast<uint32_t>(tokens.size()) : common;
  }

  void Compare(const std::vector<uint32_t>& tokens) {
    std::map<SegmentId, uint32_t> want, got;
    for (const auto& [id, root] : roots_) {
      if (root.first_token == tokens.front()) want[id] = Bound(root, tokens);
    }
    size_t limit = 1 + Draw(5);
    for (size_t skip = 0;; skip += limit, limit *= 1 + Draw(3)) {
      const auto page = tree_.Roots(scope_, tokens, skip, limit);
      if (page.empty()) break;
      for (const auto& [id, at_most] : page) got[id] = at_most;
      // Whoever has not come by now matches no more than the last one.
      const uint32_t bound = page.back().at_most;
      for (const auto& [id, at_most] : want) {
        EXPECT_TRUE(got.contains(id) || at_most <= bound) << at_most << " " << bound;
      }
    }
    EXPECT_EQ(got, want);
  }

  std::mt19937_64 rng_{testing::Seed("PrefixRoots")};
  PrefixTree tree_;
  const BlockHash scope_{1};
  std::map<SegmentId, SegmentRecord> roots_, children_;
};

TEST_F(PrefixRootsTest, ThoseThatBeginLikeThePromptComeFirst) {
  for (int i = 0; i < 400; ++i) {
    switch (roots_.empty() ? 0 : Draw(8)) {
      case 0:
      case 1:
      case 2:
        InsertRoot(DrawTokens(), Draw(20) > 0);
        break;
      case 3:
        if (Draw(4) == 0) InsertChild();
        break;
      case 4: {  // a change of its record
        SegmentRecord& known = std::next(roots_.begin(), Draw(roots_.size()))->second;
        SegmentRecord next = known;
        next.lead = DrawTokens(std::min(next.tokens.end, kBlock));
        next.lead.front() = next.first_token;
        if (!known.lead.empty()) next.lead = known.lead;
        ASSERT_OK(tree_.Update(next, known.file, [] { return Status(); }));
        known = next;
        break;
      }
      case 5: {
        const SegmentId id = std::next(roots_.begin(), Draw(roots_.size()))->first;
        if (tree_.Erase(id, [] { return Status(); }).ok()) roots_.erase(id);
        break;
      }
      default:
        Compare(Draw(3) == 0 && !roots_.begin()->second.lead.empty() ? roots_.begin()->second.lead
                                                                     : DrawTokens());
    }
  }
}

TEST_F(PrefixRootsTest, FewAreLookedAtOfManyThatShareAHeader) {
  std::vector<uint32_t> tokens(100, 7);
  for (int i = 0; i < 3000; ++i) {
    for (uint32_t t = 50; t < tokens.size(); ++t) tokens[t] = Draw(1000);
    InsertRoot(tokens);
  }
  for (int i = 0; i < 20; ++i) {
    const auto& [id, root] = *std::next(roots_.begin(), Draw(roots_.size()));
    std::vector<uint32_t> prompt = root.lead;
    const uint32_t same = 55 + Draw(40);
    prompt[same] = 2000;
    const auto found = tree_.Roots(scope_, prompt, 0, 2);
    ASSERT_EQ(found.size(), 2u);
    EXPECT_EQ(found[0].id, id);
    EXPECT_EQ(found[0].at_most, same);
    EXPECT_LE(found[1].at_most, 54u);  // nobody else has so much of it
  }
}

}  // namespace
}  // namespace prefixd::storage
