// A store that computes on a CUDA device, emulated: it answers what the CPU answers, and goes on
// when the device is lost.
#include <cmath>
#include <vector>

#include "attention/reference.h"
#include "tests/gpu/emulated_cuda.h"
#include "tests/gpu/emulated_device.h"
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

  // Exact attention of n tokens from `first` on, compared with float64.
  void ExpectSuffix(Session& session, const SyntheticPrompt& prompt, uint32_t first, uint32_t n) {
    const KvGeometry& g = spec_.geometry;
    const auto q = prompt.Q(1, first, n);
    std::vector<float> y(n * g.n_q_heads * g.value_dim), lse(n * g.n_q_heads);
    ASSERT_OK(session.AttendExact(1, n, q, y, lse));
    for (uint32_t h = 0; h < g.n_q_heads; ++h) {
      const auto rows = prompt.Rows(1, h / g.group_size());
      for (uint32_t t = h % 3; t < n; t += 3) {
        const size_t at = t * g.n_q_heads + h;
        const auto want =
            reference::ExactAttention(q.subspan(at * g.key_dim, g.key_dim), 1, g.layers[1],
                                      {rows.data(), prompt.n_tokens, g.row().bytes(), g.row()});
        EXPECT_NEAR(lse[at], want.lse[0], 1e-5 * (1 + std::abs(want.lse[0])));
        for (uint32_t i = 0; i < g.value_dim; ++i) {
          EXPECT_NEAR(y[at * g.value_dim + i], want.y[i], 1e-5 * want.abs_y[i] + 1e-7);
        }
      }
    }
  }
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
    EXPECT_EQ(store_->stats().compute, cuda ? "cuda: an emulated device" : "cpu");
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
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 2150, seed);  // more than one run
  ASSERT_NE(Put(prompt), "");
  const auto session = Attach(prompt, {});
  ASSERT_TRUE(session);
  const uint64_t before = KernelsRun();
  ExpectSuffix(*session, prompt, 900, 5);  // few: not worth the copy of the rows
  EXPECT_EQ(KernelsRun(), before);
  ExpectSuffix(*session, prompt, 900, 37);
  EXPECT_GT(KernelsRun(), before);
  // What is wrong is said as the CPU says it.
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
  ExpectSuffix(*session, prompt, 100, 40);
  const uint64_t before = KernelsRun();
  FailWith(cudaErrorIllegalAddress);
  ExpectSuffix(*session, prompt, 100, 40);
  FailWith(cudaSuccess);
  ExpectSuffix(*session, prompt, 100, 40);
  EXPECT_EQ(KernelsRun(), before);  // what failed once is not asked again
}

}  // namespace
}  // namespace prefixd::testing
