// Answers one question about the stored prompt: attaches, asks, generates under a read budget, and
// prints what was read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "prefixd/result.h"

namespace prefixd::demo {

struct AskOptions {
  std::string address;  // the daemon's address
  std::filesystem::path state_file;
  std::optional<std::string> question;  // none: the question of the first planted fact
  std::string budget = "0.02";          // "0.01", "1%", or "all": everything is read
  uint32_t tokens = 7;                  // to generate; the answer to a planted fact is 7 bytes
  bool json = false;                    // print an object instead of text
};

// The question's tokens attend exactly, in one pass over the prompt, and the first generated token
// follows from them. Every further token is a step under the budget. kInvalidArgument: an invalid
// budget or an empty question. Errors of the daemon are passed on: kInfeasible, kNotFound (the
// prefix is gone), kCorrupt (damaged).
Status RunAsk(const AskOptions& options);

}  // namespace prefixd::demo
