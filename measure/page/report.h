// Holds one run's report in all its forms: tables and sentences for a terminal, JSON, a page.
//
// Thread-safety: plain values.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "measure/page/html_page.h"

namespace prefixd::bench {

struct Report {
  std::vector<std::pair<std::string, TextTable>> tables;  // with their titles
  std::vector<std::string> skipped;                       // what was left out, and why
  std::vector<std::string> verdict;                       // whole sentences
  nlohmann::json figures;
  HtmlPage page{"", ""};
};

// What a run is going to do, in sentences, and what it takes.
struct Plan {
  std::vector<std::string> sentences;
  double seconds = 0;
  double bytes = 0;  // written to the disk
};

}  // namespace prefixd::bench
