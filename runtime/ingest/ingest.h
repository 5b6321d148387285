// Derives data from a segment after its rows are durable: checkpoints of summaries, indexes, and
// the choice of estimators. The ingest resumes: it does not make again what is stored already.
#pragma once

#include <string>

#include "runtime/derived/blob_names.h"
#include "runtime/derived/derived_context.h"
#include "runtime/derived/models.h"
#include "runtime/work/work_progress.h"

namespace prefixd {

// Runs the whole ingest of one segment; kCancelled when `progress` is cancelled. Removes what older
// builds derived and no code reads any more.
Status IngestSegment(const DerivedContext& context, const Model& model,
                     const storage::SegmentId& id, WorkProgress& progress);

// Whether a segment has all that IngestSegment makes, from the same producers, and nothing that
// IngestSegment removes.
bool IngestComplete(const DerivedContext& context, const Model& model,
                    const storage::PrefixInfo& info);

// Records that a damaged query sample was deleted, in the log and beside the segment.
void ReportLostQueries(const DerivedContext& context, const storage::SegmentId& id);
// Makes IngestComplete return false until IngestSegment has made the lost data again.
Status MarkIncomplete(const DerivedContext& context, const storage::SegmentId& id);

}  // namespace prefixd
