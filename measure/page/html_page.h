// Makes one self-contained page of a run: no script, nothing that is fetched, light and dark by the
// reader's scheme, legible on narrow screens.
//
// Thread-safety: one thread at a time.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "measure/page/plot.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// The first row is the heading; cells of other columns than the first are set to the right when
// they begin with a digit.
using TextTable = std::vector<std::vector<std::string>>;

class HtmlPage {
 public:
  HtmlPage(std::string title, std::string subtitle)
      : title_(std::move(title)), subtitle_(std::move(subtitle)) {}

  void Verdict(const std::vector<std::string>& sentences);
  void Section(const std::string& title);
  void Paragraph(const std::string& text);
  void List(const std::vector<std::string>& items);
  void Table(const std::string& title, const TextTable& rows);
  void Figure(const Plot& plot) { body_ += FigureHtml(plot); }
  void Bars(const std::string& title, const std::string& caption, const std::vector<Bar>& bars) {
    body_ += BarsHtml(title, caption, bars);
  }
  void Facts(const std::vector<std::pair<std::string, std::string>>& facts);

  std::string Html() const;
  Status Write(const std::filesystem::path& file) const;  // kIo

 private:
  std::string title_, subtitle_, body_;
};

}  // namespace prefixd::bench
