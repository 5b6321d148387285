// Describes a stored prefix, for lists and for whoever asks after one.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "prefixd/ingest.h"
#include "prefixd/stored_part.h"

namespace prefixd {

struct PrefixSummary {
  std::string id, model, tenant, label;
  uint32_t n_tokens = 0, own_tokens = 0, children = 0;
  uint64_t own_bytes = 0;
  int64_t created_unix_ms = 0, last_used_unix_ms = 0;
  bool quarantined = false;
  bool reclustered = false;     // rows lie by similarity of keys
  bool pinned = false;          // never evicted
  int64_t expires_unix_ms = 0;  // 0: never
  std::string quarantine;       // the reason
  IngestState ingest = IngestState::kPending;
  std::string ingest_error;
  RowEncoding encoding = RowEncoding::kAsGiven;  // for the rows of its own tokens
  EncodingError encoding_error;                  // the error of these rows
  uint32_t exact_tokens = 0;                     // those before the first derived one
  // Of a compressed prefix: how many of its own tokens have rows, for each KV head, and the bytes
  // that compressing saved. 0: not compressed.
  uint32_t kept_tokens = 0;
  uint64_t saved_bytes = 0;
};

struct PrefixDetail {
  PrefixSummary summary;
  std::vector<std::string> chain;  // root first
  std::vector<std::string> blobs;  // derived data stored beside the segment
  std::vector<HeadChoice> choices;
  std::vector<IndexRecall> indexes;  // for the segment in which the prefix ends
};

}  // namespace prefixd
