// Says how a stored prefix is compressed, and what that does to attention over it.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace prefixd {

// A compressed prefix keeps rows of some tokens alone, as many for each KV head: the sinks, the
// last tokens, and of those between them what a retention policy ranks highest. The others are in
// the summaries, and steps estimate them with the rest of what they do not retrieve.
struct CompressSpec {
  double keep = 0.25;  // the fraction of the tokens between sinks and tail, in (0, 1)
  // "window": the newest tokens. By the queries that the put kept: "local" (what the last 16 of
  // them attend to), "snapkv" (the same, pooled over neighbours), "global" (the largest decayed
  // share of attention in any window of 16 queries), "global-sum" and "global-mean" (the shares
  // added up, or averaged), "gkv" (global, less what doubles other keys; compares each key with all
  // others, or 4,096 of them), "h2o" (all attention, added up), "tova" (the last query's). "kvpop":
  // what scorers trained for this model make of keys and values.
  std::string policy = "gkv";
  // Of policy kvpop: the file of scorers that `python -m prefixd.retention --train` wrote, on the
  // machine that runs the store.
  std::string scorers;
  // Does not go on where the mean error of the compressed prefix is larger; 0: whatever it is.
  double max_error = 0;
  bool dry_run = false;  // only measures
  bool operator==(const CompressSpec&) const = default;
};

// The errors are relative l1 errors of a step's output against exact attention, on half of the kept
// queries: those that no policy sees. Of the prefix as it is and as it is compressed, each at the
// default policy's budget and with estimator moment.
struct CompressReport {
  bool compressed = false;    // it is now; false: measured alone, or refused
  std::string refused;        // why it was not, where max_error was exceeded
  uint32_t own_tokens = 0;    // of the segment in which the prefix ends, the one compressed
  uint32_t kept_tokens = 0;   // of them, for each KV head
  uint64_t bytes_before = 0;  // of the segment's file
  uint64_t bytes_after = 0;
  uint32_t queries_scored = 0;    // tokens whose queries the policy saw
  uint32_t queries_measured = 0;  // tokens whose queries the errors are of; 0: nothing was measured
  uint32_t measured_tokens = 0;   // of the prefix, which all those queries had seen
  uint32_t retrieved_tokens = 0;  // by a step of them, at the most
  double error_before = 0, error_after = 0;  // means over layers and heads
  struct Layer {
    uint32_t layer = 0;
    double error_before = 0, error_after = 0;  // means over its heads
    double worst_after = 0;                    // of its KV heads
    bool operator==(const Layer&) const = default;
  };
  std::vector<Layer> layers;
};

}  // namespace prefixd
