// Writes numbers and text for people, in tables, sentences and pages.
//
// Thread-safety: pure functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace prefixd::bench {

// Makes a text safe inside HTML and SVG, in elements and in attributes.
std::string Escape(std::string_view text);

// Three significant digits at most, thousands by k, M, G: "0.0123", "1.5", "16k", "1M".
std::string Short(double value);
// Always a fixed number of digits behind the point.
std::string Fixed(double value, int digits);
std::string Flops(double per_second);  // "29.9 GFLOP/s"
std::string Times(double factor);      // "1.8", "107", "1,820"
std::string Percent(double part);      // 0.012: "1.2%"
std::string GigaBytes(double bytes);   // "1.5 GB", "12 MB", decimal
std::string Seconds(double seconds);   // "350 us", "12 ms", "1.5 s", "4 min", "3 h"
std::string Tokens(double tokens);     // "16,384 tokens"
std::string Thousands(double whole);   // "16,384"
std::string Join(const std::vector<std::string>& parts, std::string_view between);

}  // namespace prefixd::bench
