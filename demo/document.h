// The demo's prompt: a real document with facts planted in it, questions about them, and the
// document's own continuation, held out.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::demo {

// A planted line "[key of WORD is 12345.]"; asked by the same line begun again. Documented in
// models/README.md: the small model was trained on this form.
struct Fact {
  std::string word;
  std::string answer;     // five digits
  uint32_t position = 0;  // token at which the line starts
  std::string Line() const { return "[key of " + word + " is " + answer + ".]\n"; }
  std::string Question() const { return "\n[key of " + word + " is "; }
};

struct DocumentOptions {
  std::filesystem::path file;
  uint32_t prompt_tokens = 8000;       // upper bound of the prompt, bytes of text included
  uint32_t continuation_tokens = 192;  // held out, right after the prompt
  uint32_t facts = 16;
  uint64_t seed = 1;
};

struct Document {
  std::string prompt;        // with the facts in it
  std::string continuation;  // text that follows the prompt in the file
  std::vector<Fact> facts;   // by position
};

// Checks that `text` is UTF-8; the offset of the first offending byte otherwise.
Status CheckUtf8(const std::string& text);

// kNotFound: no such file; kInvalidArgument: not UTF-8, or too short for one fact and a
// continuation. Facts are planted at line starts, spread evenly over the prompt.
Result<Document> LoadDocument(const DocumentOptions& options);

}  // namespace prefixd::demo
