// Tests what GroupStep refuses, and that its message names the wrong input.
#include <cmath>
#include <string>

#include "attention/step/step.h"
#include "tests/attention/step_checks.h"
#include "tests/attention/step_fixture.h"
#include "tests/support/infinity.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::BuildAll;
using testing::ExpectMatches;
using testing::kAll;
using testing::OwnedRows;
using testing::Random;
using testing::RandomCase;
using testing::StepCase;
using testing::StepOutput;

using testing::kInf;

void ExpectRefused(const StepCase& c, const GroupStepInput& in, const std::string& part) {
  StepOutput out = c.Buffers();
  const Status status = GroupStep(in, out.spans());
  ASSERT_FALSE(status.ok()) << part;
  EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  EXPECT_NE(status.error().message.find(part), std::string::npos) << status.error().message;
}

TEST(GroupStepRefuses, NonFiniteInputsNamingTensorAndRow) {
  Random random(testing::Seed("GroupStepRefuses.NonFinite"));
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    for (float bad : {kInf, -kInf, std::nanf("")}) {
      StepCase c = RandomCase(random, 100, {37, 19, dtype}, {}, 3, 1);
      c.Retrieve(testing::RandomSubset(random, 4, 84, 30));
      BuildAll(c, random);
      for (EstimatorKind kind : kAll) {
        StepCase broken = c;
        broken.queries[37 + 2] = bad;
        ExpectRefused(broken, broken.Input(kind), "query head 1");
        const auto damage = [&](OwnedRows& rows, size_t row, bool in_key) {
          std::vector<float> key = rows.Key(row), value = rows.Value(row);
          (in_key ? key : value)[in_key ? 36 : 18] = bad;
          rows.Set(row, key, value);
        };
        for (bool in_key : {true, false}) {
          const std::string part = in_key ? " key: row " : " value: row ";
          broken = c;
          damage(broken.retrieved, 29, in_key);
          ExpectRefused(broken, broken.Input(kind), "retrieved" + part + "29");
          broken = c;
          damage(broken.rows, 3, in_key);
          ExpectRefused(broken, broken.Input(kind), "sinks" + part + "3");
          broken = c;
          damage(broken.rows, 84, in_key);
          ExpectRefused(broken, broken.Input(kind), "tail" + part + "0");
        }
      }
    }
  }
}

TEST(GroupStepRefuses, WhatDoesNotFit) {
  Random random(testing::Seed("GroupStepRefuses.Shapes"));
  StepCase c = RandomCase(random, 100, {16, 8, DType::kBf16}, {}, 4, 1);
  BuildAll(c, random);
  c.RetrieveTop(10);
  GroupStepInput in = c.Input(EstimatorKind::kMoment);
  in.layer.softcap = 30;
  ExpectRefused(c, in, "softcap");
  in = c.Input(EstimatorKind::kMoment);
  in.estimator = EstimatorKind::kAuto;
  ExpectRefused(c, in, "auto");
  in = c.Input(EstimatorKind::kMoment);
  in.moment = nullptr;
  ExpectRefused(c, in, "needs a moment summary");
  in = c.Input(EstimatorKind::kMoment);
  const std::vector<float> scores(39);
  in.retrieved_scores = scores;
  ExpectRefused(c, in, "retrieved_scores");
  in = c.Input(EstimatorKind::kMoment);
  in.mid_count = 79;
  ExpectRefused(c, in, "80 tokens");
  in = c.Input(EstimatorKind::kMoment);
  in.mid_count = 5;
  ExpectRefused(c, in, "10 retrieved rows");
  in = c.Input(EstimatorKind::kPhi);
  in.phi_k = nullptr;
  ExpectRefused(c, in, "phi_k");
  in = c.Input(EstimatorKind::kPhi);
  in.moment = nullptr;
  in.mid_count = 79;
  ExpectRefused(c, in, "phi cache is of 80");
  in = c.Input(EstimatorKind::kNone);
  in.cuts = in.cuts.first(3);
  ExpectRefused(c, in, "cuts");
  in = c.Input(EstimatorKind::kNone);
  in.queries = in.queries.first(63);
  ExpectRefused(c, in, "queries");
  in = c.Input(EstimatorKind::kNone);
  in.queries = in.queries.first(32);
  ExpectRefused(c, in, "16+8");
  const std::vector<Cut> nan_cuts(4, {std::nanf(""), CutKind::kExact});
  in = c.Input(EstimatorKind::kMoment);
  in.cuts = nan_cuts;
  ExpectRefused(c, in, "cut");
  OwnedRows other = testing::RandomRows(random, {16, 8, DType::kF32}, 2);
  in = c.Input(EstimatorKind::kNone);
  in.tail = other.view();
  ExpectRefused(c, in, "dtype");
  // With a softcap, selection only is fine, and matches.
  c.layer.softcap = 5;
  ExpectMatches(c, EstimatorKind::kNone, nullptr);
}

}  // namespace
}  // namespace prefixd
