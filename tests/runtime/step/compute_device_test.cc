// Tests a store that computes on a real CUDA device. Skipped, saying why, where there is none.
#include <vector>

#include "prefixd/gpu/device.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class ComputeDeviceTest : public RuntimeTest {};

TEST_F(ComputeDeviceTest, AnswersWhatTheCpuAnswers) {
  const auto device = gpu::ProbeDevice();
  if (!device.ok()) GTEST_SKIP() << "skipped: no CUDA device (" << device.error().message << ")";
  const uint64_t seed = Seed("ComputeDevice.AnswersWhatTheCpuAnswers");
  options_.phi_features = "log8";
  AddMaps(2048, seed);
  const auto prompt = MakePrompt(spec_.geometry, 3000, seed);
  std::vector<std::vector<Output>> by(2);
  for (const char* compute : {"cuda", "auto", "cpu"}) {
    options_.compute = compute;
    Open();
    ASSERT_NE(PutReady(prompt), "");
    const bool cuda = compute == std::string("cuda");
    const std::string name = compute == std::string("cpu") ? "cpu"
                             : cuda                        ? "cuda: " + device->name
                                    : "cpu, questions on cuda: " + device->name;
    EXPECT_EQ(store_->Stats().value().compute, name);
    for (const EstimatorKind estimator :
         {EstimatorKind::kNone, EstimatorKind::kMoment, EstimatorKind::kPhi}) {
      StepPolicy policy;
      policy.estimator = estimator;
      policy.k = 100;
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      for (uint32_t token = 2990; token < 3000; ++token) {
        by[cuda].push_back(Step(*session, 1, prompt.Q(1, token, 1)));
      }
    }
    const auto session = Attach(prompt, {});
    ASSERT_TRUE(session);
    ExpectSuffix(*session, prompt, 1, 900, 5);  // on the CPU
    ExpectSuffix(*session, prompt, 1, 900, 300, 3);
  }
  ASSERT_EQ(by[0].size(), 2 * by[1].size());  // auto's and the CPU's
  for (size_t i = 0; i < by[1].size(); ++i) {
    for (size_t e = 0; e < by[0][i].y.size(); ++e) {
      EXPECT_NEAR(by[0][i].y[e], by[1][i].y[e], 2e-3) << "step " << i << ", element " << e;
    }
    for (size_t h = 0; h < by[0][i].lse.size(); ++h) {
      EXPECT_NEAR(by[0][i].lse[h], by[1][i].lse[h], 2e-3) << "step " << i << ", head " << h;
    }
  }
}

}  // namespace
}  // namespace prefixd::testing
