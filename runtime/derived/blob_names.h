// Names the blobs beside a segment that several parts of the runtime read.
#pragma once

namespace prefixd {

inline constexpr const char* kQueriesBlob = "queries";
// An empty blob beside a segment whose query sample was damaged: it shows people why it is untuned.
inline constexpr const char* kQueriesLostBlob = "queries.lost";
inline constexpr const char* kQueriesProducer = "queries/1";
inline constexpr const char* kChoiceBlob = "choice";

}  // namespace prefixd
