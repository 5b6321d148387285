// Makes up a log of chats with the statistics of a published one: the conversations of Mooncake's
// chatbot, an hour of them (FAST'25; the trace conversation_trace.jsonl of its release). Taken over
// are, as published: requests an hour, mean lengths of input and output, and the share of tokens
// that a cache without bound hits; and, as seen in the trace: one beginning for all, lengths from
// 900 tokens to 126,000, and minutes between the turns of a chat.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>

#include "measure/capacity/request_log.h"

namespace prefixd::bench {

// Chats begin at random moments. Each turn's prompt is the one before it, the answer, and a new
// question, at times with a document; blocks behind the first one belong to one chat.
struct ChatSpec {
  double hours = 1, requests_per_hour = 12'031;
  double another_turn = 0.42;    // how often a turn is followed by another one
  double short_share = 0.2;      // chats that begin with 900 to 1,200 tokens ...
  double median_tokens = 8'000;  // ... and of the others (lognormal), with `tokens_sigma`
  double tokens_sigma = 1.1;
  uint32_t most_tokens = 126'000;
  double median_pause_seconds = 130, pause_sigma = 1.2;  // lognormal
  double document_share = 0.12;                          // of later turns
  double median_document_tokens = 4'000, document_sigma = 1;
  uint32_t output_tokens = 343;  // mean; from half of it to one and a half
  uint64_t seed = 1;
};
RequestLog ChatRequests(const ChatSpec& spec, uint32_t block_tokens);

}  // namespace prefixd::bench
