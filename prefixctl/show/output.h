// Prints prefixctl's output: aligned tables for people, JSON for programs, progress on stderr.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/progress.h"
#include "prefixd/result.h"

namespace prefixd::ctl {

std::string Bytes(uint64_t n);               // "1.5 GiB"
std::string Time(int64_t unix_ms);           // "2026-01-31 12:00:00" UTC, "-" for 0
std::string Duration(uint64_t ms);           // "3 d 04:05:06"
void PrintJson(const nlohmann::json& json);  // indented; bytes that are no UTF-8 are replaced
// Writes out what was printed. kIo: it could not be written, as on a full disk, and the command has
// no success.
Status FinishOutput();

// Makes a text safe for a terminal: control characters (C0, DEL, C1) and bytes that are no UTF-8
// become \n, \t or \xNN, so that a label cannot move the cursor or imitate other output.
std::string Printable(std::string_view text);

// The first row is the heading; a column is as wide as its widest cell. Cells are made printable.
std::string TableText(const std::vector<std::vector<std::string>>& rows);
void PrintTable(const std::vector<std::vector<std::string>>& rows);
// Prints "name   value" lines.
void PrintFields(const std::vector<std::pair<std::string, std::string>>& fields);

// Redraws one line on a terminal and prints a line every few seconds elsewhere; prints nothing when
// `quiet`. The call also takes over SIGINT and SIGTERM: the first makes the progress function
// cancel the work, so that nothing half-done is left; the second ends the process.
ProgressFn ShowProgress(std::string what, bool quiet);

}  // namespace prefixd::ctl
