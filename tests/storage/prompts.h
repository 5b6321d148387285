// Makes prompts that share nothing.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace prefixd::storage {

using Tokens = std::vector<uint32_t>;

// Returns tokens that no other `first` shares.
inline Tokens Prompt(uint32_t first, uint32_t n = 200) {
  Tokens tokens(n);
  std::iota(tokens.begin(), tokens.end(), first * 10000);
  return tokens;
}

}  // namespace prefixd::storage
