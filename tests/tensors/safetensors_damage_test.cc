// Tests damaged files: opening one either fails with a one-line error or yields tensors that lie
// inside the file and can be read.
#include <random>

#include "tensors/safetensors.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::TempDir;

std::string GoodFile(const TempDir& dir) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const auto bytes = std::as_bytes(std::span(values));
  const std::vector<TensorToWrite> tensors = {
      {"weight", TensorType::kF32, {2, 3}, bytes},
      {"half", TensorType::kBf16, {3, 1, 2}, bytes.first(12)},
      {"ids", TensorType::kI64, {2}, bytes.first(16)},
  };
  EXPECT_TRUE(WriteSafetensors(dir / "good", tensors, {{"format", "pt"}}).ok());
  return testing::ReadFile(dir / "good");
}

// Returns whether the file opened.
bool CheckDamaged(const std::string& bytes) {
  const auto file = std::as_bytes(std::span(bytes));
  const auto header = ParseSafetensorsHeader(file, "damaged");
  if (!header.ok()) {
    EXPECT_EQ(header.error().code, Code::kCorrupt);
    EXPECT_EQ(header.error().message.rfind("damaged: ", 0), 0u) << header.error().message;
    EXPECT_EQ(header.error().message.find('\n'), std::string::npos) << header.error().message;
    return false;
  }
  uint64_t covered = 0;
  for (const TensorInfo& info : header->tensors) {
    EXPECT_LE(info.begin, info.end);
    EXPECT_LE(header->data_start + info.end, bytes.size());
    EXPECT_EQ((info.end - info.begin) * 8, info.elements * TensorTypeBits(info.type));
    covered += info.end - info.begin;
  }
  EXPECT_EQ(header->data_start + covered, bytes.size());
  return true;
}

TEST(SafetensorsDamage, EveryTruncationIsRefused) {
  TempDir dir;
  const std::string good = GoodFile(dir);
  ASSERT_TRUE(CheckDamaged(good));
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(CheckDamaged(good.substr(0, size))) << "cut at " << size;
  }
  EXPECT_FALSE(CheckDamaged(good + '\0'));
}

TEST(SafetensorsDamage, BitFlipsNeverEscapeTheFile) {
  TempDir dir;
  const std::string good = GoodFile(dir);
  const size_t header_end = good.rfind('}') + 1;
  const uint64_t seed = testing::Seed("BitFlipsNeverEscapeTheFile");
  std::mt19937_64 random(seed);
  int opened = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good;
    const int flips = 1 + int(random() % 4);
    for (int i = 0; i < flips; ++i) {
      bytes[random() % header_end] ^= static_cast<char>(1 << (random() % 8));
    }
    if (random() % 8 == 0) bytes.resize(random() % (bytes.size() + 1));
    (CheckDamaged(bytes) ? opened : refused)++;
    if (::testing::Test::HasFailure()) FAIL() << "seed " << seed << " round " << round;
  }
  EXPECT_GT(refused, opened);  // flips inside names are harmless
  EXPECT_GT(opened, 0);
}

TEST(SafetensorsDamage, RandomPunctuationIsRefused) {
  const uint64_t seed = testing::Seed("RandomPunctuationIsRefused");
  std::mt19937_64 random(seed);
  constexpr std::string_view kAlphabet = "{}[]\",:0123456789-.eE \\nul__metadata__dtypeshapeF32";
  for (int round = 0; round < 20000; ++round) {
    std::string text = "{";
    const size_t length = random() % 80;
    for (size_t i = 0; i < length; ++i) text += kAlphabet[random() % kAlphabet.size()];
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(text.size());
    CheckDamaged(bytes + text);
    if (::testing::Test::HasFailure()) FAIL() << "seed " << seed << " round " << round;
  }
}

// Deep nesting must not exhaust the stack or the memory.
TEST(SafetensorsDamage, DeepNestingIsRefused) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string text = "{\"a\":";
    while (text.size() < 4'000'000) text += open;
    std::string bytes(8, '\0');
    for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(text.size() >> (8 * i));
    EXPECT_FALSE(CheckDamaged(bytes + text));
  }
}

}  // namespace
}  // namespace prefixd
