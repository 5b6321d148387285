// Tests a store that computes on an emulated CUDA device: it answers what the CPU answers, and
// continues when the device is lost.
#include <vector>

#include "tests/gpu/emulated/emulated_cuda.h"
#include "tests/gpu/emulated/emulated_device.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

using gpu::emulated::FailWith;
using gpu::emulated::KernelsRun;

class ComputeCudaTest : public RuntimeTest {
 protected:
  ComputeCudaTest() {
    options_.compute = "cuda";
    options_.phi_features = "log8";
  }
  ~ComputeCudaTest() override { FailWith(cudaSuccess); }
};

TEST_F(ComputeCudaTest, StepsAgreeWithTheCpus) {
  const uint64_t seed = Seed("StepsAgreeWithTheCpus");
  gpu::emulated::SetSeed(seed);
  AddMaps(2048, seed);
  const auto prompt = MakePrompt(spec_.geometry, 500, seed);
  const auto q = prompt.Q(1, 499, 1);
  std::vector<std::vector<Output>> by(2);
  for (const char* compute : {"cuda", "cpu"}) {
    options_.compute = compute;
    Open();
    ASSERT_NE(PutReady(prompt), "");
    const bool cuda = compute == std::string("cuda");
    EXPECT_EQ(store_->Stats().value().compute, cuda ? "cuda: an emulated device" : "cpu");
    const uint64_t before = KernelsRun();
    for (const EstimatorKind estimator :
         {EstimatorKind::kNone, EstimatorKind::kMoment, EstimatorKind::kPhi}) {
      StepPolicy policy;
      policy.estimator = estimator;
      policy.k = 30;
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      by[cuda].push_back(Step(*session, 1, q));
    }
    EXPECT_EQ(KernelsRun() > before, cuda);
  }
  for (size_t i = 0; i < by[0].size(); ++i) {
    for (size_t e = 0; e < by[0][i].y.size(); ++e) {
      EXPECT_NEAR(by[0][i].y[e], by[1][i].y[e], 2e-3) << "estimator " << i << ", element " << e;
    }
    for (size_t h = 0; h < by[0][i].lse.size(); ++h) {
      EXPECT_NEAR(by[0][i].lse[h], by[1][i].lse[h], 2e-3) << "estimator " << i << ", head " << h;
    }
  }
}

TEST_F(ComputeCudaTest, SuffixQueriesAttendExactly) {
  const uint64_t seed = Seed("ComputeCuda.SuffixQueriesAttendExactly");
  gpu::emulated::SetSeed(seed);
  options_.recluster_min_tokens = 100;
  options_.recluster_chunk_tokens = 512;  // each chunk is a run
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 2150, seed);
  ASSERT_NE(Put(prompt), "");
  ASSERT_OK(store_->WaitRewritten(nullptr));
  const auto session = Attach(prompt, {});
  ASSERT_TRUE(session);
  const uint64_t before = KernelsRun();
  ExpectSuffix(*session, prompt, 1, 900, 5);  // few queries are not worth the copy of the rows
  EXPECT_EQ(KernelsRun(), before);
  ExpectSuffix(*session, prompt, 1, 900, 37, 3);
  EXPECT_GT(KernelsRun(), before);
  // Errors read like the CPU's.
  const KvGeometry& g = spec_.geometry;
  std::vector<float> q(37 * g.n_q_heads * g.key_dim, 1e38f);
  std::vector<float> y(37 * g.n_q_heads * g.value_dim), lse(37 * g.n_q_heads);
  const Status status = session->AttendExact(1, 37, q, y, lse);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kInvalidArgument);
}

TEST_F(ComputeCudaTest, ALostDeviceIsNoLostStep) {
  const uint64_t seed = Seed("ALostDeviceIsNoLostStep");
  gpu::emulated::SetSeed(seed);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 300, seed);
  ASSERT_NE(Put(prompt), "");
  StepPolicy policy;
  policy.k = 10;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  ExpectSuffix(*session, prompt, 1, 100, 40, 3);
  const uint64_t before = KernelsRun();
  FailWith(cudaErrorIllegalAddress);
  ExpectSuffix(*session, prompt, 1, 100, 40, 3);
  FailWith(cudaSuccess);
  ExpectSuffix(*session, prompt, 1, 100, 40, 3);
  EXPECT_EQ(KernelsRun(), before);  // a failed device is not used again
}

}  // namespace
}  // namespace prefixd::testing
