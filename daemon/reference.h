// The page docs/reference.md: every option and every statistic, made of their tables.
//
// Thread-safety: a free function.
#pragma once

#include <string>

namespace prefixd::daemon {

std::string ReferencePage();  // Markdown

}  // namespace prefixd::daemon
