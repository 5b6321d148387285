#include "measure/page/text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace prefixd::bench {

std::string Escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        // Control characters are no characters of HTML.
        out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? ' ' : c;
    }
  }
  return out;
}

std::string Fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string Short(double value) {
  if (!std::isfinite(value)) return "-";
  if (value == 0) return "0";
  static constexpr std::pair<double, const char*> kUnits[] = {{1e9, "G"}, {1e6, "M"}, {1e3, "k"}};
  const double size = std::abs(value);
  for (const auto& [unit, name] : kUnits) {
    if (size >= unit * 0.9995) {
      const double v = value / unit;
      std::string digits = Fixed(v, std::abs(v) < 9.995 ? 2 : std::abs(v) < 99.95 ? 1 : 0);
      if (digits.find('.') != std::string::npos) {
        while (digits.back() == '0') digits.pop_back();
        if (digits.back() == '.') digits.pop_back();
      }
      return digits + name;
    }
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

std::string Flops(double per_second) { return Fixed(per_second / 1e9, 1) + " GFLOP/s"; }

std::string Times(double factor) {
  return factor < 99.5 ? Short(factor) : Thousands(std::round(factor));
}

std::string Percent(double part) {
  const double p = 100 * part;
  std::string digits = Fixed(p, p < 0.995 ? 2 : p < 9.95 ? 1 : 0);
  if (digits.find('.') != std::string::npos) {
    while (digits.back() == '0') digits.pop_back();
    if (digits.back() == '.') digits.pop_back();
  }
  return digits + "%";
}

std::string GigaBytes(double bytes) {
  if (bytes < 1e6) return Fixed(bytes / 1e3, 0) + " kB";
  if (bytes < 1e9) return Fixed(bytes / 1e6, bytes < 1e7 ? 1 : 0) + " MB";
  if (bytes < 1e12) return Fixed(bytes / 1e9, bytes < 1e10 ? 2 : bytes < 1e11 ? 1 : 0) + " GB";
  return Fixed(bytes / 1e12, 1) + " TB";
}

std::string Seconds(double s) {
  if (s < 1e-3) return Fixed(s * 1e6, s < 1e-5 ? 1 : 0) + " us";
  if (s < 1) return Fixed(s * 1e3, s < 1e-2 ? 2 : s < 0.1 ? 1 : 0) + " ms";
  if (s < 120) return Fixed(s, s < 10 ? 1 : 0) + " s";
  if (s < 7200) return Fixed(s / 60, 0) + " min";
  if (s < 2 * 86400) return Fixed(s / 3600, 1) + " h";
  return Fixed(s / 86400, 1) + " days";
}

std::string Thousands(double whole) {
  std::string digits = Fixed(whole, 0);
  for (int at = static_cast<int>(digits.size()) - 3; at > (digits[0] == '-' ? 1 : 0); at -= 3) {
    digits.insert(static_cast<size_t>(at), ",");
  }
  return digits;
}

std::string Tokens(double tokens) { return Thousands(tokens) + " tokens"; }

std::string Join(const std::vector<std::string>& parts, std::string_view between) {
  std::string out;
  for (const std::string& part : parts) {
    if (!out.empty()) out += between;
    out += part;
  }
  return out;
}

}  // namespace prefixd::bench
