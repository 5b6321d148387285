// Which build this is, for --version and bug reports. Linked by the programs that print it alone:
// the commit changes more often than anything else.
#pragma once

#include <string>
#include <string_view>

namespace prefixd {

// "d584a05", "d584a05 with changes", or "unknown" where there was no git.
std::string_view BuildCommit();

// "prefixd 0.2.0\ncommit: d584a05\n" and a line for each of `more` ("cpu: avx512").
std::string VersionText(std::string_view program, std::string_view more = {});

// The processor's x86-64 level ("x86-64-v4"), or its architecture elsewhere.
std::string_view CpuLevel();

}  // namespace prefixd
