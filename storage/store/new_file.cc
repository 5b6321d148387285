#include "storage/store/new_file.h"

#include <utility>

#include "storage/segment/unix_time.h"

namespace prefixd::storage {

Result<NewFile> CreateNewFile(StoreCore& core, const std::string& tenant,
                              const SegmentHeader& header, std::string manifest,
                              std::vector<uint32_t> token_ids) {
  NewFile out;
  SegmentFilePlan plan;
  plan.header = header;
  plan.manifest = std::move(manifest);
  plan.header.manifest_bytes = plan.manifest.size();
  PREFIXD_ASSIGN(plan.cipher, EncryptNewFile(core.keys.get(), &plan.header));
  PREFIXD_ASSIGN(const SegmentLayout layout, plan.header.Layout());
  // A better layout does not justify an eviction: without room the rewrite waits.
  PREFIXD_ASSIGN(out.space, core.room->Reserve(tenant, layout.file_bytes(), Room::kAsItIs));
  plan.path = SegmentPath(core.options.dir, header.file);
  plan.token_ids = std::move(token_ids);
  plan.direct = core.direct;
  plan.max_buffer_bytes = core.options.max_inflight_bytes;
  plan.slabs = core.slabs;
  plan.memory = core.options.MemoryOf(tenant);
  PREFIXD_ASSIGN(out.writer, SegmentFileWriter::Create(*core.engine, std::move(plan)));
  if (out.writer->allocated()) out.space.Allocated();
  return out;
}

Result<SegmentManifest> ManifestOf(StoreCore& core, const SegmentRecord& record) {
  PREFIXD_ASSIGN(const RequestScope scope, core.models->Resolve(record.model, record.tenant));
  return SegmentManifest{scope.model,
                         record.tenant,
                         record.label,
                         core.catalog->meta().block_tokens,
                         record.listed,
                         core.tree.AliasesInto(record.id),
                         {},
                         record.live};
}

Status SealNewFile(StoreCore& core, SegmentFileWriter& writer, const SegmentRecord& record) {
  PREFIXD_TRY(writer.Seal(record.sequence, NowUnixMs(), record.encoding_error));
  core.counters.bytes_written += writer.bytes_written();
  core.counters.bytes_rewritten += writer.bytes_written();
  return {};
}

}  // namespace prefixd::storage
