// Tests restoring a prefix run by run: right, in order, ahead of its consumer, bounded, and stopped
// at any moment.
#include "prefixd/restore.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

using std::chrono::milliseconds;

class RestoreTest : public RuntimeTest {
 protected:
  // Copies every run into one cache per layer [n_tokens][heads][dim].
  struct Cache {
    std::vector<std::vector<std::byte>> k, v;
    size_t runs = 0;
  };

  void Collect(Restore& restore, const SyntheticPrompt& prompt, KvOrder order, Cache& out) {
    const KvGeometry& g = prompt.geometry;
    const size_t heads = g.n_kv_heads, key = g.row(0).key_bytes(), value = g.row(0).value_bytes();
    out.k.assign(g.n_layers, std::vector<std::byte>(prompt.n_tokens * heads * key));
    out.v.assign(g.n_layers, std::vector<std::byte>(prompt.n_tokens * heads * value));
    uint32_t layer = 0, token = 0;
    while (true) {
      const auto next = restore.Next();
      ASSERT_OK(next);
      if (!next->has_value()) break;
      const RestoredRun& run = **next;
      // Runs come first layer first, and in order of tokens within a layer.
      if (run.layer != layer) {
        ASSERT_EQ(run.layer, layer + 1);
        layer = run.layer;
        token = run.tokens.begin;
      }
      if (out.runs++ == 0) token = run.tokens.begin;
      ASSERT_EQ(run.tokens.begin, token);
      ASSERT_GT(run.tokens.size(), 0u);
      token = run.tokens.end;
      const size_t n = run.tokens.size();
      ASSERT_EQ(run.k.size(), n * heads * key);
      ASSERT_EQ(run.v.size(), n * heads * value);
      for (size_t t = 0; t < n; ++t) {
        for (size_t h = 0; h < heads; ++h) {
          const size_t from = order == KvOrder::kTokenMajor ? t * heads + h : h * n + t;
          const size_t to = (run.tokens.begin + t) * heads + h;
          std::copy_n(run.k.data() + from * key, key, out.k[layer].data() + to * key);
          std::copy_n(run.v.data() + from * value, value, out.v[layer].data() + to * value);
        }
      }
    }
  }

  std::string id_;
};

TEST_F(RestoreTest, GivesBackWhatWasPut) {
  options_.recluster = false;
  spec_.geometry.value_dim = 8;
  Open();
  // The chain has three segments.
  SyntheticPrompt prompt;
  for (const uint32_t n : {300u, 500u, 900u}) {
    prompt = MakePrompt(spec_.geometry, n, 11);
    ASSERT_NE(Put(prompt), "");
  }
  const auto session = Attach(prompt, {.k = 10});
  ASSERT_TRUE(session);
  ASSERT_EQ(session->info().parts.size(), 3u);
  const uint64_t before = session->report()->total.logical_bytes;  // bytes of the summary
  for (const KvOrder order : {KvOrder::kTokenMajor, KvOrder::kHeadMajor}) {
    for (const uint64_t buffer : {uint64_t{1}, uint64_t{20'000}, uint64_t{128} << 20}) {
      RestoreOptions options;
      options.order = order;
      options.buffer_bytes = buffer;
      uint64_t last = 0, all = 0;
      options.progress = [&](uint64_t done, uint64_t total, std::string_view unit) {
        EXPECT_GT(done, last);
        EXPECT_EQ(unit, "bytes");
        last = done;
        all = total;
        return true;
      };
      auto restore = Restore::Begin(session, options);
      ASSERT_OK(restore);
      Cache cache;
      Collect(**restore, prompt, order, cache);
      for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
        EXPECT_TRUE(std::ranges::equal(cache.k[l], prompt.K(l, 0, 900)));
        EXPECT_TRUE(std::ranges::equal(cache.v[l], prompt.V(l, 0, 900)));
      }
      EXPECT_EQ(all, 900 * spec_.geometry.token_bytes());
      EXPECT_EQ(last, all);
      EXPECT_EQ(cache.runs, buffer == 1 ? 1800u : buffer == 20'000 ? 18u : 6u);
      const auto again = (*restore)->Next();  // the end stays the end
      ASSERT_OK(again);
      EXPECT_FALSE(again->has_value());
    }
  }
  EXPECT_EQ(session->report()->total.logical_bytes - before,
            6 * 900 * spec_.geometry.token_bytes());
}

TEST_F(RestoreTest, RunsEndWithTheChunksOfReclusteredRows) {
  options_.recluster_min_tokens = 100;
  options_.recluster_chunk_tokens = 256;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 700, 12);
  ASSERT_NE(PutReady(prompt), "");
  ASSERT_OK(store_->WaitRewritten(nullptr));
  const auto session = Attach(prompt, {.k = 10});
  ASSERT_TRUE(session);
  RestoreOptions options;
  options.buffer_bytes = 1000;
  auto restore = Restore::Begin(session, options);
  ASSERT_OK(restore);
  Cache cache;
  Collect(**restore, prompt, options.order, cache);
  EXPECT_EQ(cache.runs, 2u * 3);
  EXPECT_EQ(cache.k, prompt.k);
  EXPECT_EQ(cache.v, prompt.v);
}

TEST_F(RestoreTest, PartsOfItAndBadRequests) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 200, 13);
  ASSERT_NE(Put(prompt), "");
  const auto session = Attach(prompt, {.k = 10});
  ASSERT_TRUE(session);
  RestoreOptions options;
  options.tokens = {50, 60};
  options.first_layer = 1;
  auto restore = Restore::Begin(session, options);
  ASSERT_OK(restore);
  const auto run = (*restore)->Next();
  ASSERT_OK(run);
  ASSERT_TRUE(run->has_value());
  EXPECT_EQ((*run)->layer, 1u);
  EXPECT_EQ((*run)->tokens, (TokenRange{50, 60}));
  EXPECT_TRUE(std::ranges::equal((*run)->k, prompt.K(1, 50, 10)));
  EXPECT_TRUE(std::ranges::equal((*run)->v, prompt.V(1, 50, 10)));
  EXPECT_FALSE((*restore)->Next()->has_value());
  options.tokens = {50, 201};
  EXPECT_CODE(Restore::Begin(session, options), Code::kInvalidArgument);
  options.tokens = {60, 50};
  EXPECT_CODE(Restore::Begin(session, options), Code::kInvalidArgument);
  options.tokens = {};
  options.end_layer = 3;
  EXPECT_CODE(Restore::Begin(session, options), Code::kInvalidArgument);
  EXPECT_CODE(Restore::Begin(nullptr, {}), Code::kInvalidArgument);
  // This part reads slices of heads.
  const size_t key = spec_.geometry.row(0).key_bytes();
  std::vector<std::byte> k(10 * key), v(10 * key);
  ASSERT_OK(session->ReadLayer({0, {5, 15}, {1, 1}, KvOrder::kTokenMajor}, k, v));
  const auto rows = prompt.Rows(0, 1);
  for (size_t t = 0; t < 10; ++t) {
    EXPECT_TRUE(std::equal(&k[t * key], &k[t * key] + key, &rows[(5 + t) * 2 * key]));
    EXPECT_TRUE(std::equal(&v[t * key], &v[t * key] + key, &rows[(5 + t) * 2 * key + key]));
  }
  EXPECT_CODE(session->ReadLayer({0, {5, 15}, {1, 2}, {}}, k, v), Code::kInvalidArgument);
  EXPECT_CODE(session->ReadLayer({0, {5, 15}, {2, 0}, {}}, k, v), Code::kInvalidArgument);
  EXPECT_CODE(session->ReadLayer({2, {5, 15}, {1, 1}, {}}, k, v), Code::kInvalidArgument);
  EXPECT_CODE(session->ReadLayer({0, {5, 16}, {1, 1}, {}}, k, v), Code::kInvalidArgument);
  ASSERT_OK(session->ReadLayer({0, {5, 5}, {0, 0}, {}}, {}, {}));
}

TEST_F(RestoreTest, DamageEndsIt) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 400, 14);
  ASSERT_NE(Put(prompt), "");
  options_.host_tier_bytes = 0;
  Open();
  const auto session = Attach(prompt, {.k = 10});
  ASSERT_TRUE(session);
  for (const auto& entry : std::filesystem::directory_iterator(options_.dir / "segments")) {
    if (entry.path().extension() != ".seg") continue;
    FILE* f = std::fopen(entry.path().c_str(), "r+b");
    ASSERT_NE(f, nullptr);
    std::fseek(f, (1 + 3 * 7) * 4096 + 100, SEEK_SET);  // in the last head of the last layer
    std::fputc(0x55, f);
    std::fputc(0xaa, f);
    std::fclose(f);
  }
  RestoreOptions options;
  options.buffer_bytes = 1;
  options.tokens = {0, 20};
  auto restore = Restore::Begin(session, options);
  ASSERT_OK(restore);
  size_t runs = 0;
  auto run = (*restore)->Next();
  for (; run.ok() && run->has_value(); run = (*restore)->Next()) ++runs;
  EXPECT_CODE(run, Code::kCorrupt);
  EXPECT_LE(runs, 20u);  // the first layer at most
  EXPECT_CODE((*restore)->Next(), Code::kCorrupt);
}

// Blocks its reads until the test lets them through.
class GatedSession final : public Session {
 public:
  GatedSession() {
    info_.n_tokens = 64;
    info_.geometry = SmallGeometry(4, 2, 2, 16);
    info_.parts = {{{0, 64}, RowEncoding::kAsGiven, 16}};
  }
  void LetThrough(int reads) {
    std::lock_guard lock(mutex_);
    allowed_ += reads;
    changed_.notify_all();
  }
  // Returns whether `reads` reads have begun within the given time.
  bool Begun(int reads, milliseconds within) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, within, [&] { return begun_ >= reads; });
  }

  const SessionInfo& info() const override { return info_; }
  Status ReadLayers(std::span<const LayerRead> reads,
                    const std::function<bool(size_t)>& done) override {
    for (size_t i = 0; i < reads.size(); ++i) {
      const auto& [slice, k, v] = reads[i];
      {
        std::unique_lock lock(mutex_);
        ++begun_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return allowed_ > 0; });
        --allowed_;
      }
      std::ranges::fill(k, std::byte(slice.layer));
      std::ranges::fill(v, std::byte(slice.tokens.begin));
      if (!done(i)) return Error{Code::kCancelled, "not wanted"};
    }
    return {};
  }

  StepPolicy policy() const override { return {}; }
  Status SetPolicy(const StepPolicy&) override { return No(); }
  Status Step(uint32_t, HeadRange, std::span<const float>, std::span<float>, std::span<float>,
              StepInfo*) override {
    return No();
  }
  Status AttendExact(uint32_t, HeadRange, uint32_t, uint32_t, std::span<const float>,
                     std::span<float>, std::span<float>) override {
    return No();
  }
  Status Append(uint32_t, HeadRange, uint32_t, std::span<const std::byte>,
                std::span<const std::byte>) override {
    return No();
  }
  Status StepAppend(uint32_t, HeadRange, std::span<const float>, std::span<const std::byte>,
                    std::span<const std::byte>, std::span<float>, std::span<float>,
                    StepInfo*) override {
    return No();
  }
  Status Truncate(uint32_t) override { return No(); }
  Result<std::shared_ptr<Session>> Fork() override { return No(); }
  Result<PutResult> Persist(std::span<const uint32_t>, const PersistSpec&) override { return No(); }
  Result<std::shared_ptr<Session>> ForkPersisted(uint32_t) override { return No(); }
  Status ReadRows(uint32_t, uint32_t, std::span<const uint32_t>, std::span<std::byte>) override {
    return No();
  }
  Result<RowsInPlace> ReadInPlace(uint32_t, uint32_t, std::span<const uint32_t>) override {
    return No();
  }
  Status ReadRange(uint32_t, uint32_t, TokenRange, std::span<std::byte>) override { return No(); }
  Status ReadTokens(TokenRange, std::span<uint32_t>) override { return No(); }
  Result<Selection> Select(uint32_t, uint32_t, std::span<const float>, uint32_t) override {
    return No();
  }
  Result<std::vector<std::byte>> SummaryBytes(uint32_t, uint32_t,
                                              const EstimatorVariant&) override {
    return No();
  }
  void Cancel() override {}
  Result<SessionReport> report() const override { return SessionReport(); }
  Result<SessionReport> Detach() override { return No(); }

 private:
  static Error No() { return {Code::kInternal, "not here"}; }

  SessionInfo info_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int begun_ = 0, allowed_ = 0;
};

constexpr milliseconds kSoon{20'000}, kAWhile{50};

TEST(RestorePipeline, ReadsAheadWithinItsMemory) {
  auto session = std::make_shared<GatedSession>();
  RestoreOptions options;
  options.buffer_bytes = 3 * 16 * 2 * 64;  // three runs of 16 tokens, 2 heads of 64 bytes
  auto restore = Restore::Begin(session, options);
  ASSERT_TRUE(restore.ok());
  EXPECT_TRUE(session->Begun(1, kSoon));  // before the first Next
  session->LetThrough(100);
  EXPECT_TRUE(session->Begun(3, kSoon));
  EXPECT_FALSE(session->Begun(4, kAWhile));  // no buffer is left for a fourth
  for (uint32_t i = 0; i < 16; ++i) {
    const auto run = (*restore)->Next();
    ASSERT_TRUE(run.ok() && run->has_value());
    EXPECT_EQ((*run)->layer, i / 4);
    EXPECT_EQ((*run)->tokens, (TokenRange{i % 4 * 16, i % 4 * 16 + 16}));
    // While the caller holds this run, the others are filled, and this one is not overwritten.
    EXPECT_TRUE(session->Begun(static_cast<int>(std::min(16u, i + 3)), kSoon));
    if (i < 13) {
      EXPECT_FALSE(session->Begun(static_cast<int>(i + 4), milliseconds(5)));
    }
    EXPECT_EQ((*run)->k.front(), std::byte(i / 4));
    EXPECT_EQ((*run)->v.back(), std::byte(i % 4 * 16));
  }
  const auto end = (*restore)->Next();
  ASSERT_TRUE(end.ok());
  EXPECT_FALSE(end->has_value());
}

TEST(RestorePipeline, CancelWakesWhoWaits) {
  auto session = std::make_shared<GatedSession>();
  auto restore = Restore::Begin(session, {});
  ASSERT_TRUE(restore.ok());
  EXPECT_TRUE(session->Begun(1, kSoon));
  std::thread consumer([&] { EXPECT_CODE((*restore)->Next(), Code::kCancelled); });
  (*restore)->Cancel();
  consumer.join();  // does not wait for the read under way
  EXPECT_CODE((*restore)->Next(), Code::kCancelled);
  session->LetThrough(1);
  restore->reset();
  EXPECT_FALSE(session->Begun(2, kAWhile));
}

TEST(RestorePipeline, ProgressMayCancel) {
  auto session = std::make_shared<GatedSession>();
  session->LetThrough(100);
  RestoreOptions options;
  options.progress = [](uint64_t done, uint64_t, std::string_view) { return done < 5000; };
  auto restore = Restore::Begin(session, options);
  ASSERT_TRUE(restore.ok());
  EXPECT_TRUE((*restore)->Next().ok());
  EXPECT_TRUE((*restore)->Next().ok());
  EXPECT_CODE((*restore)->Next(), Code::kCancelled);
  EXPECT_CODE((*restore)->Next(), Code::kCancelled);
}

}  // namespace
}  // namespace prefixd::testing
