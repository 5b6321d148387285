#include "demo/document.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::demo {
namespace {

class TempFile {
 public:
  explicit TempFile(const std::string& contents)
      : path_(std::filesystem::temp_directory_path() /
              ("prefixd-document-" + std::to_string(getpid()) + "-" +
               std::to_string(std::random_device{}()))) {
    std::ofstream(path_, std::ios::binary) << contents;
  }
  ~TempFile() { std::filesystem::remove(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::string Lines(size_t bytes) {
  std::string text;
  for (int i = 0; text.size() < bytes; ++i) {
    text += "Line " + std::to_string(i) + " of a plain document.\n";
  }
  return text;
}

TEST(Document, PlantsEveryFactOnceOnALineOfItsOwn) {
  const uint64_t seed = testing::Seed("PlantsEveryFactOnceOnALineOfItsOwn");
  std::mt19937_64 rng(seed);
  for (int round = 0; round < 50; ++round) {
    const TempFile file(Lines(2000 + rng() % 6000));
    DocumentOptions options;
    options.file = file.path();
    options.prompt_tokens = 1500 + rng() % 3000;
    options.facts = 1 + rng() % 16;
    options.continuation_tokens = 1 + rng() % 100;
    options.seed = rng();
    Result<Document> document = LoadDocument(options);
    ASSERT_TRUE(document.ok()) << document.error().ToString();
    EXPECT_LE(document->prompt.size(), options.prompt_tokens);
    EXPECT_EQ(document->continuation.size(), options.continuation_tokens);
    ASSERT_EQ(document->facts.size(), options.facts);
    for (const Fact& fact : document->facts) {
      const std::string line = "\n" + fact.Line();
      EXPECT_EQ(document->prompt.find(fact.Line()), fact.position);
      EXPECT_EQ(document->prompt.find(line), fact.position - 1);
      EXPECT_EQ(document->prompt.find(fact.word), document->prompt.rfind(fact.word));
      EXPECT_EQ(document->continuation.find(fact.word), std::string::npos);
    }
  }
}

TEST(Document, WithoutItsFactsThePromptAndContinuationAreTheFile) {
  const std::string text = Lines(6000);
  const TempFile file(text);
  DocumentOptions options;
  options.file = file.path();
  options.prompt_tokens = 3000;
  Result<Document> document = LoadDocument(options);
  ASSERT_TRUE(document.ok()) << document.error().ToString();
  std::string prompt = document->prompt;
  for (auto fact = document->facts.rbegin(); fact != document->facts.rend(); ++fact) {
    prompt.erase(fact->position, fact->Line().size());
  }
  EXPECT_EQ(text.substr(0, prompt.size()), prompt);
  EXPECT_EQ(text.substr(prompt.size(), options.continuation_tokens), document->continuation);
}

TEST(Document, CutsBetweenCharacters) {
  std::string text;
  while (text.size() < 9000) text += "漢字かな交じり文\n";
  const TempFile file(text);
  DocumentOptions options;
  options.file = file.path();
  options.facts = 2;
  for (uint32_t i = 0; i < 6; ++i) {  // every way to cut a three-byte character
    options.prompt_tokens = 3000 + i;
    options.continuation_tokens = 100 + i / 2;
    Result<Document> document = LoadDocument(options);
    ASSERT_TRUE(document.ok()) << document.error().ToString();
    EXPECT_TRUE(CheckUtf8(document->prompt).ok());
    EXPECT_TRUE(CheckUtf8(document->continuation).ok());
    EXPECT_FALSE(document->continuation.empty());
  }
}

TEST(Document, RefusesWhatItCannotUse) {
  DocumentOptions options;
  options.file = "/nonexistent/document.txt";
  EXPECT_EQ(LoadDocument(options).error().code, Code::kNotFound);

  options.file = std::filesystem::temp_directory_path();
  EXPECT_EQ(LoadDocument(options).error().code, Code::kInvalidArgument);

  const TempFile latin1(Lines(20000) + "caf\xE9 \n" + Lines(100));
  options.file = latin1.path();
  const Error not_utf8 = LoadDocument(options).error();
  EXPECT_EQ(not_utf8.code, Code::kInvalidArgument);
  EXPECT_NE(not_utf8.message.find("not UTF-8"), std::string::npos) << not_utf8.message;

  const TempFile small("too short\n");
  options.file = small.path();
  EXPECT_EQ(LoadDocument(options).error().code, Code::kInvalidArgument);
}

TEST(CheckUtf8, AcceptsAndRefuses) {
  EXPECT_TRUE(CheckUtf8("").ok());
  EXPECT_TRUE(CheckUtf8("plain").ok());
  EXPECT_TRUE(CheckUtf8("naïve φ 漢字 🙂").ok());
  EXPECT_FALSE(CheckUtf8("\x80").ok());              // continuation byte alone
  EXPECT_FALSE(CheckUtf8("\xC3").ok());              // cut short
  EXPECT_FALSE(CheckUtf8("\xC0\xAF").ok());          // overlong
  EXPECT_FALSE(CheckUtf8("\xED\xA0\x80").ok());      // surrogate
  EXPECT_FALSE(CheckUtf8("\xF4\x90\x80\x80").ok());  // beyond U+10FFFF
}

}  // namespace
}  // namespace prefixd::demo
