#include "bench/attention/report.h"

#include <cstdio>
#include <fstream>

#include "measure/timing/run_facts.h"

namespace prefixd::bench {

void Report::Value(const std::string& name, const std::vector<double>& samples) {
  values_.push_back({name, Summarise(samples)});
}

void Report::Ratio(const std::string& name, const std::vector<double>& samples) {
  ratios_.push_back({name, Summarise(samples)});
}

void Report::PrintRatios() const {
  std::printf("\n  %-34s %8s %8s %8s\n", "ratio", "median", "25%", "75%");
  for (const Named& r : ratios_) {
    std::printf("  %-34s %8.3f %8.3f %8.3f\n", r.name.c_str(), r.spread.median, r.spread.low,
                r.spread.high);
  }
}

bool Report::WriteJson(const std::string& path) const {
  std::ofstream out(path);
  out << "{\n \"bench\": \"attention\",\n \"run\": " << RunFactsJson();
  for (const Text& fact : facts_) out << ",\n \"" << fact.name << "\": " << fact.json;
  const auto list = [&](const char* name, const std::vector<Named>& all, bool spreads) {
    out << ",\n \"" << name << "\": {";
    for (size_t i = 0; i < all.size(); ++i) {
      const Spread& s = all[i].spread;
      out << (i ? "," : "") << "\n  \"" << all[i].name << "\": ";
      if (spreads) {
        out << "[" << s.low << ", " << s.high << "]";
      } else {
        out << s.median;
      }
    }
    out << "\n }";
  };
  list("values", values_, false);
  list("values_quartiles", values_, true);
  list("ratios", ratios_, false);
  list("ratios_quartiles", ratios_, true);
  out << "\n}\n";
  return static_cast<bool>(out.flush());
}

}  // namespace prefixd::bench
