#include "protocol/json_text.h"

namespace prefixd::wire {

Status CheckKnownFields(const Json& given, const Json& known, const std::string& what) {
  // Maps whose keys the user chooses (an empty object in the default) are not checked.
  if (!given.is_object() || !known.is_object() || known.empty()) return {};
  for (const auto& [key, value] : given.items()) {
    const auto it = known.find(key);
    if (it == known.end()) {
      std::string names;
      for (const auto& [name, ignored] : known.items()) names += (names.empty() ? "" : ", ") + name;
      return InvalidArgument(what + "." + key + ": no such field; there are " + names);
    }
    PREFIXD_TRY(CheckKnownFields(value, *it, what + "." + key));
  }
  return {};
}

Result<Json> ParseObject(std::string_view text, std::string_view what) {
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return InvalidArgument(std::string(what) + ": expected a JSON object, got \"" +
                           std::string(text.substr(0, 60)) + "\"");
  }
  return json;
}

}  // namespace prefixd::wire
