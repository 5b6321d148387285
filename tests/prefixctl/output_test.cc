#include "prefixctl/show/output.h"

#include "tests/support/test.h"

namespace prefixd::ctl {
namespace {

TEST(PrefixctlOutput, WhatATerminalWouldObeyIsEscaped) {
  EXPECT_EQ(Printable("plain text, with spaces"), "plain text, with spaces");
  EXPECT_EQ(Printable("Grüße, 你好, 🙂"), "Grüße, 你好, 🙂");
  EXPECT_EQ(Printable("\x1b[31mred\x1b]0;title\x07"), "\\x1b[31mred\\x1b]0;title\\x07");
  EXPECT_EQ(Printable("one\ntwo\tthree\r"), "one\\ntwo\\tthree\\x0d");
  EXPECT_EQ(Printable(std::string("a\0b\x7f", 4)), "a\\x00b\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"  // the 8-bit form of ESC [
                      "2J"),
            "\\xc2\\x9b2J");
  EXPECT_EQ(Printable("\x9b"
                      "2J\xff\xe4\xbd"),
            "\\x9b2J\\xff\\xe4\\xbd");
}

TEST(PrefixctlOutput, TablesEscapeTheirCells) {
  ::testing::internal::CaptureStdout();
  PrintTable({{"ID", "LABEL"}, {"7", "bad\x1b[2J\nid  label"}, {"8", "good"}});
  std::fflush(stdout);
  EXPECT_EQ(::testing::internal::GetCapturedStdout(),
            "ID  LABEL\n7   bad\\x1b[2J\\nid  label\n8   good\n");
}

}  // namespace
}  // namespace prefixd::ctl
