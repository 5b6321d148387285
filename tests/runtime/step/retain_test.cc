// Tests which own tokens a retention policy keeps in memory when the others move, beside the
// policies' definitions over plain lists and float64.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "tests/runtime/retention/scorers_file.h"
#include "tests/runtime/step/retain_fixture.h"

namespace prefixd {
namespace {

using testing::kMemory;
using testing::kRetained;
using testing::NaiveOwn;
using testing::RetainTest;

constexpr uint32_t kSinks = 4, kTail = 16, kLastQueries = 16;

// The rules of a policy for one KV head, over lists of all rows and float64.
class NaiveRetention {
 public:
  NaiveRetention(std::string by, const KvGeometry& g, uint32_t layer, std::vector<std::byte> prompt)
      : by_(std::move(by)),
        row_(g.row(layer)),
        geometry_(g.layers[layer]),
        group_(g.group_size(layer)),
        prompt_(std::move(prompt)) {}

  void NoteQuery(uint32_t own, std::span<const float> q) {
    queries_.push_back({own, {q.begin(), q.end()}});
    if (queries_.size() > kLastQueries) queries_.erase(queries_.begin());
  }
  // Own tokens before `to` move; `own` are the rows of all. False: two tokens at the border are
  // worth the same but for rounding, and `retained` may be right with either.
  bool Move(uint32_t moved, uint32_t to, const std::vector<std::byte>& own) {
    const auto n_prompt = static_cast<uint32_t>(prompt_.size() / row_.bytes());
    std::vector<std::byte> rows = prompt_;
    rows.insert(rows.end(), own.begin(), own.end());
    const auto n = static_cast<uint32_t>(rows.size() / row_.bytes());
    // In memory: sinks, what was retained, the tail of the prefix until now, and own tokens.
    std::vector<uint32_t> held;
    for (uint32_t t = 0; t < kSinks; ++t) held.push_back(t);
    for (const uint32_t t : retained) held.push_back(n_prompt + t);
    for (uint32_t t = n_prompt + moved - kTail; t < n; ++t) held.push_back(t);
    std::vector<uint32_t> candidates;  // own tokens that no tail has after the move
    for (const uint32_t t : held) {
      if (t >= n_prompt && t < n_prompt + to - kTail) candidates.push_back(t);
    }
    std::vector<double> worth(n, 0.0);
    const bool mean = by_ == "tova" || by_ == "h2o";
    for (size_t i = by_ == "tova" ? queries_.size() - 1 : 0; i < queries_.size(); ++i) {
      const std::vector<double> given = Given(queries_[i], n_prompt, held, rows, mean);
      for (const uint32_t t : candidates) worth[t] += given[t];
    }
    std::vector<double> next(n, std::nan(""));
    double most = 0;
    for (const uint32_t t : candidates) most = std::max(most, worth[t]);
    memory_.resize(n, std::nan(""));
    for (const uint32_t t : candidates) {
      const bool known = !std::isnan(memory_[t]);
      if (by_ == "h2o") next[t] = worth[t] + (known ? memory_[t] : 0);
      if (by_.starts_with("global")) {
        const double share = worth[t] / most, past = memory_[t];
        next[t] = !known                ? share
                  : by_ == "global"     ? std::max(0.8 * past, share)
                  : by_ == "global-sum" ? 0.8 * past + share
                                        : 0.8 * past + 0.2 * share;
      }
    }
    std::vector<double> score = worth;
    if (by_ == "h2o" || by_.starts_with("global")) score = next;
    if (by_ == "snapkv") {
      for (size_t i = 0; i < candidates.size(); ++i) {
        for (size_t j = i - std::min<size_t>(i, 2); j < std::min(i + 3, candidates.size()); ++j) {
          score[candidates[i]] = std::max(score[candidates[i]], worth[candidates[j]]);
        }
      }
    }
    if (by_ == "window") std::iota(score.begin(), score.end(), 0.0);
    std::ranges::stable_sort(candidates, [&](uint32_t a, uint32_t b) {
      return score[a] != score[b] ? score[a] > score[b] : a > b;
    });
    const bool clear = candidates.size() <= kRetained ||
                       score[candidates[kRetained - 1]] > score[candidates[kRetained]] * (1 + 1e-4);
    candidates.resize(std::min<size_t>(candidates.size(), kRetained));
    retained.clear();
    memory_.assign(n, std::nan(""));
    for (const uint32_t t : candidates) {
      retained.push_back(t - n_prompt);
      memory_[t] = next[t];
    }
    std::ranges::sort(retained);
    return clear;
  }

  std::vector<uint32_t> retained;  // own tokens, ascending

 private:
  struct Query {
    uint32_t own;
    std::vector<float> q;
  };
  std::vector<double> Given(const Query& query, uint32_t n_prompt, std::span<const uint32_t> held,
                            const std::vector<std::byte>& rows, bool mean) const {
    std::vector<double> out(rows.size() / row_.bytes(), 0.0);
    std::vector<float> key(row_.key_dim);
    for (uint32_t g = 0; g < group_; ++g) {
      std::vector<double> e(out.size(), 0.0);
      double sum = 0;
      for (const uint32_t t : held) {
        if (t >= n_prompt + query.own) continue;
        ToFloat(row_.dtype, &rows[t * row_.bytes()], key);
        double s = 0;
        for (uint32_t d = 0; d < row_.key_dim; ++d) {
          s += double{key[d]} * query.q[g * row_.key_dim + d];
        }
        sum += e[t] = std::exp(s * geometry_.scale);
      }
      for (const uint32_t t : held) {
        out[t] = mean ? out[t] + e[t] / sum / group_ : std::max(out[t], e[t] / sum);
      }
    }
    return out;
  }

  const std::string by_;
  const RowShape row_;
  const LayerGeometry geometry_;
  const uint32_t group_;
  const std::vector<std::byte> prompt_;
  std::vector<Query> queries_;
  std::vector<double> memory_;  // by position
};

// Token by token, with every move awaited, so that both sides rank at the same moments.
TEST_F(RetainTest, PoliciesKeepWhatTheirDefinitionsKeep) {
  Prepare("RetainPolicies");
  const KvGeometry& g = spec_.geometry;
  uint32_t compared = 0;
  for (const std::string by :
       {"local", "tova", "h2o", "snapkv", "global", "global-sum", "global-mean", "window"}) {
    SCOPED_TRACE(by);
    const auto session = AttachBounded(Everything(by));
    ASSERT_TRUE(session);
    NaiveOwn rows;
    std::vector<NaiveRetention> want;
    for (uint32_t l = 0; l < g.n_layers; ++l) {
      for (uint32_t h = 0; h < g.layer(l).n_kv_heads; ++h) {
        want.emplace_back(by, g, l, prompt_.Rows(l, h));
      }
    }
    uint32_t moved = 0, moves = 0, unclear = 0;
    for (uint32_t n = 1; n <= 700 && !HasFailure(); ++n) {
      for (uint32_t l = 0; l < g.n_layers; ++l) {
        const LayerShape shape = g.layer(l);
        const Token token = MakeTokens(l, shape.n_kv_heads, 1);
        const auto q = MakeQueries(l, shape.n_kv_heads, 1);
        State out = Room(l, shape.n_kv_heads, 1);
        StepInfo info;
        ASSERT_OK(session->StepAppend(l, q, token.k, token.v, out.y, out.lse, &info));
        Note(rows, l, All(l), 1, token);
        if (n % 50 == 3) {
          ExpectExact(rows, l, All(l), q, out.y, out.lse);
          const uint32_t mid = prompt_.n_tokens + moved - kSinks - kTail;
          EXPECT_EQ(info.ledger.retained_tokens, moves > 0 ? 2 * kRetained : 0);
          EXPECT_EQ(info.ledger.retrieved_tokens + info.ledger.retained_tokens, 2 * mid);
        }
        const size_t each = size_t{shape.group_size()} * shape.key_dim;
        for (uint32_t h = 0; h < shape.n_kv_heads; ++h) {
          want[g.heads().of(l, h)].NoteQuery(n, std::span(q).subspan(h * each, each));
        }
      }
      if (n - moved <= kMemory) continue;
      AwaitMoves(*session);
      const uint32_t to = session->report()->own_moved;
      ASSERT_EQ(to, (n - kMemory / 2) / 64 * 64);
      for (size_t head = 0; head < want.size(); ++head) {
        const auto of = std::pair(g.heads().layer_of(head), g.heads().head_of(head));
        unclear += want[head].Move(moved, to, rows.rows[of]) ? 0 : 1;
        // Beyond a close call the two may go apart.
        if (unclear == 0) {
          EXPECT_EQ(Retained(*session, head), want[head].retained) << head << " at " << n;
          ++compared;
        }
      }
      moved = to;
      ++moves;
      EXPECT_EQ(session->report()->own_retained, kRetained);
    }
    EXPECT_GT(moves, 3u);
    ASSERT_OK(session->Detach());
  }
  EXPECT_GT(compared, 60u);  // of 8 policies, 4 heads and at least 4 moves
  ExpectNothingLeft();
}

TEST_F(RetainTest, ScorersAreTheOperators) {
  Prepare("RetainScorers");
  const auto attach = [&] {
    return store_->Attach({.model = spec_.name,
                           .tokens = prompt_.tokens,
                           .policy = Everything("kvpop"),
                           .own_memory_tokens = kMemory});
  };
  const auto refused = attach();
  EXPECT_CODE(refused, Code::kFailedPrecondition);
  EXPECT_NE(refused.error().message.find("store.scorers"), std::string::npos);
  const auto plain = AttachBounded(Everything("local"));
  EXPECT_CODE(plain->SetPolicy(Everything("kvpop")), Code::kFailedPrecondition);
  EXPECT_EQ(plain->policy().retain.by, "local");
  ASSERT_OK(plain->Detach());
}

// What a scorer gave to a token it keeps, so that what is retained are the best of all that moved.
TEST_F(RetainTest, TrainedScorersRankOwnTokens) {
  const std::filesystem::path folder = options_.dir.string() + "-scorers";
  std::filesystem::create_directories(folder);
  spec_.identity = {{"weights", "blake2b:aa"}};
  const testing::ScorersFile file(spec_.geometry, "kvpop-mlp", testing::Seed("RetainScorersFile"));
  file.Write(folder / "these.safetensors");
  options_.scorers = folder;
  Prepare("RetainTrained");
  const auto session = AttachBounded(Everything("kvpop"));
  ASSERT_TRUE(session);
  NaiveOwn rows;
  Session* const all[] = {session.get()};
  for (int round = 0; round < 4 && !HasFailure(); ++round) {
    AppendToAll(all, rows, 200);
    AwaitMoves(*session);
    Decode(*session, rows);
  }
  const uint32_t moved = session->report()->own_moved;
  const KvGeometry& g = spec_.geometry;
  for (size_t head = 0; head < g.heads().count(); ++head) {
    const uint32_t l = g.heads().layer_of(head), h = g.heads().head_of(head);
    const RowShape row = g.row(l);
    auto whole = prompt_.Rows(l, h);
    const auto& own = rows.rows[{l, h}];
    whole.insert(whole.end(), own.begin(), own.end());
    const auto priorities =
        file.Priorities(l, h, {whole.data(), whole.size() / row.bytes(), row.bytes(), row});
    std::vector<uint32_t> want(moved - kTail);
    std::iota(want.begin(), want.end(), 0u);
    std::ranges::sort(want, [&](uint32_t a, uint32_t b) {
      return priorities[prompt_.n_tokens + a] > priorities[prompt_.n_tokens + b];
    });
    want.resize(kRetained);
    std::ranges::sort(want);
    EXPECT_EQ(Retained(*session, head), want) << head;
  }
  std::filesystem::remove_all(folder);
}

TEST_F(RetainTest, RefusesWhatCannotBe) {
  Prepare("RetainRefusals");
  for (const StepPolicy& policy : {Everything("lru"), Everything("local", 65537)}) {
    const auto refused = store_->Attach({.model = spec_.name,
                                         .tokens = prompt_.tokens,
                                         .policy = policy,
                                         .own_memory_tokens = kMemory});
    EXPECT_CODE(refused, Code::kInvalidArgument);
    EXPECT_NE(refused.error().message.find("retain."), std::string::npos);
  }
}

}  // namespace
}  // namespace prefixd
