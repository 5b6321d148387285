// Expects that a Status or a Result succeeded, or failed with a given code; prints its message
// otherwise.
#pragma once

#include "prefixd/result.h"
#include "tests/support/test.h"

#define ASSERT_OK(expr)                                                             \
  do {                                                                              \
    const auto& assert_ok_ = (expr);                                                \
    ASSERT_TRUE(assert_ok_.ok()) << #expr << ": " << assert_ok_.error().ToString(); \
  } while (false)
#define EXPECT_OK(expr)                                                             \
  do {                                                                              \
    const auto& expect_ok_ = (expr);                                                \
    EXPECT_TRUE(expect_ok_.ok()) << #expr << ": " << expect_ok_.error().ToString(); \
  } while (false)
#define EXPECT_CODE(expr, expected)                                                            \
  do {                                                                                         \
    const auto& expect_code_ = (expr);                                                         \
    EXPECT_FALSE(expect_code_.ok()) << #expr << " succeeded";                                  \
    if (!expect_code_.ok()) {                                                                  \
      EXPECT_EQ(::prefixd::CodeName(expect_code_.error().code), ::prefixd::CodeName(expected)) \
          << expect_code_.error().message;                                                     \
    }                                                                                          \
  } while (false)
