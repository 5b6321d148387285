// Tests the reader of request logs: what it takes, and that a bad line is named with what is wrong.
#include "measure/capacity/request_log.h"

#include <sstream>

#include "tests/support/files.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

Result<RequestLog> Read(const std::string& text, uint32_t block_tokens = 512) {
  std::istringstream in(text);
  return ReadRequestLog(in, "log", block_tokens);
}

constexpr const char* kGood =
    R"({"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]})";

TEST(RequestLogTest, ReadsRequests) {
  const auto log = Read(std::string(kGood) + "\n\n" +
                        R"({"timestamp": 2500.5, "input_length": 512, "output_length": 0,)" +
                        R"( "hash_ids": [7], "more": true})" + "\r\n");
  ASSERT_TRUE(log.ok()) << log.error().message;
  ASSERT_EQ(log->requests.size(), 2u);
  EXPECT_EQ(log->requests[0].blocks, (std::vector<uint64_t>{7, 8}));
  EXPECT_EQ(log->requests[0].seconds, 0);
  EXPECT_DOUBLE_EQ(log->seconds(), 1.5005);
  EXPECT_EQ(log->input_tokens(), 1512u);
}

TEST(RequestLogTest, NamesTheLineAndWhatIsWrong) {
  for (const auto& [line, named] : {
           std::pair{"{", "JSON object"},
           {"[1]", "JSON object"},
           {R"({"input_length": 1, "output_length": 1, "hash_ids": [1]})", "timestamp"},
           {R"({"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
            "timestamp"},
           {R"({"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": [1]})",
            "timestamp"},
           {R"({"timestamp": 2000, "output_length": 1, "hash_ids": [1]})", "input_length"},
           {R"({"timestamp": 2000, "input_length": 1.5, "output_length": 1, "hash_ids": [1]})",
            "input_length"},
           {R"({"timestamp": 2000, "input_length": -4, "output_length": 1, "hash_ids": [1]})",
            "input_length"},
           {R"({"timestamp": 2000, "input_length": 1, "hash_ids": [1]})", "output_length"},
           {R"({"timestamp": 2000, "input_length": 1, "output_length": 1})", "hash_ids"},
           {R"({"timestamp": 2000, "input_length": 1, "output_length": 1, "hash_ids": 1})",
            "hash_ids"},
           {R"({"timestamp": 2000, "input_length": 1, "output_length": 1, "hash_ids": ["a"]})",
            "hash_ids"},
           {R"({"timestamp": 2000, "input_length": 5000, "output_length": 1, "hash_ids": [1]})",
            "--block-tokens"},
           {R"({"timestamp": 1e300, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
            "timestamp"},
           {R"({"timestamp": 2000, "input_length": 0, "output_length": 1, "hash_ids": []})",
            "input_length"},
           // Ids that stand for blocks alone: 8 behind another one, as the first, and twice.
           {R"({"timestamp": 2000, "input_length": 900, "output_length": 1, "hash_ids": [9, 8]})",
            "hash_id 8 follows 9 here, and follows 7 in line 1"},
           {R"({"timestamp": 2000, "input_length": 400, "output_length": 1, "hash_ids": [8]})",
            "hash_id 8 begins a prompt here, and follows 7 in line 1"},
           {R"({"timestamp": 2000, "input_length": 900, "output_length": 1, "hash_ids": [5, 5]})",
            "hash_id 5 follows 5 here, and begins a prompt in line 2"},
           {R"({"timestamp": 999, "input_length": 1, "output_length": 1, "hash_ids": [1]})",
            "sort the log"},
       }) {
    const auto log = Read(std::string(kGood) + "\n" + line + "\n" + kGood);
    ASSERT_FALSE(log.ok()) << line;
    EXPECT_EQ(log.error().code, Code::kInvalidArgument);
    EXPECT_EQ(log.error().message.rfind("log:2: ", 0), 0u) << log.error().message;
    EXPECT_NE(log.error().message.find(named), std::string::npos) << log.error().message;
  }
  EXPECT_NE(Read("").error().message.find("no request"), std::string::npos);
  EXPECT_EQ(ReadRequestLog(std::filesystem::path("/nonexistent"), 512).error().code,
            Code::kNotFound);
}

TEST(RequestLogTest, BlocksMayHaveAnotherLength) {
  EXPECT_FALSE(Read(kGood, 16).ok());
  EXPECT_TRUE(Read(kGood, 600).ok());
}

TEST(ZipfTest, FollowsItsLaw) {
  ZipfSpec spec;
  spec.documents = 100;
  spec.requests = 20000;
  const RequestLog log = ZipfRequests(spec, 512);
  ASSERT_EQ(log.requests.size(), 20000u);
  std::vector<double> counts(100);
  double before = 0;
  for (const Request& r : log.requests) {
    EXPECT_GE(r.seconds, before);
    before = r.seconds;
    EXPECT_EQ(r.blocks.size(), (r.input_tokens + 511) / 512);
    ++counts[r.blocks[0] >> 24];
  }
  EXPECT_NEAR(counts[0] / counts[9], 10, 2.5);  // 1 / i
  EXPECT_NEAR(log.seconds() / 20000, 1, 0.05);
}

}  // namespace
}  // namespace prefixd::bench
