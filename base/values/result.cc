#include "prefixd/result.h"

#include <array>

namespace prefixd {
namespace {

struct NamedCode {
  Code code;
  std::string_view name;
};

constexpr std::array<NamedCode, 12> kCodes = {{
    {Code::kInvalidArgument, "invalid_argument"},
    {Code::kNotFound, "not_found"},
    {Code::kAlreadyExists, "already_exists"},
    {Code::kFailedPrecondition, "failed_precondition"},
    {Code::kInfeasible, "infeasible"},
    {Code::kResourceExhausted, "resource_exhausted"},
    {Code::kCorrupt, "corrupt"},
    {Code::kUnavailable, "unavailable"},
    {Code::kIo, "io"},
    {Code::kCancelled, "cancelled"},
    {Code::kDeadlineExceeded, "deadline_exceeded"},
    {Code::kInternal, "internal"},
}};

}  // namespace

std::string_view CodeName(Code code) {
  for (const NamedCode& entry : kCodes) {
    if (entry.code == code) return entry.name;
  }
  return "internal";
}

Code CodeFromName(std::string_view name) {
  for (const NamedCode& entry : kCodes) {
    if (entry.name == name) return entry.code;
  }
  return Code::kInternal;
}

std::string Error::ToString() const {
  std::string text(CodeName(code));
  text += ": ";
  text += message;
  return text;
}

}  // namespace prefixd
