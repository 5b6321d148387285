// Tests puts in parts in the store of this process: what they leave behind, query samples and
// encodings. tests/client_lib/put_parts_test.cc has the rules, through every client.
#include <cstring>
#include <thread>

#include "runtime/derived/query_samples.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

constexpr uint32_t kPartTokens = 1200;

class PutParts : public RuntimeTest {
 protected:
  PutParts() { spec_.geometry = SmallGeometry(2, 8, 4, 16); }

  // The rows or queries of some heads: every token has `heads` items of `bytes` each.
  static std::vector<std::byte> Part(std::span<const std::byte> all, uint32_t heads, size_t bytes,
                                     uint32_t first, uint32_t n) {
    std::vector<std::byte> out;
    for (size_t at = 0; at < all.size(); at += heads * bytes) {
      const auto own = all.subspan(at + first * bytes, n * bytes);
      out.insert(out.end(), own.begin(), own.end());
    }
    return out;
  }

  Result<std::unique_ptr<PutStream>> Begin(HeadRange heads, uint32_t wait_ms = 0) {
    PutSpec spec{spec_.name, "", prompt_.tokens, "parts"};
    spec.heads = heads;
    spec.wait_ms = wait_ms;
    return store_->BeginPut(spec);
  }
  // Writes what a rank has of the prompt, in runs of `run` tokens.
  Status Write(PutStream& put, HeadRange heads, uint32_t run) {
    const KvGeometry& g = spec_.geometry;
    for (uint32_t l = 0; l < g.n_layers; ++l) {
      for (uint32_t t = 0; t < kPartTokens; t += run) {
        const uint32_t n = std::min(run, kPartTokens - t), group = g.group_size(0);
        const size_t key = g.row(0).key_bytes(), value = g.row(0).value_bytes();
        PREFIXD_TRY(put.Write(l, t, n,
                              Part(prompt_.K(l, t, n), g.n_kv_heads, key, heads.first, heads.n),
                              Part(prompt_.V(l, t, n), g.n_kv_heads, value, heads.first, heads.n)));
        const auto q = Part(std::as_bytes(prompt_.Q(l, t, n)), g.n_q_heads, g.key_dim * 4,
                            heads.first * group, heads.n * group);
        std::vector<float> floats(q.size() / 4);
        std::memcpy(floats.data(), q.data(), q.size());
        PREFIXD_TRY(put.WriteQueries(l, t, n, floats));
      }
    }
    return {};
  }

  SyntheticPrompt prompt_;
};

// Ranks on threads of their own, of which the last commits for all: the store then holds what a put
// of all heads stores, and chose the same.
TEST_F(PutParts, LeaveWhatAWholePutLeaves) {
  const uint64_t seed = Seed("PutParts");
  prompt_ = MakePrompt(spec_.geometry, kPartTokens, seed);
  for (const char* encoding : {"as_given", "int8"}) {
    SCOPED_TRACE(encoding);
    options_.encoding = encoding;
    options_.dir = dir_.path() / ("whole-" + std::string(encoding));
    Open();
    const std::string whole = PutReady(prompt_);
    ASSERT_NE(whole, "");
    const auto policy = StepPolicy{.budget = 0.2};
    const auto rows_of = [&](Session& session) {
      std::vector<std::vector<std::byte>> rows;
      for (uint32_t head = 0; head < 4; ++head) {
        rows.emplace_back(kPartTokens * spec_.geometry.row(0).bytes());
        EXPECT_TRUE(session.ReadRange(1, head, {0, kPartTokens}, rows.back()).ok());
      }
      return rows;
    };
    auto session = Attach(prompt_, policy);
    ASSERT_TRUE(session);
    const auto want_rows = rows_of(*session);
    const Output want = Step(*session, 1, prompt_.Q(1, kPartTokens - 1, 1));
    const auto want_choices = store_->Prefix(whole)->choices;
    ASSERT_FALSE(want_choices.empty());
    session.reset();

    options_.dir = dir_.path() / ("parts-" + std::string(encoding));
    Open();
    const std::vector<HeadRange> ranks = {{3, 1}, {0, 2}, {2, 1}};
    std::vector<Result<PutResult>> results(ranks.size(), Error{});
    std::vector<std::thread> threads;
    for (size_t r = 0; r < ranks.size(); ++r) {
      threads.emplace_back([&, r] {
        auto put = Begin(ranks[r], 600000);
        ASSERT_OK(put);
        EXPECT_EQ((*put)->missing(), (TokenRange{0, kPartTokens}));
        ASSERT_OK(Write(**put, ranks[r], 50 + 37 * uint32_t(r)));
        EXPECT_EQ((*put)->progress().done, uint64_t{2} * kPartTokens);
        results[r] = (*put)->Commit();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& result : results) {
      ASSERT_OK(result);
      EXPECT_EQ(result->prefix, results[0]->prefix);
      EXPECT_EQ(result->stored_tokens, kPartTokens);
      EXPECT_EQ(result->bytes, results[0]->bytes);
      EXPECT_EQ(result->seconds, results[0]->seconds);
    }
    ASSERT_OK(store_->WaitReady(results[0]->prefix, nullptr));
    EXPECT_EQ(store_->Stats()->puts, 1u);
    EXPECT_EQ(store_->Prefix(results[0]->prefix)->choices, want_choices);
    session = Attach(prompt_, policy);
    ASSERT_TRUE(session);
    EXPECT_EQ(rows_of(*session), want_rows);
    const Output got = Step(*session, 1, prompt_.Q(1, kPartTokens - 1, 1));
    EXPECT_EQ(got.y, want.y);
    EXPECT_EQ(got.lse, want.lse);
    EXPECT_TRUE(store_->VerifyTenant("", nullptr)->damaged.empty());
  }
}

// Whatever part ends first, and when: the space, the memory and the file are free again before
// another part hears of it.
TEST_F(PutParts, LeaveNothingWhenOneEnds) {
  Open();
  prompt_ = MakePrompt(spec_.geometry, kPartTokens, Seed("PutParts.End"));
  const auto reserved = [&] {
    uint64_t bytes = 0;
    const auto stats = store_->Stats();
    for (const TenantStats& tenant : stats->tenants) bytes += tenant.reserved_bytes;
    return bytes;
  };
  const auto memory = [&] { return store_->memory()->used(MemoryKind::kPuts); };
  const auto files = [&] {
    size_t n = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(options_.dir)) {
      n += entry.path().extension() == ".seg";
    }
    return n;
  };
  uint64_t before = 0;
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    auto a = Begin({0, 2}, 600000), b = Begin({2, 2});
    ASSERT_OK(a);
    ASSERT_OK(b);
    EXPECT_GT(reserved(), 0u);
    EXPECT_EQ(files(), 1u);
    ASSERT_OK(Write(**a, {0, 2}, 100));
    if (round == 0) {  // before the other commits
      (*b)->Abort();
      EXPECT_CODE((*a)->Commit(), Code::kUnavailable);
      EXPECT_CODE((*a)->Commit(), Code::kFailedPrecondition);  // it has ended
    } else {  // while the other waits, and after it stopped waiting
      Result<PutResult> told = Error{};
      std::thread waiting([&] { told = (*a)->Commit(); });
      b->reset();
      waiting.join();
      EXPECT_CODE(told, Code::kUnavailable);
      EXPECT_NE(told.error().message.find("KV heads 2..4"), std::string::npos)
          << told.error().message;
    }
    EXPECT_EQ(reserved(), 0u);
    EXPECT_EQ(files(), 0u);
    EXPECT_TRUE(store_->ListPrefixes({})->prefixes.empty());
    a->reset();
    b->reset();
    if (round == 0) before = memory();  // buffers that the next put uses again
    EXPECT_EQ(memory(), before);
  }
  EXPECT_EQ(store_->Stats()->puts_aborted, 3u);
}

TEST(JoinHeads, KeepsTheTokensThatAllPartsHave) {
  KvGeometry geometry = SmallGeometry(1, 3, 1, 2);
  geometry.n_q_heads = 1;
  QueryReservoir a(geometry, 8, 8);
  geometry.n_q_heads = 2;
  QueryReservoir b(geometry, 8, 8);
  const std::vector<float> q = {1, 2, 3, 4, 5, 6, 7, 8};
  a.Add(0, 6, 2, std::span(q).first(4));  // tokens 6 and 7
  b.Add(0, 7, 1, std::span(q).subspan(4));
  const QuerySamples joined = JoinHeads({a.Take(), b.Take()});
  EXPECT_EQ(joined.n_q_heads, 3u);
  EXPECT_EQ(joined.prompt_tokens, 8u);
  ASSERT_EQ(joined.layers.size(), 1u);
  EXPECT_EQ(joined.layers[0].positions, std::vector<uint32_t>{7});
  EXPECT_EQ(joined.layers[0].q, (std::vector<float>{3, 4, 5, 6, 7, 8}));
}

}  // namespace
}  // namespace prefixd::testing
