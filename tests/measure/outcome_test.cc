// Tests what break-even and capacity conclude of times that are given: what a device is compared
// with, and what the page shows of it; what hits of different lengths save.
#include "measure/break_even/outcome.h"

#include "measure/break_even/run.h"
#include "measure/capacity/run.h"
#include "measure/page/text.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

Spread Ms(double ms) { return {ms, ms, ms}; }

TierOutcome Tier(const std::string& name, bool host, const std::string& compute, double load) {
  TierOutcome tier;
  tier.name = name;
  tier.host = host;
  tier.compute = compute;
  for (const uint32_t gamma : {1u, 2u, 10u}) {
    tier.topk.push_back(
        {gamma, gamma * 164, {Ms(1), Ms(load * gamma), Ms(gamma), Ms(1 + gamma + load * gamma)}});
  }
  tier.completion.push_back({"moment", {Ms(1), Ms(load), Ms(1.5), Ms(2.5 + load)}, Ms(0.5), 20});
  tier.completed = tier.selected = {5, 4};
  tier.restore_ms = Ms(100);
  tier.full_ms = Ms(compute == "cpu" ? 50 : 7);
  return tier;
}

BreakEvenOutcome OnBoth() {
  BreakEvenOutcome outcome;
  outcome.model = *ModelShapeOf("Llama-3.2-1B");
  outcome.gemm_flops = 1e11;
  LengthOutcome& length = outcome.lengths.emplace_back();
  length.tokens = 16384;
  length.k_phi = 164;
  length.layers = 2;
  length.tiers = {Tier("rows in host memory", true, "cpu", 2),
                  Tier("rows on the SSD", false, "cpu", 10),
                  Tier("rows in host memory, steps on CUDA", true, "cuda", 1),
                  Tier("rows on the SSD, steps on CUDA", false, "cuda", 20)};
  return outcome;
}

const Way* Named(const std::vector<Way>& ways, const std::string& start) {
  for (const Way& way : ways) {
    if (way.name.rfind(start, 0) == 0) return &way;
  }
  return nullptr;
}

size_t Count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(OutcomeTest, EachBackendCountsFromItsOwnMemory) {
  const BreakEvenOutcome outcome = OnBoth();
  const LengthOutcome& length = outcome.lengths[0];
  EXPECT_DOUBLE_EQ(XiOf(length, length.tiers[1]), 5);
  EXPECT_DOUBLE_EQ(XiOf(length, length.tiers[2]), 1);
  EXPECT_DOUBLE_EQ(XiOf(length, length.tiers[3]), 20);
  const auto backends = ByBackend(length);
  ASSERT_EQ(backends.size(), 2u);
  EXPECT_EQ(backends[1].front(), &length.tiers[2]);
  EXPECT_EQ(backends[1].back(), &length.tiers[3]);
  const std::string page = BreakEvenPage(outcome, {}).Html();
  // Without and with selection; a map has the marks of its own backend.
  EXPECT_EQ(Count(page, "<h3>Trade-off map, 16,384 tokens, steps on the CPU"), 2u);
  EXPECT_EQ(Count(page, "<h3>Trade-off map, 16,384 tokens, steps on the CUDA device"), 2u);
  EXPECT_EQ(Count(page, "attention of a whole answer, on the CPU"), 1u);
  EXPECT_EQ(Count(page, "attention of a whole answer, on the CUDA device"), 1u);
}

TEST(OutcomeTest, ADeviceIsNotComparedWithTheProcessorsWork) {
  BreakEvenOutcome outcome = OnBoth();
  const LengthOutcome& length = outcome.lengths[0];
  for (const TierOutcome& tier : length.tiers) {
    const bool cpu = tier.compute == "cpu";
    const auto ways = WaysOf(outcome, length, tier);
    ASSERT_NE(Named(ways, "restore"), nullptr);
    EXPECT_DOUBLE_EQ(Named(ways, "restore")->token_ms, cpu ? 50 : 7);
    EXPECT_EQ(Named(ways, "compute") != nullptr, cpu) << tier.name;
  }
  size_t compared = 0;
  for (const std::string& sentence : BreakEvenVerdict(outcome)) {
    EXPECT_EQ(sentence.find("this machine's rate"), std::string::npos) << sentence;
    compared += sentence.find("this processor's rate") != std::string::npos;
  }
  EXPECT_EQ(compared, 2u);
  outcome.prefill_tokens_per_second = 5000;  // what is given holds for all
  for (const TierOutcome& tier : length.tiers) {
    EXPECT_NE(Named(WaysOf(outcome, length, tier), "compute"), nullptr);
  }
}

TEST(OutcomeTest, WhatWasNotMeasuredIsNotSaid) {
  BreakEvenOutcome outcome = OnBoth();
  LengthOutcome& length = outcome.lengths[0];
  length.tiers.erase(length.tiers.begin() + 2);  // no rows in memory for the device
  length.tiers.back().full_ms = {};
  EXPECT_EQ(XiOf(length, length.tiers.back()), 0);
  EXPECT_EQ(ByBackend(length).size(), 1u);
  EXPECT_EQ(Named(WaysOf(outcome, length, length.tiers.back()), "restore"), nullptr);
  for (const auto& [title, table] : BreakEvenTables(outcome)) EXPECT_GT(table.size(), 1u) << title;
  EXPECT_EQ(BreakEvenPage(outcome, {}).Html().find("nan"), std::string::npos);
  // Rows in files that no disk holds.
  outcome.medium = {false, "a file in the page cache", "No disk was measured."};
  EXPECT_EQ(BreakEvenVerdict(outcome).front(), "No disk was measured.");
  EXPECT_EQ(OutcomeJson(outcome)["on_disk"], false);
}

// A short hit and a long one: attention makes the long one save more for each token than two of the
// mean length would. What is saved and what puts take are of all tokens.
TEST(OutcomeTest, WhatHitsSaveIsCountedAtTheirOwnLengths) {
  CapacityOutcome o;
  o.what.model = *ModelShapeOf("Llama-3.1-8B");
  o.what.disk_bytes = o.what.memory_bytes = 1e12;
  o.stored_per_row_byte = o.written_per_row_byte = 1;
  o.put_rate = 1e9, o.ssd_rate = 2e9, o.host_rate = 1e10;
  o.ingest_seconds_per_byte = 1e-9, o.recluster_seconds_per_byte = 2e-9;
  o.gemm_flops = 1e13;
  CacheHits& h = o.disk;
  h.requests = 4, h.requests_hit = 2;
  h.input_tokens = 300'000, h.stored_tokens = 150'000;
  for (const uint64_t tokens : {1000u, 128'000u}) h.Hit(tokens);
  o.endless = o.memory = h;
  for (const double bytes : {1e9, 1e12}) {
    o.curve.push_back({bytes, std::vector<CacheHits>(std::size(kPolicies), h)});
  }
  const auto saves = [&](double n) { return o.PrefillSeconds(n) - o.SsdSeconds(n); };
  const double saved = saves(1000) + saves(128'000);
  EXPECT_GT(saved, 1.2 * 2 * saves(64'500));
  const auto contains = [](const Report& report, const std::string& part) {
    for (const std::string& sentence : report.verdict) {
      if (sentence.find(part) != std::string::npos) return true;
    }
    return false;
  };
  const Report report = CapacityReport(o, {});
  EXPECT_NEAR(report.figures["replay"]["saved_seconds"].get<double>() / saved, 1, 1e-9);
  EXPECT_TRUE(contains(report, Short(saved / o.PutSeconds(150'000)) + " times what the puts take"));
  EXPECT_TRUE(contains(report, Short(saved / o.StoreSeconds(150'000)) + " times with the back"));
  // An engine's own rate is the same at all lengths.
  o.what.options.prefill_rate = 9000;
  EXPECT_NEAR(
      CapacityReport(o, {}).figures["replay"]["saved_seconds"].get<double>() / (2 * saves(64'500)),
      1, 1e-9);
}

}  // namespace
}  // namespace prefixd::bench
