// Draws plots as SVG for a page: lines, marked places, and a coloured ground. Colours are classes
// that the page's style defines for a light and a dark scheme.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "measure/page/axis.h"

namespace prefixd::bench {

inline constexpr int kSeriesColours = 7;

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // ascending in x
  int colour = 0;                                 // 0 .. kSeriesColours - 1
  std::string dash;                               // as in SVG's stroke-dasharray; empty: solid
  bool dots = false;                              // a dot at each point
};

// A line across the plot at x.
struct Mark {
  double x = 0;
  std::string name;
};

// A rectangle of the ground; `value` from -1 (the second colour) to 1 (the first one).
struct Cell {
  double x0 = 0, x1 = 0, y0 = 0, y1 = 0, value = 0;
};

struct Plot {
  std::string title, caption;
  Axis x, y;
  std::vector<Series> series;
  std::vector<Mark> marks;
  std::vector<Cell> cells;
  std::string first_ground, second_ground;  // what the two colours of the ground mean
};

// Two drawings of the plot, for wide and narrow screens, with one legend.
std::string FigureHtml(const Plot& plot);
// One drawing; the size is in pixels of the page.
std::string PlotSvg(const Plot& plot, int width, int height);

// A horizontal bar for each line with its quartiles, beside a line at 1: ratios to a floor.
struct Bar {
  std::string name, text;
  double low = 0, median = 0, high = 0;
};
double BarsEnd(const std::vector<Bar>& bars);  // where their axis ends; it begins at 0
std::string BarsHtml(const std::string& title, const std::string& caption,
                     const std::vector<Bar>& bars);

}  // namespace prefixd::bench
