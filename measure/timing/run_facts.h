// Collects the facts without which a benchmark's figures mean nothing: program, command, commit,
// date and machine. Every benchmark's JSON has them as its member "run", and scripts/results.py
// shows them. It needs only the standard library, because its users have nothing else.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace prefixd::bench {

// Returns name and value of each fact of this process: program, command, commit, date, machine.
std::vector<std::pair<std::string, std::string>> RunFacts();

// Returns the same as a JSON object, for writers that have no JSON library.
std::string RunFactsJson();

// Returns `text` as a JSON string in quotation marks.
std::string QuotedJson(const std::string& text);

}  // namespace prefixd::bench
