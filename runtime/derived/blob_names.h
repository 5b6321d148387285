// Blobs beside a segment that several parts of the runtime read.
#pragma once

namespace prefixd {

inline constexpr const char* kQueriesBlob = "queries";
// Empty; beside a segment whose sample was damaged, so that people see why it is untuned.
inline constexpr const char* kQueriesLostBlob = "queries.lost";
inline constexpr const char* kQueriesProducer = "queries/1";
inline constexpr const char* kChoiceBlob = "choice";

}  // namespace prefixd
