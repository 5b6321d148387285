// How prefixctl shows things: aligned tables for people, JSON for programs, progress on stderr.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/types.h"

namespace prefixd::ctl {

std::string Bytes(uint64_t n);               // "1.5 GiB"
std::string Time(int64_t unix_ms);           // "2026-01-31 12:00:00" UTC, "-" for 0
std::string Duration(uint64_t ms);           // "3 d 04:05:06"
void PrintJson(const nlohmann::json& json);  // indented; bytes that are no UTF-8 are replaced

// As it may stand on a terminal: control characters (C0, DEL, C1) and bytes that are no UTF-8
// become \n, \t or \xNN, so that a label cannot move the cursor or pass for other output.
std::string Printable(std::string_view text);

// Columns as wide as their widest cell; the first row is the heading. Cells are made printable.
void PrintTable(const std::vector<std::vector<std::string>>& rows);
// "name   value" lines.
void PrintFields(const std::vector<std::pair<std::string, std::string>>& fields);

// Redraws one line on a terminal; elsewhere a line every few seconds. Nothing when `quiet`. From
// the call on, the first SIGINT or SIGTERM makes it ask for an end, so that nothing half-done is
// left; the second ends the process.
ProgressFn ShowProgress(std::string what, bool quiet);

}  // namespace prefixd::ctl
