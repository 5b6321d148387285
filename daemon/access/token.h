// Makes the tokens that clients present, and the hashes that are kept of them. A token is random
// and long, so that a fast hash is enough: nobody finds it by trying.
//
// Thread-safety: free functions.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd::daemon {

using TokenHash = std::array<uint8_t, 32>;

// Longer ones are refused before they are hashed.
inline constexpr size_t kMaxTokenBytes = 1024;

// Returns "pfx_" and 43 letters, digits, '-' and '_', which carry 256 random bits.
std::string MakeToken();
// BLAKE2b under a key of its own, so that no other hash of prefixd's can be taken for one.
TokenHash HashToken(std::string_view token);
// In a time that does not depend on where they differ.
bool SameHash(const TokenHash& a, const TokenHash& b);

// "blake2b:" and 64 hexadecimal digits.
std::string HashText(const TokenHash& hash);
Result<TokenHash> ParseHash(std::string_view text);

}  // namespace prefixd::daemon
