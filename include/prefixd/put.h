// Says what a put stores, how far it is, and what became of it.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/stored_part.h"

namespace prefixd {

struct PutSpec {
  std::string model;
  std::string tenant;  // private per tenant; "" is a tenant of its own
  std::vector<uint32_t> tokens;
  std::string label;  // for people: shown by `prefixctl prefixes list`
  // The least lifetime of the prefix; a put never shortens the lifetime of a stored one.
  bool pinned = false;       // never evicted
  uint64_t ttl_seconds = 0;  // from the commit on; 0: for ever
  // The encoding of rows that this put stores (storage/segment/row_encoding.h); absent:
  // RuntimeOptions::encoding.
  std::optional<RowEncoding> encoding;
  // While another put stores tokens of this prompt that this one would store, too: BeginPut waits
  // so long for its end, and missing() is then what that one left; after that it is kUnavailable if
  // `alone`, and otherwise stores the tokens a second time unless the other commits first. Commit
  // waits as long for the other parts of its put.
  uint32_t wait_ms = 0;
  bool alone = false;
  // The rows are derived: a step below mode full went before them in the engine, or they were
  // computed over derived tokens (SessionInfo::exact_tokens). Derived rows serve those alone who
  // ask for them; a put that continues derived rows is derived, whatever it says.
  bool derived = false;
  // Derived rows that the put continues, instead of storing their tokens again: all, or those of a
  // lineage.
  bool accept_approximate = false;
  std::string lineage;
  // Fewer than all heads make the put a part: puts that are equal but for this and their waiting
  // (wait_ms, alone), with disjoint heads, store one prefix together (prefixd/store.h). A part with
  // heads of one that is under way waits for its end, up to wait_ms; then it is kUnavailable.
  HeadRange heads;
  // Rows of tokens from here on stream in while the engine computes them, so that their times say
  // how fast it prefills (EngineSpeed). Absent: they come out of a buffer, and say nothing of it.
  std::optional<uint32_t> prefill_from;
};

// How Session::Persist stores own tokens; what a member means is what PutSpec says.
struct PersistSpec {
  std::string label;
  bool pinned = false;
  uint64_t ttl_seconds = 0;
  std::optional<RowEncoding> encoding;
  uint32_t wait_ms = 0;
  bool alone = false;
  // The rows are derived for a reason that the session does not know: the engine computed them
  // behind something approximate of its own.
  bool derived = false;
};

// The progress of a put under way: tokens times layers whose rows have arrived, and all it needs.
struct PutProgress {
  uint64_t done = 0, total = 0;
};

// `prefix` names the prefix that holds the prompt; it is longer than the prompt when a longer one
// was stored before. Attach with (prefix, n_tokens), or with the prompt's tokens.
struct PutResult {
  std::string prefix;
  uint32_t n_tokens = 0;       // tokens of the prompt
  uint32_t stored_tokens = 0;  // newly stored by this put
  uint64_t bytes = 0;          // written to disk for rows
  double seconds = 0;          // from BeginPut to durable
  // Encoding of the segment in which the prompt ends, newly stored or found, and the relative error
  // of its encoded rows.
  RowEncoding encoding = RowEncoding::kAsGiven;
  EncodingError encoding_error;
  uint32_t exact_tokens = 0;  // tokens of the prompt before the first derived one
  // Names the derived rows in which the prompt ends, for who continues them: 32 random hex digits
  // that no list shows. Empty where all rows are exact.
  std::string lineage;
};

}  // namespace prefixd
