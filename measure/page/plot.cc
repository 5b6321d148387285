#include "measure/page/plot.h"

#include <algorithm>
#include <cmath>

#include "measure/page/text.h"

namespace prefixd::bench {
namespace {

constexpr int kNarrowTicks = 7;
constexpr double kCharWidth = 6.6;  // of a letter, about; no font is measured

// Breaks a label that is wider than `width` into two lines.
std::vector<std::string> LabelLines(const std::string& label, double width) {
  if (kCharWidth * double(label.size()) <= width) return {label};
  size_t at = label.rfind(' ', label.size() / 2 + 4);
  if (at == std::string::npos) return {label};
  return {label.substr(0, at), label.substr(at + 1)};
}

std::string Number(double pixels) { return Fixed(pixels, 1); }

struct Frame {
  double left = 58, right = 14, top = 12, bottom = 46;
  int width, height;
  Scale x, y;

  double X(double value) const { return left + x.Part(value) * (width - left - right); }
  double Y(double value) const { return height - bottom - y.Part(value) * (height - top - bottom); }
};

std::string Line(const char* css, double x1, double y1, double x2, double y2) {
  return "<line class=\"" + std::string(css) + "\" x1=\"" + Number(x1) + "\" y1=\"" + Number(y1) +
         "\" x2=\"" + Number(x2) + "\" y2=\"" + Number(y2) + "\"/>";
}

std::string Text(const char* css, double x, double y, const std::string& text,
                 const std::string& more = "") {
  return "<text class=\"" + std::string(css) + "\" x=\"" + Number(x) + "\" y=\"" + Number(y) +
         "\"" + more + ">" + Escape(text) + "</text>";
}

std::string Axes(const Frame& f, const Plot& plot) {
  std::string out;
  const double bottom = f.height - f.bottom;
  for (const auto& [value, label] : f.x.ticks) {
    out += Line("grid", f.X(value), f.top, f.X(value), bottom);
    const bool last = value == f.x.high;
    out += Text(last ? "tick end" : "tick middle", last ? f.X(value) + 10 : f.X(value), bottom + 16,
                label);
  }
  for (const auto& [value, label] : f.y.ticks) {
    out += Line("grid", f.left, f.Y(value), f.width - f.right, f.Y(value));
    out += Text("tick end", f.left - 6, f.Y(value) + 4, label);
  }
  out += Line("axis", f.left, bottom, f.width - f.right, bottom);
  out += Line("axis", f.left, f.top, f.left, bottom);
  const auto lines = LabelLines(plot.x.label, f.width - f.left - f.right);
  for (size_t i = 0; i < lines.size(); ++i) {
    out += Text("label middle", (f.left + f.width - f.right) / 2,
                f.height - 8 - 16 * double(lines.size() - 1 - i), lines[i]);
  }
  const double middle = (f.top + bottom) / 2;
  out += Text("label middle", 13, middle, plot.y.label,
              " transform=\"rotate(-90 13 " + Number(middle) + ")\"");
  return out;
}

std::string Ground(const Frame& f, const std::vector<Cell>& cells) {
  std::string out;
  for (const Cell& c : cells) {
    const double x0 = f.X(c.x0), x1 = f.X(c.x1), y0 = f.Y(c.y1), y1 = f.Y(c.y0);
    const double strength = std::min(1.0, std::abs(c.value));
    if (strength < 0.02) continue;
    out += "<rect class=\"" + std::string(c.value > 0 ? "g1" : "g2") + "\" x=\"" + Number(x0) +
           "\" y=\"" + Number(y0) + "\" width=\"" + Number(x1 - x0) + "\" height=\"" +
           Number(y1 - y0) + "\" fill-opacity=\"" + Fixed(0.5 * strength, 2) + "\"/>";
  }
  return out;
}

// Lines that lie on each other stay visible: the first are the widest.
double Width(size_t i, size_t n) { return 2 + 0.8 * double(n - 1 - i); }

std::string Lines(const Frame& f, const std::vector<Series>& series) {
  std::string out;
  for (size_t i = 0; i < series.size(); ++i) {
    const Series& s = series[i];
    if (s.points.empty()) continue;
    std::string path;
    for (const auto& [x, y] : s.points) path += Number(f.X(x)) + "," + Number(f.Y(y)) + " ";
    path.pop_back();
    const std::string css = "s" + std::to_string(s.colour % kSeriesColours);
    out += "<polyline class=\"line " + css + "\" stroke-width=\"" +
           Number(Width(i, series.size())) + "\"" +
           (s.dash.empty() ? "" : " stroke-dasharray=\"" + s.dash + "\"") + " points=\"" + path +
           "\"><title>" + Escape(s.name) + "</title></polyline>";
    for (const auto& [x, y] : s.points) {
      if (!s.dots && s.points.size() > 1) break;
      out += "<circle class=\"dot " + css + "\" cx=\"" + Number(f.X(x)) + "\" cy=\"" +
             Number(f.Y(y)) + "\" r=\"" + Number(1.5 + Width(i, series.size()) / 2) + "\"><title>" +
             Escape(s.name + ": " + Short(x) + ", " + Short(y)) + "</title></circle>";
    }
  }
  return out;
}

bool IsNarrow(int width) { return width < 500; }

std::string MarkName(const Mark& mark, const Scale& x) {
  return mark.name + (mark.x > x.high ? " (beyond the axis)" : "");
}

// Names stand beside their line, on the side where there is more room, each in the first row where
// it covers no other. A narrow drawing has no room for names: it has the marks' numbers, which the
// legend names.
std::string Marks(const Frame& f, const std::vector<Mark>& marks) {
  std::string out;
  std::vector<std::vector<std::pair<double, double>>> rows;  // what is taken of each
  for (const Mark& m : marks) {
    const double x = f.X(std::clamp(m.x, f.x.low, f.x.high));
    const std::string name =
        IsNarrow(f.width) ? std::to_string(&m - marks.data() + 1) : MarkName(m, f.x);
    const double width = kCharWidth * double(name.size());
    const bool to_left = x - f.left > f.width - f.right - x;
    // A long name begins inside the drawing, whatever it then covers.
    const double begin = std::max(2.0, to_left ? x - 5 - width : x + 5);
    size_t row = 0;
    const auto taken = [&] {
      return row < rows.size() && std::ranges::any_of(rows[row], [&](const auto& other) {
               return begin < other.second + 8 && other.first < begin + width + 8;
             });
    };
    while (taken()) ++row;
    if (row == rows.size()) rows.emplace_back();
    rows[row].emplace_back(begin, begin + width);
    out += Line("mark", x, f.top, x, f.height - f.bottom);
    out += Text("markname", begin, f.top + 16 + 16 * double(row), name);
  }
  return out;
}

std::string Legend(const Plot& plot) {
  std::string out = "<ul class=\"legend\">";
  const auto item = [&](const std::string& drawing, const std::string& name) {
    out += "<li><svg width=\"34\" height=\"12\" viewBox=\"0 0 34 12\" aria-hidden=\"true\">" +
           drawing + "</svg>" + Escape(name) + "</li>";
  };
  for (const Series& s : plot.series) {
    const std::string css = "s" + std::to_string(s.colour % kSeriesColours);
    item("<polyline class=\"line " + css + "\" stroke-width=\"2.5\"" +
             (s.dash.empty() ? "" : " stroke-dasharray=\"" + s.dash + "\"") +
             " points=\"1,6 33,6\"/>",
         s.name + (s.points.empty() ? " (outside of the plot)" : ""));
  }
  for (const auto& [css, name] : {std::pair{"g1", plot.first_ground}, {"g2", plot.second_ground}}) {
    if (name.empty()) continue;
    item("<rect class=\"" + std::string(css) +
             "\" x=\"1\" y=\"1\" width=\"32\" height=\"10\" fill-opacity=\"0.5\"/>",
         name);
  }
  out += "</ul>";
  if (plot.marks.empty()) return out;
  out += "<ul class=\"legend narrow\">";
  const Scale x = ScaleOf(plot.x, kNarrowTicks);
  for (size_t i = 0; i < plot.marks.size(); ++i) {
    out += "<li>" + std::to_string(i + 1) + ": " + Escape(MarkName(plot.marks[i], x)) + "</li>";
  }
  return out + "</ul>";
}

}  // namespace

std::string PlotSvg(const Plot& plot, int width, int height) {
  Frame f;
  f.width = width;
  f.height = height;
  f.bottom += 16 * double(LabelLines(plot.x.label, width - f.left - f.right).size() - 1);
  f.x = ScaleOf(plot.x, IsNarrow(width) ? kNarrowTicks : 12);
  f.y = ScaleOf(plot.y, 10);
  return "<svg class=\"" + std::string(IsNarrow(width) ? "narrow" : "wide") + "\" viewBox=\"0 0 " +
         std::to_string(width) + " " + std::to_string(height) + "\" role=\"img\" aria-label=\"" +
         Escape(plot.title) + "\">" + Ground(f, plot.cells) + Axes(f, plot) +
         Lines(f, plot.series) + Marks(f, plot.marks) + "</svg>";
}

std::string FigureHtml(const Plot& plot) {
  return "<figure><h3>" + Escape(plot.title) + "</h3>" + PlotSvg(plot, 720, 400) +
         PlotSvg(plot, 350, 320) + Legend(plot) + "<figcaption>" + Escape(plot.caption) +
         "</figcaption></figure>\n";
}

double BarsEnd(const std::vector<Bar>& bars) {
  double high = 1.2;
  for (const Bar& b : bars) high = std::max(high, b.high);
  return ScaleOf({"", 0, high, false}, 8).high;
}

std::string BarsHtml(const std::string& title, const std::string& caption,
                     const std::vector<Bar>& bars) {
  const Scale scale = ScaleOf({"", 0, BarsEnd(bars), false}, 8);
  const auto part = [&](double v) { return Fixed(100 * std::clamp(scale.Part(v), 0.0, 1.0), 1); };
  std::string out = "<figure><h3>" + Escape(title) + "</h3><div class=\"bars\">";
  for (const Bar& b : bars) {
    out +=
        "<div class=\"barname\">" + Escape(b.name) +
        "</div><div class=\"bar\"><i style=\"width:" + part(b.median) +
        "%\"></i><u style=\"left:" + part(b.low) + "%;width:" +
        Fixed(std::max(0.0, 100 * (scale.Part(std::min(b.high, scale.high)) - scale.Part(b.low))),
              1) +
        "%\"></u><s style=\"left:" + part(1) + "%\"></s></div><div class=\"bartext\">" +
        Escape(b.text) + "</div>";
  }
  return out + "</div><figcaption>" + Escape(caption) + "</figcaption></figure>\n";
}

}  // namespace prefixd::bench
