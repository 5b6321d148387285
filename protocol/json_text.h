// Reads and writes values of the interface as JSON text, for the C API and for Python. Reading is
// strict (an unknown field is an error that names it), so that a misspelt option is never silently
// ignored. Field names are those of protocol/codec.h, the wire and `prefixctl --json`.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "prefixd/result.h"
#include "protocol/codec.h"

namespace prefixd::wire {

// Finds fields of `given` that `known` lacks, at any depth of objects; the error names the path of
// the first one ("policy.estimater: no such field; there are budget, estimator, ...").
Status CheckKnownFields(const Json& given, const Json& known, const std::string& what);

// kInvalidArgument when the text is no JSON object.
Result<Json> ParseObject(std::string_view text, std::string_view what);

template <typename T>
Result<T> FromText(std::string_view text, const std::string& what) {
  PREFIXD_ASSIGN(const Json json, ParseObject(text, what));
  PREFIXD_TRY(CheckKnownFields(json, ToJson(T{}), what));
  return FromJson<T>(json, what);
}

// Not-a-number (an error that was not measured) becomes null.
template <typename T>
std::string ToText(const T& value) {
  return ToJson(value).dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace prefixd::wire
