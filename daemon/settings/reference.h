// Writes the page docs/reference.md: every option and every statistic, from their tables.
//
// Thread-safety: a free function.
#pragma once

#include <string>

namespace prefixd::daemon {

std::string ReferencePage();  // Markdown

}  // namespace prefixd::daemon
