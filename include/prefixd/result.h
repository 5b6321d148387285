// Returns errors as values. Every fallible function of prefixd returns Result<T> (or Status, which
// is Result<void>); nothing throws across a public interface. Both are [[nodiscard]].
//
// Thread-safety: plain values.
#pragma once

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace prefixd {

// Tells a caller what to do about a failure; the message explains it in a sentence.
enum class Code {
  kInvalidArgument,     // the request itself is wrong; the same call will fail again
  kNotFound,            // no such model, prefix, session, file
  kAlreadyExists,       // exists already, with other contents
  kFailedPrecondition,  // the order or state is wrong (store locked, session detached)
  kInfeasible,         // the read budget cannot pay for anchors and estimator (docs/mathematics.md)
  kResourceExhausted,  // disk full, quota, too many sessions
  kCorrupt,            // stored bytes do not verify; they were not returned
  kUnavailable,        // daemon or tier not reachable now; trying again may work
  kIo,                 // the operating system refused a read or write
  kCancelled,          // aborted by the caller or by shutdown
  kDeadlineExceeded,   // no answer within the time that the caller gave
  kInternal,           // a broken invariant: a bug in prefixd
};

// Returns the stable lower-case name of a code, e.g. "not_found"; JSON and the wire use it.
std::string_view CodeName(Code code);
// Inverts CodeName; kInternal for an unknown name.
Code CodeFromName(std::string_view name);

struct Error {
  Code code = Code::kInternal;
  std::string message;
  // kResourceExhausted: when the same call is worth trying again, because memory that others use
  // for a while was short. 0: something else must change first.
  uint32_t retry_after_ms = 0;

  // "not_found: no model named 'x'; see `prefixctl models list`"
  std::string ToString() const;
};

// Holds either a T or an Error. Reading the wrong one is a programming error (asserted).
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  T& value() & {
    assert(ok());
    return *std::get_if<0>(&state_);
  }
  const T& value() const& {
    assert(ok());
    return *std::get_if<0>(&state_);
  }
  T&& value() && {
    assert(ok());
    return std::move(*std::get_if<0>(&state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  const Error& error() const& {
    assert(!ok());
    return *std::get_if<1>(&state_);
  }
  Error&& error() && {
    assert(!ok());
    return std::move(*std::get_if<1>(&state_));
  }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT: implicit

  bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Error& error() const& {
    assert(!ok());
    return *error_;
  }
  Error&& error() && {
    assert(!ok());
    return std::move(*error_);
  }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

inline Error InvalidArgument(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}

}  // namespace prefixd

// Returns the error of `expr` from the enclosing function, if there is one.
#define PREFIXD_TRY(expr)                                       \
  do {                                                          \
    if (auto prefixd_status_ = (expr); !prefixd_status_.ok()) { \
      return std::move(prefixd_status_).error();                \
    }                                                           \
  } while (false)

#define PREFIXD_CONCAT_INNER_(a, b) a##b
#define PREFIXD_CONCAT_(a, b) PREFIXD_CONCAT_INNER_(a, b)
// Assigns the value of a Result, or returns its error: PREFIXD_ASSIGN(auto x, Compute()).
#define PREFIXD_ASSIGN(lhs, expr)                                         \
  auto PREFIXD_CONCAT_(prefixd_result_, __LINE__) = (expr);               \
  if (!PREFIXD_CONCAT_(prefixd_result_, __LINE__).ok()) {                 \
    return std::move(PREFIXD_CONCAT_(prefixd_result_, __LINE__)).error(); \
  }                                                                       \
  lhs = std::move(PREFIXD_CONCAT_(prefixd_result_, __LINE__)).value()
