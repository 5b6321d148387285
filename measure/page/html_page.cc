#include "measure/page/html_page.h"

#include <cctype>
#include <fstream>

#include "measure/page/text.h"

namespace prefixd::bench {
namespace {

constexpr const char* kStyle = R"css(
:root{--bg:#fff;--fg:#1c1e21;--soft:#5b626b;--rule:#d5d9de;--grid:#e6e9ed;--card:#f5f7f9;
--s0:#1d5fd0;--s1:#b8430b;--s2:#187a3d;--s3:#7a2fc0;--s4:#b3164a;--s5:#0b6e78;--s6:#6b6257;
--g1:#2f7df0;--g2:#e8892b}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e8eb;--soft:#a3abb5;--rule:#3a4149;
--grid:#2a3037;--card:#1d2228;--s0:#7eb0ff;--s1:#ff9d5c;--s2:#74d58d;--s3:#c79bff;--s4:#ff85a6;
--s5:#5fd3dc;--s6:#c9bfb2;--g1:#3f86f0;--g2:#d97a1f}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:800px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:1.6em;margin:0}h2{font-size:1.25em;margin:2em 0 .4em;border-bottom:1px solid var(--rule)}
h3{font-size:1em;margin:0 0 .4em}
.sub{color:var(--soft);margin:.2em 0 1.2em}
.verdict{background:var(--card);border-left:4px solid var(--s0);padding:.7em 1em;margin:1em 0}
.verdict p{margin:.4em 0}
figure{margin:1.4em 0}figcaption{color:var(--soft);font-size:.9em;margin-top:.3em}
svg{display:block;width:100%;height:auto}svg.narrow,.legend.narrow{display:none}
.legend{list-style:none;margin:.5em 0;padding:0;font-size:.9em;display:flex;flex-wrap:wrap;gap:.2em 1.2em}
.legend li{display:flex;align-items:center;gap:.45em}.legend svg{width:34px;flex:none}
.grid{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.tick,.label,.markname{fill:var(--fg);font-size:12px}.label{font-size:13px}
.middle{text-anchor:middle}.end{text-anchor:end}
.mark{stroke:var(--fg);stroke-width:1.2;stroke-dasharray:2 3}
.markname{paint-order:stroke;stroke:var(--bg);stroke-width:3px}
.line{fill:none;stroke-linejoin:round}.dot{stroke:none}
.g1{fill:var(--g1)}.g2{fill:var(--g2)}rect.g1,rect.g2{shape-rendering:crispEdges}
.line.s0{stroke:var(--s0)}.line.s1{stroke:var(--s1)}.line.s2{stroke:var(--s2)}
.line.s3{stroke:var(--s3)}.line.s4{stroke:var(--s4)}.line.s5{stroke:var(--s5)}.line.s6{stroke:var(--s6)}
.dot.s0{fill:var(--s0)}.dot.s1{fill:var(--s1)}.dot.s2{fill:var(--s2)}.dot.s3{fill:var(--s3)}
.dot.s4{fill:var(--s4)}.dot.s5{fill:var(--s5)}.dot.s6{fill:var(--s6)}
.bars{display:grid;grid-template-columns:auto 1fr auto;gap:.5em .8em;align-items:center;font-size:.95em}
.bar{position:relative;height:18px;background:var(--card)}
.bar i{position:absolute;left:0;top:0;bottom:0;background:var(--s0);opacity:.75}
.bar u{position:absolute;top:8px;height:2px;background:var(--fg)}
.bar s{position:absolute;top:-4px;bottom:-4px;width:2px;background:var(--s1)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.92em;margin:.3em 0 1em}
th,td{padding:.25em .5em;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
th:first-child,td:first-child{padding-left:0}th:last-child,td:last-child{padding-right:0}
th{font-weight:600}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
th.n{vertical-align:bottom}.q{white-space:nowrap}
dl{display:grid;grid-template-columns:auto 1fr;gap:.15em 1em;font-size:.92em}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
@media(max-width:600px){main{padding:16px 12px 40px}svg.wide{display:none}svg.narrow{display:block}
.legend.narrow{display:block}
.bars{grid-template-columns:1fr}.bar{margin-top:-.3em}.bartext{margin-bottom:.6em}
.many,.many tbody,.many tr,.many td{display:block}.many tr:first-child{display:none}
.many tr{border-bottom:1px solid var(--rule);padding:.4em 0}
.many td,.many td.n{display:flex;justify-content:space-between;gap:1em;border:0;padding:.1em 0}
.many td:first-child{font-weight:600}.many td[data-of]::before{content:attr(data-of);color:var(--soft)}
.many td[data-of]{text-align:right}}
)css";

bool IsNumber(const std::string& cell) {
  return !cell.empty() &&
         (std::isdigit(static_cast<unsigned char>(cell[0])) || cell[0] == '>' || cell == "-");
}

// "5 [4, 6] MB/s": a narrow column breaks the cell before its quartiles and not inside them.
std::string CellHtml(const std::string& cell) {
  std::string html = Escape(cell);
  const size_t open = html.find(" ["), close = html.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return html;
  html.insert(close + 1, "</span>");
  html.insert(open + 1, "<span class=\"q\">");
  return html;
}

}  // namespace

void HtmlPage::Verdict(const std::vector<std::string>& sentences) {
  body_ += "<div class=\"verdict\">";
  for (const std::string& s : sentences) body_ += "<p>" + Escape(s) + "</p>";
  body_ += "</div>\n";
}

void HtmlPage::Section(const std::string& title) { body_ += "<h2>" + Escape(title) + "</h2>\n"; }

void HtmlPage::Paragraph(const std::string& text) { body_ += "<p>" + Escape(text) + "</p>\n"; }

void HtmlPage::List(const std::vector<std::string>& items) {
  body_ += "<ul>";
  for (const std::string& item : items) body_ += "<li>" + Escape(item) + "</li>";
  body_ += "</ul>\n";
}

// A table of many columns becomes a list of its rows on a narrow screen: each cell says what it is
// of.
void HtmlPage::Table(const std::string& title, const TextTable& rows) {
  if (rows.empty()) return;
  if (!title.empty()) body_ += "<h3>" + Escape(title) + "</h3>";
  const bool many = rows.front().size() > 3;
  body_ += "<div class=\"scroll\"><table" + std::string(many ? " class=\"many\"" : "") + "><tbody>";
  for (size_t r = 0; r < rows.size(); ++r) {
    body_ += "<tr>";
    for (size_t c = 0; c < rows[r].size(); ++c) {
      const std::string& cell = rows[r][c];
      const std::string& below =
          r == 0 && rows.size() > 1 && c < rows[1].size() ? rows[1][c] : cell;
      const char* tag = r == 0 ? "th" : "td";
      body_ += "<" + std::string(tag) + (c > 0 && IsNumber(below) ? " class=\"n\"" : "");
      if (many && r > 0 && c < rows.front().size() && !rows.front()[c].empty()) {
        body_ += " data-of=\"" + Escape(rows.front()[c]) + "\"";
      }
      body_ += "><span>" + CellHtml(cell) + "</span></" + tag + ">";
    }
    body_ += "</tr>";
  }
  body_ += "</tbody></table></div>\n";
}

void HtmlPage::Facts(const std::vector<std::pair<std::string, std::string>>& facts) {
  body_ += "<dl>";
  for (const auto& [name, value] : facts) {
    body_ += "<dt>" + Escape(name) + "</dt><dd>" + Escape(value) + "</dd>";
  }
  body_ += "</dl>\n";
}

std::string HtmlPage::Html() const {
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
         "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
         "<meta name=\"color-scheme\" content=\"light dark\"><title>" +
         Escape(title_) + "</title><style>" + kStyle + "</style></head><body><main><h1>" +
         Escape(title_) + "</h1><p class=\"sub\">" + Escape(subtitle_) + "</p>\n" + body_ +
         "</main></body></html>\n";
}

Status HtmlPage::Write(const std::filesystem::path& file) const {
  std::ofstream out(file, std::ios::binary);
  out << Html();
  if (!out.flush()) return Error{Code::kIo, "cannot write '" + file.string() + "'"};
  return {};
}

}  // namespace prefixd::bench
