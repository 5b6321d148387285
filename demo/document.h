// Makes the demo's prompt: a real document with facts planted in it, questions about them, and the
// document's own continuation, held out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::demo {

// A fact is a planted line "[key of WORD is 12345.]"; a question begins the same line again.
// models/README.md documents this form, on which the small model was trained.
struct Fact {
  std::string word;
  std::string answer;     // five digits
  uint32_t position = 0;  // token at which the line starts
  std::string Line() const { return "[key of " + word + " is " + answer + ".]\n"; }
  std::string Question() const { return "\n[key of " + word + " is "; }
};

struct DocumentOptions {
  std::filesystem::path file;
  uint32_t prompt_tokens = 8000;       // upper bound of the prompt with its facts
  uint32_t continuation_tokens = 192;  // held out, directly after the prompt
  uint32_t facts = 16;
  uint64_t seed = 1;
};

struct Document {
  std::string prompt;        // contains the facts
  std::string continuation;  // text that follows the prompt in the file
  std::vector<Fact> facts;   // sorted by position
};

// Checks that `text` is UTF-8; the error gives the offset of the first offending byte.
Status CheckUtf8(const std::string& text);

// Plants facts at line starts, spread evenly over the prompt. kNotFound: there is no such file;
// kInvalidArgument: it is not UTF-8, or too short for one fact and a continuation.
Result<Document> LoadDocument(const DocumentOptions& options);

}  // namespace prefixd::demo
