// Runs random operations beside a plain map of everything put, with reopening in between.
#include <algorithm>
#include <map>

#include "storage/catalog/store_dir.h"
#include "tests/storage/store_backends.h"

namespace prefixd::storage {
namespace {

using Tokens = std::vector<uint32_t>;

// The ModelStore is the obvious truth: the prompts put and not removed, per tenant.
class ModelStore {
 public:
  struct Prompt {
    Tokens tokens;
    std::string tenant;
  };

  void Add(const SegmentId& id, const Prompt& prompt) { prompts_[id] = prompt; }
  void Remove(const SegmentId& id) { prompts_.erase(id); }
  const std::map<SegmentId, Prompt>& prompts() const { return prompts_; }

  uint32_t LongestMatch(const std::string& tenant, const Tokens& tokens) const {
    uint32_t best = 0;
    for (const auto& [id, p] : prompts_) {
      if (p.tenant != tenant) continue;
      const size_t n = std::min(p.tokens.size(), tokens.size());
      const auto at = std::mismatch(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(n),
                                    p.tokens.begin());
      best = std::max(best, static_cast<uint32_t>(at.first - tokens.begin()));
    }
    return best;
  }

 private:
  std::map<SegmentId, Prompt> prompts_;
};

class RandomTest : public StoreTest {
 protected:
  // Prompts are mostly variations of stored ones: cut somewhere, then continued.
  Tokens SomeTokens() {
    Tokens tokens;
    if (!truth_.prompts().empty() && rng_() % 5 != 0) {
      const auto& from = Pick().tokens;
      tokens.assign(from.begin(),
                    from.begin() + static_cast<ptrdiff_t>(rng_() % (from.size() + 1)));
    }
    // A tiny vocabulary makes accidental agreement frequent.
    const Tokens more = RandomTokens(rng_, rng_() % 120 + (tokens.empty() ? 1 : 0), 3);
    tokens.insert(tokens.end(), more.begin(), more.end());
    return tokens;
  }

  const ModelStore::Prompt& Pick() { return PickEntry()->second; }
  std::map<SegmentId, ModelStore::Prompt>::const_iterator PickEntry() {
    auto it = truth_.prompts().begin();
    std::advance(it, static_cast<ptrdiff_t>(rng_() % truth_.prompts().size()));
    return it;
  }

  void DoPut() {
    const ModelStore::Prompt prompt{SomeTokens(), rng_() % 3 == 0 ? "a" : "b"};
    const uint32_t matched = truth_.LongestMatch(prompt.tenant, prompt.tokens);
    auto writer = store_->BeginPut("m", prompt.tenant, prompt.tokens, "");
    ASSERT_OK(writer);
    // Less than a block in common does not make a chain.
    const bool shared = matched >= options_.block_tokens || matched == prompt.tokens.size();
    ASSERT_EQ((*writer)->range().begin, shared ? matched : 0);
    const bool abort = rng_() % 8 == 0;
    if ((*writer)->range().size() > 0) {
      ASSERT_OK(WriteAll(**writer, model_.geometry, prompt.tokens,
                         static_cast<uint32_t>(1 + rng_() % 80), rng_() % 2 == 0));
    }
    if (abort) return;
    const auto id = (*writer)->Commit();
    ASSERT_OK(id);
    if (matched < prompt.tokens.size()) truth_.Add(*id, prompt);
  }

  void DoMatch() {
    const Tokens tokens = SomeTokens();
    const std::string tenant = rng_() % 3 == 0 ? "a" : "b";
    const auto match = store_->LongestMatch("m", tenant, tokens);
    ASSERT_OK(match);
    ASSERT_EQ(match->n_tokens, truth_.LongestMatch(tenant, tokens));
    if (match->n_tokens == 0) return;
    ASSERT_EQ(match->stored_tokens, truth_.prompts().at(match->id).tokens.size());
    ExpectPrefix(match->id, std::span(tokens).first(match->n_tokens));
  }

  void DoRemove() {
    if (truth_.prompts().empty()) return;
    const SegmentId id = PickEntry()->first;
    if (store_->GetPrefix(id)->children > 0) return;  // its tokens would still match
    ASSERT_OK(store_->Remove(id));
    truth_.Remove(id);
  }

  void Reopen() {
    Open();
    ASSERT_NE(store_, nullptr);
    ASSERT_EQ(store_->stats().recovered_orphans, 0u);
  }

  void CheckEverything() {
    ASSERT_EQ(store_->ListPrefixes().size(), truth_.prompts().size());
    for (const auto& [id, prompt] : truth_.prompts()) ExpectPrefix(id, prompt.tokens);
    ASSERT_EQ(FilesIn(options_.dir / "segments"), truth_.prompts().size());
  }

  ModelStore truth_;
  std::mt19937_64 rng_;
};

TEST_P(RandomTest, BehavesLikeAPlainMap) {
  rng_.seed(Seed("RandomTest.BehavesLikeAPlainMap"));
  options_.host_tier_bytes = 32 * 4096;  // small, so that pages come and go
  Open();
  for (int i = 0; i < 400 && !HasFatalFailure(); ++i) {
    const uint64_t dice = rng_() % 100;
    if (dice < 40) {
      DoPut();
    } else if (dice < 80) {
      DoMatch();
    } else if (dice < 97) {
      DoRemove();
    } else {
      Reopen();
    }
  }
  if (!HasFatalFailure()) CheckEverything();
  if (!HasFatalFailure()) Reopen();
  if (!HasFatalFailure()) CheckEverything();
}

INSTANTIATE_TEST_SUITE_P(Backends, RandomTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads), BackendName);

}  // namespace
}  // namespace prefixd::storage
