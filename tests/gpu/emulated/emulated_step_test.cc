// The kernels themselves, run on emulated blocks: everywhere, without a GPU.
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "gpu/step/host_batch.h"
#include "gpu/step/step_layout.h"
#include "prefixd/gpu/phi_pack.h"
#include "tests/gpu/emulated/emulated_cuda.h"
#include "tests/gpu/emulated/fake_device.h"
#include "tests/gpu/step_cases.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::gpu {

// In emulated_kernels.cc: LogPhiTile over n vectors, tile by tile.
bool EmulatedLogPhi(const DeviceKeyMap& map, const float* x, size_t n, float* out);

namespace {

using internal::HostImage;

// Aligned memory in which everything unwritten is NaN.
class Memory {
 public:
  explicit Memory(size_t bytes) : words_(bytes / sizeof(std::max_align_t) + 1) {
    std::memset(words_.data(), 0xff, words_.size() * sizeof(std::max_align_t));
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(words_.data()); }

 private:
  std::vector<std::max_align_t> words_;
};

// The kept part of a group, as gpu/step/resident.cc lays it out.
internal::ResidentGroup Keep(const GroupStepInput& in, std::vector<Memory>& memory) {
  HostImage measure(nullptr, nullptr);
  internal::PackResident(in, measure);
  memory.emplace_back(measure.bytes());
  HostImage image(memory.back().data(), memory.back().data());
  return internal::PackResident(in, image);
}

struct EmulatedRun {
  int multiprocessors = 4;
  bool scattered = false;         // rows by address, in reverse order of memory
  size_t bad_address = SIZE_MAX;  // row whose address is made odd
  bool kept = false;  // summaries and anchors packed apart, retrieved rows read where they lie

  Status operator()(std::span<const GroupStepInput> in,
                    std::span<const GroupStepOutput> out) const {
    PREFIXD_ASSIGN(const StepShape shape, internal::CheckBatch(in, out));
    PREFIXD_ASSIGN(const StepPlan plan, PlanStep(shape, FakeDevice(multiprocessors)));
    std::vector<Memory> resident_memory;
    std::vector<internal::ResidentGroup> residents;
    std::vector<const internal::ResidentGroup*> pointers;
    for (size_t i = 0; i < in.size() && kept; ++i)
      residents.push_back(Keep(in[i], resident_memory));
    for (const auto& resident : residents) pointers.push_back(&resident);
    internal::Elsewhere elsewhere{pointers, nullptr};
    if (kept) {
      elsewhere.readable = [](const RowsView& rows) {
        const size_t element = DTypeBytes(rows.shape.dtype);
        for (size_t i = 0; i < rows.count; ++i) {
          if ((reinterpret_cast<uintptr_t>(rows.key(i)) |
               reinterpret_cast<uintptr_t>(rows.value(i))) %
              element) {
            return false;
          }
        }
        return true;
      };
    }
    HostImage measure(nullptr, nullptr);
    internal::PackBatch(in, shape, measure, elsewhere);
    Memory input(measure.bytes()), workspace(plan.workspace_bytes);
    HostImage image(input.data(), input.data());
    BatchStepArgs args = internal::PackBatch(in, shape, image, elsewhere);

    const size_t rows = args.row_offsets[shape.n_groups];
    Memory moved(rows * shape.row.bytes());
    std::vector<DeviceRow> addresses(rows);
    for (size_t i = 0; i < rows && scattered; ++i) {
      std::byte* at = moved.data() + (rows - 1 - i) * args.row_stride;
      std::memcpy(at, static_cast<const std::byte*>(args.rows) + i * args.row_stride,
                  args.row_stride);
      std::byte* key = i == bad_address ? at + 1 : at;
      addresses[i] = {key, at + shape.row.key_bytes()};
    }
    if (scattered) {
      args.row_addresses = addresses.data();
      args.rows = nullptr;
    }
    const size_t heads = in.size() * shape.group, dv = shape.row.value_dim;
    std::vector<float> y(heads * dv), lse(heads), rho_z(heads);
    std::vector<uint32_t> errors(in.size(), kGroupOk);
    args.y = y.data();
    args.lse = lse.data();
    args.rho_z = rho_z.data();
    args.errors = errors.data();
    args.workspace = workspace.data();
    args.workspace_bytes = plan.workspace_bytes;

    const internal::StepParams params{shape, plan.n_splits, args};
    if (internal::LaunchQueryKernel(params, nullptr) != 0 ||
        internal::LaunchSplitKernel(params, plan, nullptr) != 0 ||
        internal::LaunchClusterKernel(params, nullptr) != 0 ||
        internal::LaunchMergeKernel(params, nullptr) != 0) {
      return Error{Code::kInternal, "an emulated kernel failed"};
    }
    for (size_t i = 0; i < in.size(); ++i) {
      PREFIXD_TRY(internal::ExplainGroup(errors[i], in, i));
      const size_t g = shape.group;
      std::copy_n(y.data() + i * g * dv, g * dv, out[i].y.data());
      std::copy_n(lse.data() + i * g, g, out[i].lse.data());
      std::copy_n(rho_z.data() + i * g, g, out[i].rho_z.data());
    }
    return {};
  }
};

uint64_t SeedAll(const char* name) {
  const uint64_t seed = prefixd::testing::Seed(name);
  emulated::SetSeed(seed);
  return seed;
}

TEST(EmulatedStep, RandomBatches) {
  testing::RandomBatches(EmulatedRun{}, SeedAll("EmulatedStep.RandomBatches"), 12, 72, 90);
}

TEST(EmulatedStep, ManySplits) {
  testing::RandomBatches(EmulatedRun{.multiprocessors = 64}, SeedAll("EmulatedStep.ManySplits"), 3,
                         24, 600);
}

TEST(EmulatedStep, RowsByAddress) {
  testing::RandomBatches(EmulatedRun{.scattered = true}, SeedAll("EmulatedStep.RowsByAddress"), 4,
                         40, 60);
}

TEST(EmulatedStep, KeptSummariesAndRowsInPlace) {
  const uint64_t seed = SeedAll("EmulatedStep.KeptSummariesAndRowsInPlace");
  testing::RandomBatches(EmulatedRun{.kept = true}, seed, 6, 40, 60);
}

TEST(EmulatedStep, LargestDimensions) {
  testing::Random random(SeedAll("EmulatedStep.LargestDimensions"));
  const testing::ShapeSpec shape{
      .group = 2, .row = {256, 256, DType::kBf16}, .d_phi = 256, .d_emb = 512};
  std::vector<testing::Group> groups;
  groups.push_back(
      testing::MakeGroup(random, shape, {.mid = 24, .k = 9, .estimator = EstimatorKind::kPhi}));
  groups.push_back(
      testing::MakeGroup(random, shape, {.mid = 24, .k = 9, .estimator = EstimatorKind::kMoment}));
  testing::ExpectAgrees(EmulatedRun{}, groups);
}

TEST(EmulatedStep, EveryForm) {
  testing::EveryForm(EmulatedRun{}, SeedAll("EmulatedStep.EveryForm"));
}

TEST(EmulatedStep, HardCases) {
  testing::HardCases(EmulatedRun{}, SeedAll("EmulatedStep.HardCases"));
}

TEST(EmulatedStep, Refusals) { testing::Refusals(EmulatedRun{}, SeedAll("EmulatedStep.Refusals")); }

TEST(EmulatedStep, RefusesMisalignedAddress) {
  testing::Random random(SeedAll("EmulatedStep.RefusesMisalignedAddress"));
  const testing::ShapeSpec shape{.group = 2, .row = {8, 8, DType::kBf16}};
  const testing::Group group = testing::MakeGroup(random, shape, {.mid = 9, .k = 4});
  std::vector<float> y(16), lse(2), rho_z(2);
  const GroupStepOutput out{y, lse, rho_z};
  const Status status = EmulatedRun{.scattered = true, .bad_address = 21}(
      std::span(&group.input, 1), std::span(&out, 1));
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("address of row 21"), std::string::npos)
      << status.error().message;
}

// phi_k recomputed by the kernel must agree with phi_k at ingest (docs/mathematics.md): what the
// split of weights and activations into two bf16 parts each may add to a layer is kSplitError times
// the sum of its products' magnitudes, and later layers carry on the error of earlier ones.
TEST(EmulatedStep, LogPhiAgreesWithIngest) {
  testing::Random random(SeedAll("EmulatedStep.LogPhiAgreesWithIngest"));
  for (int round = 0; round < 8; ++round) {
    const bool usual = round < 2;
    const uint32_t in = usual ? 128 : random.Int(1, 140), emb = usual ? 128 : random.Int(1, 140);
    const uint32_t phi = usual ? 128 : random.Int(1, 140);
    const FeatureMap map = prefixd::testing::RandomFeatureMap(random, in, emb, phi);
    const size_t n = random.Int(1, 40);
    const float scale = round % 3 == 1 ? 8.0f : 1.0f;  // keys with large channels too
    std::vector<float> x = random.Normals(n * in, scale);
    std::vector<float> want(n * phi), got(n * phi);
    map.LogPhi(x, n, want);

    Memory memory(4 * (PackedWords(in, emb) + 2 * PackedWords(emb, emb) + PackedWords(emb, phi)));
    HostImage image(memory.data(), memory.data());
    const auto packed = [&](const std::vector<float>& w, uint32_t n_in, uint32_t n_out) {
      return image.AddMade<uint32_t>(PackedWords(n_in, n_out), [&](std::span<uint32_t> out) {
        PackWeights(w, n_in, n_out, out);
      });
    };
    const DeviceKeyMap device = {
        in,
        emb,
        phi,
        map.alpha,
        packed(map.w_in, in, emb),
        packed(map.w1, emb, emb),
        packed(map.w2, emb, emb),
        packed(map.w_out, emb, phi),
        map.b_in.data(),
        map.b1.data(),
        map.b2.data(),
        map.b_out.data(),
    };
    ASSERT_TRUE(EmulatedLogPhi(device, x.data(), n, got.data()));
    double squares = 0, largest = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      const double error = std::fabs(double{got[i]} - want[i]) / scale;
      squares += error * error;
      largest = std::max(largest, error);
    }
    // In nats, for maps and keys of unit variance: the bound that phi_pack.h speaks of. Narrow
    // layers may amplify it (9e-5 was the most in 1,600 shapes); a lost lower half makes it 2^8
    // times as large.
    EXPECT_LE(largest, usual ? 1e-4 : 4e-4) << "round " << round;
    const double rms = std::sqrt(squares / static_cast<double>(want.size()));
    EXPECT_LE(rms, usual ? 2e-5 : 4e-4) << "round " << round;
  }
}

// The emulator notices what it is there to notice.
TEST(EmulatedCuda, ReportsDivergentBarrier) {
  const bool converged = emulated::RunGrid(dim3(2), 64, 0, 1, [] { __syncthreads(); });
  EXPECT_TRUE(converged);
  const bool diverged = !emulated::RunGrid(dim3(1), 64, 0, 1, [] {
    if (threadIdx.x < 40) __syncthreads();
  });
  EXPECT_TRUE(diverged);
}

// A product of two matrices, by the fragments of the PTX manual.
TEST(EmulatedCuda, MultipliesMatrices) {
  testing::Random random(SeedAll("EmulatedCuda.MultipliesMatrices"));
  float a[16][16], b[16][8], c[16][8], want[16][8] = {};
  for (auto& row : a) std::ranges::generate(row, [&] { return float(random.Int(0, 255)) - 128; });
  for (auto& row : b) std::ranges::generate(row, [&] { return float(random.Int(0, 255)) - 128; });
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      for (int k = 0; k < 16; ++k) want[i][j] += a[i][k] * b[k][j];
    }
  }
  const bool converged = emulated::RunGrid(dim3(1), 32, 0, 3, [&] {
    const uint32_t r = threadIdx.x / 4, s = threadIdx.x % 4 * 2;
    using internal::PackBf16;
    const uint32_t rows[4] = {
        PackBf16(a[r][s], a[r][s + 1]), PackBf16(a[r + 8][s], a[r + 8][s + 1]),
        PackBf16(a[r][s + 8], a[r][s + 9]), PackBf16(a[r + 8][s + 8], a[r + 8][s + 9])};
    float sum[4] = {};
    internal::Mma(sum, rows, PackBf16(b[s][r], b[s + 1][r]), PackBf16(b[s + 8][r], b[s + 9][r]));
    c[r][s] = sum[0], c[r][s + 1] = sum[1], c[r + 8][s] = sum[2], c[r + 8][s + 1] = sum[3];
  });
  ASSERT_TRUE(converged);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) EXPECT_EQ(c[i][j], want[i][j]) << i << ", " << j;
  }
}

TEST(EmulatedCuda, CopiesNotBeforeTheyAreWaitedFor) {
  int from[4] = {1, 2, 3, 4}, to[4] = {};
  int before = -1;
  const bool converged = emulated::RunGrid(dim3(1), 32, 0, 3, [&] {
    if (threadIdx.x == 0) internal::CopyAsync16(to, from);
    __syncthreads();
    if (threadIdx.x == 0) before = to[3];
    internal::WaitForCopies();
  });
  EXPECT_TRUE(converged);
  EXPECT_EQ(before, 0);
  EXPECT_EQ(to[3], 4);
}

TEST(EmulatedCuda, ShufflesWithinSubWarps) {
  std::vector<int> sums(64);
  const bool converged = emulated::RunGrid(dim3(1), 64, 0, 7, [&] {
    int sum = static_cast<int>(threadIdx.x);
    for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset, 16);
    sums[threadIdx.x] = sum;
  });
  ASSERT_TRUE(converged);
  for (int t = 0; t < 64; ++t) EXPECT_EQ(sums[t], 16 * (t / 16 * 16) + 120) << "thread " << t;
}

}  // namespace
}  // namespace prefixd::gpu
