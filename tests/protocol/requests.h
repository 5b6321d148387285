// Lists every request of the protocol from the protocol itself, so that the random tests draw new
// messages without a change.
#pragma once

#include <vector>

#include "protocol/frame.h"

namespace prefixd::testing {

inline std::vector<wire::MessageType> AllRequests() {
  std::vector<wire::MessageType> all;
  for (unsigned number = 0; number <= 0xffff; ++number) {
    const auto type = static_cast<wire::MessageType>(number);
    if (wire::IsRequest(type)) all.push_back(type);
  }
  return all;
}

}  // namespace prefixd::testing
