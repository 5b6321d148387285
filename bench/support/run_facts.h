// What a benchmark's figures are worth nothing without: which program, called how, built from which
// commit, on which day and machine. Every benchmark's JSON carries them as its member "run", and
// scripts/results.py shows them. Standard library alone, like what uses it.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace prefixd::bench {

// Name and value of each fact of this process: program, command, commit, date, machine.
std::vector<std::pair<std::string, std::string>> RunFacts();

// The same as a JSON object, for writers that have no JSON library.
std::string RunFactsJson();

// `text` between quotation marks, as JSON wants it.
std::string QuotedJson(const std::string& text);

}  // namespace prefixd::bench
