// Tests the page: texts are escaped, numbers are on it, nothing is fetched; and axes have a tick at
// either end.
#include <cmath>
#include <random>
#include <string>

#include "measure/page/axis.h"
#include "measure/page/html_page.h"
#include "measure/page/plot.h"
#include "measure/page/text.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(TextTest, EscapesAndWritesNumbers) {
  EXPECT_EQ(Escape("<a href=\"x\">&'\x01"), "&lt;a href=&quot;x&quot;&gt;&amp;&#39; ");
  EXPECT_EQ(Short(0), "0");
  EXPECT_EQ(Short(0.01234), "0.0123");
  EXPECT_EQ(Short(16384), "16.4k");
  EXPECT_EQ(Short(1000), "1k");
  EXPECT_EQ(Short(999.9), "1k");
  EXPECT_EQ(Short(2.5e6), "2.5M");
  EXPECT_EQ(Thousands(1234567), "1,234,567");
  EXPECT_EQ(Thousands(999), "999");
  EXPECT_EQ(Thousands(-1234), "-1,234");
  EXPECT_EQ(Percent(0.011), "1.1%");
  EXPECT_EQ(Percent(0.0118), "1.2%");
  EXPECT_EQ(Percent(1), "100%");
  EXPECT_EQ(Seconds(0.0123), "12.3 ms");
  EXPECT_EQ(GigaBytes(2.5e9), "2.50 GB");
}

TEST(AxisTest, HasTicksAtBothEndsAndHoldsTheData) {
  std::mt19937_64 rng(testing::Seed("AxisTest.HasTicksAtBothEndsAndHoldsTheData"));
  std::uniform_real_distribution<double> exponent(-6, 9);
  for (int i = 0; i < 2000; ++i) {
    double low = std::pow(10, exponent(rng)), high = std::pow(10, exponent(rng));
    if (low > high) std::swap(low, high);
    for (const bool logarithmic : {false, true}) {
      for (const int most : {5, 12}) {
        const Scale s = ScaleOf({"x", low, high, logarithmic}, most);
        ASSERT_GE(s.ticks.size(), 2u);
        EXPECT_LE(s.ticks.size(), size_t(most) + 1);
        EXPECT_DOUBLE_EQ(s.ticks.front().first, s.low);
        EXPECT_NEAR(s.ticks.back().first, s.high, 1e-9 * s.high);
        EXPECT_LE(s.low, low * (1 + 1e-5));
        EXPECT_GE(s.high, high * (1 - 1e-5));
        EXPECT_NEAR(s.Part(s.low), 0, 1e-9);
        EXPECT_NEAR(s.Part(s.high), 1, 1e-9);
      }
    }
  }
}

TEST(AxisTest, TheMapsAxesAreAsWritten) {
  const Scale xi = ScaleOf({"xi", 1, 100, true}, 12);
  ASSERT_EQ(xi.ticks.size(), 7u);
  EXPECT_EQ(xi.ticks[1].second, "2");
  EXPECT_EQ(xi.ticks.back().second, "100");
  const Scale gamma = ScaleOf({"gamma", 1, 10, false}, 11);
  EXPECT_DOUBLE_EQ(gamma.low, 1);
  EXPECT_DOUBLE_EQ(gamma.high, 10);
}

Plot TwoLines() {
  Plot plot;
  plot.title = "Lines & <marks>";
  plot.x = {"x", 1, 100, true};
  plot.y = {"y", 1, 10, false};
  plot.series.push_back({"first <1>", {{1, 2}, {100, 3}}, 0, "", true});
  plot.series.push_back({"second", {}, 1, "4 4", false});
  plot.marks = {{8, "the SSD"}, {5000, "far"}};
  plot.caption = "a caption";
  return plot;
}

TEST(PlotTest, ShowsNamesValuesAndMarks) {
  const std::string html = FigureHtml(TwoLines());
  EXPECT_TRUE(Has(html, "Lines &amp; &lt;marks&gt;"));
  EXPECT_TRUE(Has(html, "first &lt;1&gt;"));
  EXPECT_TRUE(Has(html, "second (outside of the plot)"));
  EXPECT_TRUE(Has(html, "the SSD"));
  EXPECT_TRUE(Has(html, "far (beyond the axis)"));
  EXPECT_TRUE(Has(html, "<svg class=\"wide\""));
  EXPECT_TRUE(Has(html, "<svg class=\"narrow\""));
  EXPECT_FALSE(Has(html, "<marks>"));
  EXPECT_FALSE(Has(html, "nan"));
}

// Where there is no room for names, marks have numbers and the legend says whose they are.
TEST(PlotTest, ANarrowDrawingNumbersItsMarks) {
  Plot plot = TwoLines();
  plot.marks = {{8, "rows in host memory, steps on CUDA: xi = 1"},
                {90, "rows on the SSD, steps on CUDA: xi = 80"},
                {5000, "far"}};
  const std::string narrow = PlotSvg(plot, 350, 320), wide = PlotSvg(plot, 720, 400);
  EXPECT_FALSE(Has(narrow, "steps on CUDA"));
  EXPECT_TRUE(Has(narrow, ">3</text>"));
  EXPECT_TRUE(Has(wide, "steps on CUDA"));
  const std::string html = FigureHtml(plot);
  EXPECT_TRUE(Has(html, "<ul class=\"legend narrow\"><li>1: rows in host memory, steps on CUDA"));
  EXPECT_TRUE(Has(html, "<li>3: far (beyond the axis)</li>"));
  // No name begins outside of the drawing.
  plot.marks = {{60, std::string(200, 'x')}};
  const std::string text = PlotSvg(plot, 720, 400);
  EXPECT_TRUE(Has(text, "<text class=\"markname\" x=\"2.0\"")) << text;
}

TEST(PageTest, HoldsWhatItWasGivenAndFetchesNothing) {
  HtmlPage page("A <title>", "sub & title");
  page.Verdict({"It pays from 1.35 on."});
  page.Table("Times", {{"method", "ms"}, {"Top-K <1%>", "1.234"}});
  page.Facts({{"processor", "a \"CPU\""}});
  page.Figure(TwoLines());
  page.Bars("Ratios", "to fio", {{"put", "0.97", 0.9, 0.97, 1.1}});
  testing::TempDir dir;
  ASSERT_TRUE(page.Write(dir / "page.html").ok());
  const std::string html = testing::ReadFile(dir / "page.html");
  EXPECT_EQ(html, page.Html());
  for (const char* part :
       {"A &lt;title&gt;", "sub &amp; title", "It pays from 1.35 on.", "1.234", "Top-K &lt;1%&gt;",
        "a &quot;CPU&quot;", "prefers-color-scheme:dark", "name=\"viewport\"", "0.97"}) {
    EXPECT_TRUE(Has(html, part)) << part;
  }
  for (const char* part : {"http:", "https:", "<script", "url(", "<img"}) {
    EXPECT_FALSE(Has(html, part)) << part;
  }
  EXPECT_EQ(page.Write("/nonexistent/page.html").error().code, Code::kIo);
}

// On a narrow screen a row of many columns is a list, and each cell says what it is of.
TEST(PageTest, CellsOfWideTablesNameTheirColumns) {
  HtmlPage page("t", "s");
  page.Table("wide", {{"a", "b <ms>", "c", "d"}, {"x", "5 [4, 6] MB/s", "7", "8"}});
  page.Table("narrow", {{"a", "b"}, {"x", "1"}});
  const std::string html = page.Html();
  EXPECT_TRUE(Has(html, "<table class=\"many\">"));
  EXPECT_TRUE(Has(html, "data-of=\"b &lt;ms&gt;\"><span>5 <span class=\"q\">[4, 6]</span> MB/s"))
      << html;
  EXPECT_TRUE(Has(html, "<table><tbody><tr><th><span>a</span></th><th class=\"n\">")) << html;
}

}  // namespace
}  // namespace prefixd::bench
