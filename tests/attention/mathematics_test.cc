// Tests the worked example of docs/mathematics.md: reads its table from the page and computes it
// anew.
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "tests/attention/step_fixture.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::StepCase;
using testing::StepOutput;

// Returns name -> value from the table that follows the marker.
std::map<std::string, double> ReadExample() {
  std::ifstream page(std::string(PREFIXD_SOURCE_DIR) + "/docs/mathematics.md");
  std::map<std::string, double> values;
  std::string line;
  bool inside = false;
  while (std::getline(page, line)) {
    if (line == "<!-- example -->") inside = true;
    if (!inside || line.size() < 5 || line[0] != '|' || line[1] == '-') continue;
    const size_t name_end = line.find(" |", 2), value_begin = line.rfind("| ", line.size() - 3);
    values[line.substr(2, name_end - 2)] = std::atof(line.c_str() + value_begin + 2);
  }
  return values;
}

FeatureMap Identity() {
  FeatureMap map;
  map.in_dim = map.d_emb = map.d_phi = 2;
  map.w_in = map.w_out = {1, 0, 0, 1};
  map.b_in = map.b1 = map.b2 = map.b_out = {0, 0};
  map.w1 = map.w2 = {0, 0, 0, 0};
  return map;
}

TEST(Mathematics, TheWorkedExampleIsWhatTheLibraryComputes) {
  const float keys[6][2] = {{0, 1}, {2, 0}, {0, 1}, {-1, 0}, {0, -1}, {1, 0}};
  const float values[6] = {2, 1, 3, 5, -1, 4};
  OwnedRows rows({2, 1, DType::kF32}, 6);
  for (size_t i = 0; i < 6; ++i) rows.Set(i, keys[i], std::span(&values[i], 1));
  StepCase c(std::move(rows), {1, 1}, 1, {1, 0}, 1);
  c.Retrieve({1});
  c.BuildMoment(false);
  const MomentSummary moment = c.moment;
  c.moment = MomentSummary();
  c.phi_k = Identity();
  c.phi_q = {Identity()};
  c.phi = PhiCache(2, 1);
  c.phi.Add(c.Mid(), c.phi_k);

  std::map<std::string, double> got;
  StepOutput out = c.Buffers();
  ASSERT_TRUE(ExactAttention(c.queries, 1, c.layer, c.rows.view(), out.y, out.lse).ok());
  got["full lse"] = out.lse[0];
  got["full y"] = out.y[0];
  ASSERT_TRUE(GroupStep(c.Input(EstimatorKind::kNone), out.spans()).ok());
  got["selection lse"] = out.lse[0];
  got["selection y"] = out.y[0];
  for (int f = 0; f < 2; ++f) {
    got["m " + std::to_string(f)] = c.phi.m()[f];
    got["u " + std::to_string(f)] = c.phi.u()[f];
    got["T " + std::to_string(f)] = c.phi.t()[f];
  }
  std::vector<float> log_z(1), y(1);
  const auto estimate = [&](EstimatorKind kind) {
    ASSERT_TRUE(EstimateRemainder(c.Input(kind), log_z, y).ok());
    ASSERT_TRUE(GroupStep(c.Input(kind), out.spans()).ok());
  };
  estimate(EstimatorKind::kPhi);
  got["log Z_R phi"] = log_z[0];
  got["y_R phi"] = y[0];
  got["step lse phi"] = out.lse[0];
  got["step y phi"] = out.y[0];
  got["rho phi"] = out.rho_z[0];
  c.cuts = {{0, CutKind::kExact}};
  estimate(EstimatorKind::kPhi);
  got["clamped log Z_R phi"] = log_z[0];
  got["clamped step y phi"] = out.y[0];
  c.moment = moment;
  estimate(EstimatorKind::kMoment);
  got["log Z_R moment"] = log_z[0];
  got["step y moment"] = out.y[0];

  const std::map<std::string, double> page = ReadExample();
  for (const auto& [name, value] : got) {
    ASSERT_TRUE(page.count(name)) << "the page does not show '" << name << "'";
    EXPECT_NEAR(page.at(name), value, 2e-6) << name;
  }
  EXPECT_EQ(page.size(), got.size() + 1) << "beside the table's heading, the page shows no more";
}

}  // namespace
}  // namespace prefixd
