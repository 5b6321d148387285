#include "runtime/retention/scorer_shelf.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/runtime/retention/scorers_file.h"
#include "tests/support/expect_ok.h"
#include "tests/support/files.h"

namespace prefixd {
namespace {

class ScorerShelfTest : public ::testing::Test {
 protected:
  ScorerShelfTest() { geometry_ = {2, 4, 2, 8, 8, DType::kF32, {{.scale = 1}, {.scale = 1}}}; }
  ModelSpec Spec(const std::string& name, const std::string& weights) const {
    return {name, geometry_, {{"weights", weights}}, {}};
  }
  void Write(const std::string& file, const std::string& weights, uint64_t seed) const {
    testing::ScorersFile scorers(geometry_, "kvpop-mlp", seed);
    scorers.metadata["weights"] = weights;
    scorers.Write(dir_.path() / file);
  }

  KvGeometry geometry_;
  testing::TempDir dir_;
  MemoryAccount account_;
};

TEST_F(ScorerShelfTest, AFolderHasAFileForEachModel) {
  std::ofstream(dir_.path() / "damaged.safetensors") << "no scorers";
  std::ofstream(dir_.path() / "readme.txt") << "what these are";
  Write("a.safetensors", "blake2b:aa", 1);
  Write("b.safetensors", "blake2b:bb", 2);
  ScorerShelf shelf(dir_.path(), account_);
  const auto a = shelf.For(Spec("first", "blake2b:aa")),
             b = shelf.For(Spec("second", "blake2b:bb"));
  ASSERT_OK(a);
  ASSERT_OK(b);
  EXPECT_EQ((*a)->heads.size(), geometry_.heads().count());
  EXPECT_NE((*a)->heads[0].mean, (*b)->heads[0].mean);
  EXPECT_EQ(*shelf.For(Spec("first", "blake2b:aa")), *a);  // in memory while it is used
  // The same name for other weights gets nothing of the first one's.
  EXPECT_EQ((*shelf.For(Spec("first", "blake2b:bb")))->heads[0].mean, (*b)->heads[0].mean);
  // Names that a user gave cannot be compared: a folder has nothing for them.
  const auto none = shelf.For(Spec("third", "mine"));
  EXPECT_CODE(none, Code::kFailedPrecondition);
  EXPECT_EQ(none.error().message.find(dir_.path().string()), std::string::npos);
}

TEST_F(ScorerShelfTest, AFileServesWhomItMay) {
  Write("a.safetensors", "blake2b:aa", 1);
  ScorerShelf shelf(dir_.path() / "a.safetensors", account_);
  EXPECT_OK(shelf.For(Spec("first", "blake2b:aa")));
  EXPECT_CODE(shelf.For(Spec("second", "blake2b:bb")), Code::kFailedPrecondition);
  for (const char* path : {"", "/nowhere/at/all"}) {
    ScorerShelf missing(path, account_);
    EXPECT_CODE(missing.For(Spec("first", "blake2b:aa")), Code::kFailedPrecondition);
  }
}

}  // namespace
}  // namespace prefixd
