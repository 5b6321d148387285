// Tests what the header says of handles: batches in which some requests cannot run, handles in a
// child that fork() makes, the order in which they are freed.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>

#include "tests/client_lib/c_api_fixture.h"

namespace prefixd::testing {
namespace {

TEST_P(CApi, ARequestThatCannotRunHoldsUpNoOther) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  pfx_open_options open = PFX_OPEN_OPTIONS_INIT;
  const std::string dir = dir_.path() / "other";
  open.dir = dir.c_str();
  open.options_json = R"({"host_tier_bytes": 67108864, "min_free_bytes": 0, "threads": 2})";
  pfx_store* const own = client_;
  pfx_store* other = nullptr;
  ASSERT_EQ(pfx_open(&open, &other), PFX_OK) << pfx_last_error();
  client_ = other;
  ASSERT_EQ(pfx_register_model(client_, kModel), PFX_OK);
  Put();
  pfx_session* const foreign = Attach(R"({"mode": "full"})");
  client_ = own;

  constexpr size_t kRequests = 6;
  float y[kRequests][kQ] = {}, lse[kRequests][kQHeads] = {};
  pfx_step_request requests[kRequests] = {};
  for (size_t i = 0; i < kRequests; ++i) {
    pfx_step_request& r = requests[i];
    r.session = session_;
    r.code = PFX_INTERNAL;
    r.q = q_.data(), r.q_count = kQ;
    r.y = y[i], r.y_count = kQ;
    r.lse = lse[i], r.lse_count = kQHeads;
  }
  requests[1].session = nullptr;
  requests[2].session = foreign;
  requests[3].q = nullptr;
  requests[4].k = Row(k_, 0, 0), requests[4].k_bytes = kKvHeads * kDim * sizeof(float);
  EXPECT_EQ(pfx_step_batch(client_, requests, kRequests, sizeof(pfx_step_request)),
            PFX_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(pfx_last_error()).find("request 1: "), 0u) << pfx_last_error();
  for (size_t i = 1; i < 5; ++i) EXPECT_EQ(requests[i].code, PFX_INVALID_ARGUMENT) << i;
  for (const size_t i : {size_t{0}, size_t{5}}) {
    EXPECT_EQ(requests[i].code, PFX_OK) << i;
    ExpectReference(0, q_.data(), y[i], lse[i]);
  }
  // Handles end in any order.
  pfx_store_close(other);
  ASSERT_EQ(pfx_step(foreign, 0, q_.data(), kQ, y[0], kQ, lse[0], kQHeads), PFX_OK)
      << pfx_last_error();
  ExpectReference(0, q_.data(), y[0], lse[0]);
  pfx_session_free(foreign);
}

TEST_P(CApi, AChildEndsNothingOfItsParents) {
  Put();
  session_ = Attach(R"({"mode": "full"})");
  pfx_restore_options all = PFX_RESTORE_OPTIONS_INIT;
  pfx_restore* restore = nullptr;
  ASSERT_EQ(pfx_restore_begin(session_, &all, &restore), PFX_OK) << pfx_last_error();
  float y[kQ], lse[kQHeads];
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    bool refused =
        pfx_step(session_, 0, q_.data(), kQ, y, kQ, lse, kQHeads) == PFX_FAILED_PRECONDITION &&
        std::string(pfx_last_error()).find("before fork()") != std::string::npos;
    pfx_restore_free(restore);
    pfx_session_free(session_);
    pfx_store_close(client_);
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  ASSERT_EQ(pfx_step(session_, 0, q_.data(), kQ, y, kQ, lse, kQHeads), PFX_OK) << pfx_last_error();
  ExpectReference(0, q_.data(), y, lse);
  pfx_restore_free(restore);
}

}  // namespace
}  // namespace prefixd::testing
