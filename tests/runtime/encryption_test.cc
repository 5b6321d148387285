// Tests an encrypted store from a user's side: answers are those of a store in clear, and nothing
// that ingest and rewriting make of a prompt lies in clear.
#include <filesystem>

#include "storage/catalog/store_keys.h"
#include "storage/crypt/key_ring.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd {
namespace {

namespace fs = std::filesystem;
using testing::MakePrompt;

class EncryptedRuntimeTest : public testing::RuntimeTest {
 protected:
  EncryptedRuntimeTest() {
    options_.recluster_min_tokens = 100;
    options_.recluster_chunk_tokens = 256;
  }

  std::vector<Output> Steps(const testing::SyntheticPrompt& prompt, StepMode mode) {
    std::vector<Output> out;
    StepPolicy policy;
    policy.mode = mode;
    policy.k = 40;
    auto session = Attach(prompt, policy);
    if (!session) return out;
    testing::Random random(3);
    for (uint32_t layer = 0; layer < spec_.geometry.n_layers; ++layer) {
      std::vector<float> q(size_t{spec_.geometry.n_q_heads} * spec_.geometry.key_dim);
      for (float& x : q) x = random.Normal();
      out.push_back(Step(*session, layer, q));
    }
    return out;
  }
  uint64_t Files() const {
    uint64_t n = 0;
    for (const auto& file : fs::directory_iterator(options_.dir / "segments")) {
      n += file.is_regular_file() ? 1 : 0;
    }
    return n;
  }
};

TEST_F(EncryptedRuntimeTest, APromptIsEncryptedWithAllThatIsMadeOfIt) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 700, 21);
  const std::string id = PutReady(prompt);
  ASSERT_OK(store_->WaitRewritten(nullptr));
  const auto clear = Steps(prompt, StepMode::kRetrieve), exact = Steps(prompt, StepMode::kFull);
  EXPECT_CODE(store_->Rewrite(id, RewriteKind::kEncrypt, {}), Code::kFailedPrecondition);

  const fs::path file = dir_ / "store.key";
  const auto key = storage::MakeKeyFile(file);
  ASSERT_OK(key);
  options_.encryption_key_file = file;
  Open();
  const auto encrypted = store_->Rewrite(id, RewriteKind::kEncrypt, {});
  ASSERT_OK(encrypted);
  EXPECT_EQ(encrypted->rewritten, 1u);
  EXPECT_TRUE(encrypted->left.empty());
  EXPECT_GT(Files(), 3u);
  EXPECT_EQ(storage::KeysInUse(options_.dir).value(),
            (std::map<storage::KeyId, uint64_t>{{*key, Files()}}));
  ExpectSame(clear, Steps(prompt, StepMode::kRetrieve));
  ExpectSame(exact, Steps(prompt, StepMode::kFull));
  EXPECT_EQ(store_->Rewrite(id, RewriteKind::kEncrypt, {})->rewritten, 0u);

  // What is put, ingested and rewritten from now on is encrypted from the beginning.
  const auto other = MakePrompt(spec_.geometry, 500, 22);
  PutReady(other);
  ASSERT_OK(store_->WaitRewritten(nullptr));
  EXPECT_EQ(storage::KeysInUse(options_.dir)->at(*key), Files());
  options_.encryption_key_file.clear();
  store_.reset();
  EXPECT_CODE(LocalStore::Open(options_), Code::kFailedPrecondition);
}

}  // namespace
}  // namespace prefixd
