// What is derived from a segment after its rows are durable: checkpoints of summaries, indexes,
// and the choice of estimators. Resumable: what is stored already is not made again.
#pragma once

#include <string>

#include "runtime/derived/blob_names.h"
#include "runtime/derived/derived_context.h"
#include "runtime/derived/models.h"
#include "runtime/work/work_progress.h"

namespace prefixd {

// Everything of one segment, from start to end; kCancelled when progress says so. What older builds
// derived and nothing reads any more is removed.
Status IngestSegment(const DerivedContext& context, const Model& model,
                     const storage::SegmentId& id, WorkProgress& progress);

// Whether a segment has all that IngestSegment makes, from the same producers, and nothing that it
// removes.
bool IngestComplete(const DerivedContext& context, const Model& model,
                    const storage::PrefixInfo& info);

// A damaged sample of queries was deleted: says so in the log, and beside the segment.
void ReportLostQueries(const DerivedContext& context, const storage::SegmentId& id);
// Something of it was lost: IngestComplete says no until IngestSegment has made it again.
Status MarkIncomplete(const DerivedContext& context, const storage::SegmentId& id);

}  // namespace prefixd
