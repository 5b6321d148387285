#include "runtime/derived/trained_for.h"

#include <algorithm>

namespace prefixd {

std::string TrainedForOthers(const ModelSpec& spec, std::string_view weights) {
  const auto kind = [](std::string_view digest) {
    return digest.substr(0, std::min(digest.find(':') + 1, digest.size()));
  };
  for (const auto& [tag, value] : spec.identity) {
    if (tag == "weights" && !weights.empty() && kind(value) == kind(weights) && value != weights) {
      return "trained for weights " + std::string(weights) + ", the model has " + value;
    }
  }
  return "";
}

}  // namespace prefixd
