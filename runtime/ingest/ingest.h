// What is derived from a segment after its rows are durable: checkpoints of summaries, indexes,
// and the choice of estimators. Resumable: what is stored already is not made again.
#pragma once

#include <string>

#include "runtime/derived/summaries.h"

namespace prefixd {

inline constexpr const char* kQueriesBlob = "queries";
// Empty; beside a segment whose sample was damaged, so that people see why it is untuned.
inline constexpr const char* kQueriesLostBlob = "queries.lost";
inline constexpr const char* kQueriesProducer = "queries/1";
inline constexpr const char* kChoiceBlob = "choice";

// Everything of one segment, from start to end; kCancelled when progress says so.
Status IngestSegment(const Rooms& rooms, const Model& model, const storage::SegmentId& id,
                     WorkProgress& progress);

// Whether a segment has all that IngestSegment makes, from the same producers.
bool IngestComplete(const Rooms& rooms, const Model& model, const storage::PrefixInfo& info);

// A damaged sample of queries was deleted: says so in the log, and beside the segment.
void ReportLostQueries(const Rooms& rooms, const storage::SegmentId& id);
// Something of it was lost: IngestComplete says no until IngestSegment has made it again.
Status MarkIncomplete(const Rooms& rooms, const storage::SegmentId& id);

}  // namespace prefixd
