// Tells which build this is, for --version and bug reports. Only the programs that print it link
// it, because the commit changes more often than anything else.
#pragma once

#include <string>
#include <string_view>

namespace prefixd {

// Returns "d584a05", "d584a05 with changes", or "unknown" where there was no git.
std::string_view BuildCommit();

// Returns "prefixd 0.2.0\ncommit: d584a05\n" and a line for each of `more` ("cpu: avx512").
std::string VersionText(std::string_view program, std::string_view more = {});

// Returns the processor's x86-64 level ("x86-64-v4"), or its architecture elsewhere.
std::string_view CpuLevel();

}  // namespace prefixd
