// Every request that the protocol has, from the protocol itself: a message that is added is drawn
// by the random tests without a change to them.
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
