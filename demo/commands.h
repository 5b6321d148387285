// The commands of prefixd-demo that work with a daemon, one for each process of the story. They
// emit lines of JSON (events.h).
#pragma once

#include <iosfwd>
#include <string>

#include "demo/request.h"
#include "prefixd/result.h"

namespace prefixd::demo {

// Prefills the prompt cold, puts its KV cache, and answers the questions without prefixd.
Status RunPrefill(const std::string& address, const Request& request);

// Attaches to the stored prompt, answers the questions in each way of reading that is asked for,
// and measures each row of the table.
Status RunDecode(const std::string& address, const Request& request);

// Measures the same rows against a daemon without host tier, where a step finds nothing in memory.
Status RunCold(const std::string& address, const Request& request);

// Answers the first question in the first way of reading that is asked for, and emits what was
// read. Errors of the daemon are passed on: kInfeasible, kNotFound (the prefix is gone), kCorrupt
// (damaged).
Status RunAsk(const std::string& address, const Request& request);

// Compares ways of reading documents, over a store of its own (compare.h). The first line of `in`
// is a setup {"model_dir", "store_dir", "threads"}, each other one a document {"id", "prompt",
// "passages", "readings", "recorded", "logits"}; results come as soon as they are there. A document
// that an earlier run stored and did not finish needs no second prefill.
Status RunCompare(std::istream& in);

}  // namespace prefixd::demo
