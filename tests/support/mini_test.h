// Implements a small subset of GoogleTest for machines without it (tests/support/test.h chooses):
//
//   TEST, TEST_F; EXPECT_/ASSERT_ TRUE FALSE EQ NE LT LE GT GE NEAR FLOAT_EQ DOUBLE_EQ STREQ;
//   ADD_FAILURE, FAIL, SUCCEED, GTEST_SKIP, SCOPED_TRACE; `<< message` after each of them.
//
// ASSERT_*, FAIL and GTEST_SKIP return from the enclosing function, which must return void.
// main() is in mini_test_main.cc: --gtest_filter=PATTERN[:PATTERN...][-PATTERN...] runs the tests
// whose "Suite.Name" contains a pattern (its '*' are dropped) and none of those behind the minus,
// --gtest_list_tests lists them. The exit status is 1 when a test failed or when the filter matches
// nothing, 0 when some were skipped. One thread at a time: assert only on the thread that runs the
// test.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <ranges>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace testing {

// Test is the base of fixtures (TEST_F).
class Test {
 public:
  virtual ~Test() = default;
  virtual void SetUp() {}
  virtual void TearDown() {}
  virtual void TestBody() = 0;
  static bool HasFailure();
  static bool IsSkipped();
};

namespace mini {

enum class Outcome { kFailure, kSkip };

struct TestCase {
  std::string suite, name;
  std::function<std::unique_ptr<Test>()> make;
  std::string full_name() const { return suite + "." + name; }
};

// Holds all that the run keeps. It is made on first use, so that tests register from any file, in
// any order.
struct State {
  std::vector<TestCase> tests;
  std::vector<std::string> traces;  // SCOPED_TRACE messages in force, outermost first
  bool failed = false;              // the running test has failed
  bool skipped = false;
};
inline State& TheState() {
  static State state;
  return state;
}

inline bool Register(std::string suite, std::string name,
                     std::function<std::unique_ptr<Test>()> make) {
  TheState().tests.push_back({std::move(suite), std::move(name), std::move(make)});
  return true;
}

// Collects the text that is streamed behind an assertion.
class Message {
 public:
  template <typename T>
  Message& operator<<(const T& value) {
    stream_ << value;
    return *this;
  }
  std::string text() const { return stream_.str(); }

 private:
  std::ostringstream stream_;
};

void Report(Outcome outcome, const char* file, int line, const std::string& what,
            const std::string& message);  // mini_test_main.cc

// `Reporter(...) = Message() << "..."` has type void: an assertion can be `return`ed.
class Reporter {
 public:
  Reporter(Outcome outcome, const char* file, int line, std::string what)
      : outcome_(outcome), file_(file), line_(line), what_(std::move(what)) {}
  void operator=(const Message& message) const {
    Report(outcome_, file_, line_, what_, message.text());
  }

 private:
  Outcome outcome_;
  const char* file_;
  int line_;
  std::string what_;
};

template <typename T>
std::string Show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_same_v<T, std::nullptr_t>) {
    out << "nullptr";
  } else if constexpr (std::is_floating_point_v<T>) {
    out.precision(std::numeric_limits<T>::max_digits10);
    out << value;
  } else if constexpr (std::is_enum_v<T>) {
    out << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (std::ranges::input_range<const T>) {
    out << "{";
    for (size_t shown = 0; const auto& element : value) {
      if (shown++ == 32) {
        out << " ...";
        break;
      }
      out << " " << Show(element);
    }
    out << " }";
  } else {
    out << "<" << sizeof(T) << "-byte object>";
  }
  return out.str();
}

// Returns "" if the assertion holds, otherwise the text to print.
struct Check {
  std::string failure;
  explicit operator bool() const { return failure.empty(); }
};

inline Check CheckBool(bool actual, bool expected, const char* text) {
  if (actual == expected) return {};
  return {std::string(text) + " is " + Show(actual) + ", expected " + Show(expected)};
}

template <typename A, typename B, typename Compare>
Check CheckCompare(const A& a, const B& b, const char* a_text, const char* op, const char* b_text,
                   Compare compare) {
  if (compare(a, b)) return {};
  return {std::string("expected ") + a_text + " " + op + " " + b_text + "\n    left:  " + Show(a) +
          "\n    right: " + Show(b)};
}

inline Check CheckNear(double a, double b, double bound, const char* a_text, const char* b_text) {
  // A NaN on either side fails; equal infinities agree.
  if (a == b || std::fabs(a - b) <= bound) return {};
  return {std::string("|") + a_text + " - " + b_text + "| exceeds " + Show(bound) +
          "\n    left:  " + Show(a) + "\n    right: " + Show(b)};
}

// Accepts 4 units in the last place, like GoogleTest's FLOAT_EQ and DOUBLE_EQ.
template <typename Float>
Check CheckUlps(Float a, Float b, const char* a_text, const char* b_text) {
  using Bits = std::conditional_t<sizeof(Float) == 4, uint32_t, uint64_t>;
  // Maps floats to integers in the same order, so that neighbours differ by one.
  const auto ordered = [](Float value) {
    Bits bits;
    std::memcpy(&bits, &value, sizeof(bits));
    constexpr Bits kSign = Bits{1} << (sizeof(Bits) * 8 - 1);
    return (bits & kSign) ? Bits(~bits + 1) : Bits(bits | kSign);
  };
  if (!std::isnan(a) && !std::isnan(b)) {
    const Bits x = ordered(a), y = ordered(b);
    if ((x > y ? x - y : y - x) <= 4) return {};
  }
  return {std::string("expected ") + a_text + " == " + b_text +
          " within 4 ulps\n    left:  " + Show(a) + "\n    right: " + Show(b)};
}

inline Check CheckStrings(const char* a, const char* b, const char* a_text, const char* b_text) {
  if (a == b || (a && b && std::strcmp(a, b) == 0)) return {};
  return {std::string("expected ") + a_text + " == " + b_text +
          "\n    left:  " + (a ? a : "(null)") + "\n    right: " + (b ? b : "(null)")};
}

class ScopedTrace {
 public:
  template <typename T>
  ScopedTrace(const char* file, int line, const T& message) {
    std::ostringstream out;
    out << file << ":" << line << ": " << message;
    TheState().traces.push_back(out.str());
  }
  ~ScopedTrace() { TheState().traces.pop_back(); }
  ScopedTrace(const ScopedTrace&) = delete;
  ScopedTrace& operator=(const ScopedTrace&) = delete;
};

}  // namespace mini

inline bool Test::HasFailure() { return mini::TheState().failed; }
inline bool Test::IsSkipped() { return mini::TheState().skipped; }

}  // namespace testing

#define MINI_TEST_CONCAT_INNER_(a, b) a##b
#define MINI_TEST_CONCAT_(a, b) MINI_TEST_CONCAT_INNER_(a, b)
#define MINI_TEST_CLASS_(suite, name) suite##_##name##_Test

#define MINI_TEST_DEFINE_(suite, name, base)                                          \
  class MINI_TEST_CLASS_(suite, name) : public base {                                 \
   public:                                                                            \
    void TestBody() override;                                                         \
  };                                                                                  \
  [[maybe_unused]] static const bool MINI_TEST_CONCAT_(mini_registered_, __LINE__) =  \
      ::testing::mini::Register(#suite, #name, [] {                                   \
        return std::unique_ptr<::testing::Test>(new MINI_TEST_CLASS_(suite, name)()); \
      });                                                                             \
  void MINI_TEST_CLASS_(suite, name)::TestBody()

#define TEST(suite, name) MINI_TEST_DEFINE_(suite, name, ::testing::Test)
#define TEST_F(fixture, name) MINI_TEST_DEFINE_(fixture, name, fixture)

// The switch keeps an assertion safe inside an unbraced if-else.
#define MINI_TEST_CHECK_(check, on_failure)                                                        \
  switch (0)                                                                                       \
  case 0:                                                                                          \
  default:                                                                                         \
    if (const ::testing::mini::Check mini_check_ = (check); mini_check_)                           \
      ;                                                                                            \
    else                                                                                           \
      on_failure ::testing::mini::Reporter(::testing::mini::Outcome::kFailure, __FILE__, __LINE__, \
                                           mini_check_.failure) = ::testing::mini::Message()

#define MINI_TEST_COMPARE_(a, op, b, on_failure)                                                \
  MINI_TEST_CHECK_(::testing::mini::CheckCompare(a, b, #a, #op, #b,                             \
                                                 [](const auto& mini_a_, const auto& mini_b_) { \
                                                   return mini_a_ op mini_b_;                   \
                                                 }),                                            \
                   on_failure)

#define EXPECT_TRUE(x) MINI_TEST_CHECK_(::testing::mini::CheckBool(bool(x), true, #x), )
#define EXPECT_FALSE(x) MINI_TEST_CHECK_(::testing::mini::CheckBool(bool(x), false, #x), )
#define EXPECT_EQ(a, b) MINI_TEST_COMPARE_(a, ==, b, )
#define EXPECT_NE(a, b) MINI_TEST_COMPARE_(a, !=, b, )
#define EXPECT_LT(a, b) MINI_TEST_COMPARE_(a, <, b, )
#define EXPECT_LE(a, b) MINI_TEST_COMPARE_(a, <=, b, )
#define EXPECT_GT(a, b) MINI_TEST_COMPARE_(a, >, b, )
#define EXPECT_GE(a, b) MINI_TEST_COMPARE_(a, >=, b, )
#define EXPECT_NEAR(a, b, bound) MINI_TEST_CHECK_(::testing::mini::CheckNear(a, b, bound, #a, #b), )
#define EXPECT_FLOAT_EQ(a, b) MINI_TEST_CHECK_(::testing::mini::CheckUlps<float>(a, b, #a, #b), )
#define EXPECT_DOUBLE_EQ(a, b) MINI_TEST_CHECK_(::testing::mini::CheckUlps<double>(a, b, #a, #b), )
#define EXPECT_STREQ(a, b) MINI_TEST_CHECK_(::testing::mini::CheckStrings(a, b, #a, #b), )

#define ASSERT_TRUE(x) MINI_TEST_CHECK_(::testing::mini::CheckBool(bool(x), true, #x), return )
#define ASSERT_FALSE(x) MINI_TEST_CHECK_(::testing::mini::CheckBool(bool(x), false, #x), return )
#define ASSERT_EQ(a, b) MINI_TEST_COMPARE_(a, ==, b, return )
#define ASSERT_NE(a, b) MINI_TEST_COMPARE_(a, !=, b, return )
#define ASSERT_LT(a, b) MINI_TEST_COMPARE_(a, <, b, return )
#define ASSERT_LE(a, b) MINI_TEST_COMPARE_(a, <=, b, return )
#define ASSERT_GT(a, b) MINI_TEST_COMPARE_(a, >, b, return )
#define ASSERT_GE(a, b) MINI_TEST_COMPARE_(a, >=, b, return )
#define ASSERT_NEAR(a, b, bound) \
  MINI_TEST_CHECK_(::testing::mini::CheckNear(a, b, bound, #a, #b), return )
#define ASSERT_FLOAT_EQ(a, b) \
  MINI_TEST_CHECK_(::testing::mini::CheckUlps<float>(a, b, #a, #b), return )
#define ASSERT_DOUBLE_EQ(a, b) \
  MINI_TEST_CHECK_(::testing::mini::CheckUlps<double>(a, b, #a, #b), return )
#define ASSERT_STREQ(a, b) MINI_TEST_CHECK_(::testing::mini::CheckStrings(a, b, #a, #b), return )

#define MINI_TEST_REPORT_(outcome, what)                                                   \
  ::testing::mini::Reporter(::testing::mini::Outcome::outcome, __FILE__, __LINE__, what) = \
      ::testing::mini::Message()
#define ADD_FAILURE() MINI_TEST_REPORT_(kFailure, "failed")
#define FAIL() return ADD_FAILURE()
#define SUCCEED() static_cast<void>(0), ::testing::mini::Message()
#define GTEST_SKIP() return MINI_TEST_REPORT_(kSkip, "skipped")
#define SCOPED_TRACE(message)                                                                     \
  const ::testing::mini::ScopedTrace MINI_TEST_CONCAT_(mini_trace_, __LINE__)(__FILE__, __LINE__, \
                                                                              message)
