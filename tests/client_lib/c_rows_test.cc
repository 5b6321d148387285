// Tests reads of rows and restores through the C interface.
#include <algorithm>
#include <cstring>

#include "prefixd/prefixd.h"
#include "tests/client_lib/c_api_fixture.h"
#include "tests/support/test.h"

namespace prefixd::testing {
namespace {

TEST_P(CApi, RowsComeBackAsTheyWerePut) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  pfx_session_shape shape = PFX_SESSION_SHAPE_INIT;
  ASSERT_EQ(pfx_session_get_shape(session_, &shape), PFX_OK);
  EXPECT_EQ(shape.n_tokens, kTokens);
  EXPECT_EQ(shape.row_bytes, 2 * kDim * sizeof(float));
  EXPECT_STREQ(shape.dtype, "f32");
  const uint32_t ids[] = {0, 7, 299};
  float rows[3][2 * kDim], range[2][2 * kDim];
  ASSERT_EQ(pfx_read_rows(session_, 1, 1, ids, 3, rows, sizeof(rows)), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_read_range(session_, 1, 1, 7, 9, range, sizeof(range)), PFX_OK);
  EXPECT_EQ(pfx_read_range(session_, 1, 1, 7, 9, range, 8), PFX_INVALID_ARGUMENT);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(std::equal(rows[i], rows[i] + kDim, Row(k_, 1, ids[i]) + kDim));
    EXPECT_TRUE(std::equal(rows[i] + kDim, rows[i] + 2 * kDim, Row(v_, 1, ids[i]) + kDim));
  }
  EXPECT_TRUE(std::ranges::equal(range[0], rows[1]));
  uint32_t selected[20];
  size_t n = 0;
  pfx_cut cuts[2];
  ASSERT_EQ(pfx_select(session_, 0, 0, q_.data(), 2 * kDim, 20, selected, &n, cuts, 2), PFX_OK)
      << pfx_last_error();
  EXPECT_EQ(n, 20u);
  EXPECT_TRUE(std::is_sorted(selected, selected + n));
  EXPECT_EQ(cuts[0].kind, PFX_CUT_EXACT);
}

TEST_P(CApi, RestoreBringsEveryRowBackLayerByLayer) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  uint64_t seen = 0;
  pfx_restore_options options = PFX_RESTORE_OPTIONS_INIT;
  options.begin = 3;
  options.buffer_bytes = 1;  // two runs, however short
  options.user = &seen;
  options.progress = [](void* user, uint64_t done, uint64_t, const char*) {
    *static_cast<uint64_t*>(user) = done;
    return 0;
  };
  pfx_restore* restore = nullptr;
  ASSERT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_OK) << pfx_last_error();
  const auto row_bytes = [](uint32_t tokens) { return size_t{tokens} * kKvHeads * kDim * 4; };
  uint32_t layer = 0, at = options.begin;
  uint64_t bytes = 0;
  while (true) {
    pfx_restored_run run = PFX_RESTORED_RUN_INIT;
    ASSERT_EQ(pfx_restore_next(restore, &run), PFX_OK) << pfx_last_error();
    if (run.k == nullptr) break;
    ASSERT_EQ(run.layer, layer);
    ASSERT_EQ(run.begin, at);
    ASSERT_EQ(run.k_bytes, row_bytes(run.end - run.begin));
    ASSERT_EQ(run.v_bytes, run.k_bytes);
    EXPECT_EQ(std::memcmp(run.k, Row(k_, layer, at), run.k_bytes), 0);
    EXPECT_EQ(std::memcmp(run.v, Row(v_, layer, at), run.v_bytes), 0);
    bytes += run.k_bytes + run.v_bytes;
    EXPECT_EQ(seen, bytes);
    at = run.end;
    if (at == kTokens) ++layer, at = options.begin;
  }
  EXPECT_EQ(layer, uint32_t{kLayers});
  pfx_restore_cancel(restore);
  pfx_restored_run run = PFX_RESTORED_RUN_INIT;
  EXPECT_EQ(pfx_restore_next(restore, &run), PFX_CANCELLED);
  pfx_restore_free(restore);

  // The run is head-major and has one layer; it outlives the session's handle.
  options = PFX_RESTORE_OPTIONS_INIT;
  options.first_layer = 1;
  options.end_layer = 2;
  options.order = PFX_HEAD_MAJOR;
  ASSERT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_restore_next(restore, &run), PFX_OK) << pfx_last_error();
  ASSERT_GT(run.end, 1u);
  const float* last = static_cast<const float*>(run.v) + (run.v_bytes / 4 - kDim);
  EXPECT_TRUE(std::equal(last, last + kDim, Row(v_, 1, run.end - 1) + (kKvHeads - 1) * kDim));
  pfx_restore_free(restore);

  options.order = static_cast<pfx_kv_order>(7);
  EXPECT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_INVALID_ARGUMENT);
  options = PFX_RESTORE_OPTIONS_INIT;
  options.end = kTokens + 1;
  EXPECT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_INVALID_ARGUMENT);
  EXPECT_EQ(pfx_restore_begin(nullptr, nullptr, &restore), PFX_INVALID_ARGUMENT);
  options = PFX_RESTORE_OPTIONS_INIT;
  options.progress = [](void*, uint64_t, uint64_t, const char*) { return 1; };
  ASSERT_EQ(pfx_restore_begin(session_, &options, &restore), PFX_OK);
  EXPECT_EQ(pfx_restore_next(restore, &run), PFX_CANCELLED);
  pfx_restore_free(restore);
  pfx_restore_free(nullptr);
}

}  // namespace
}  // namespace prefixd::testing
