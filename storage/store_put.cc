#include <algorithm>

#include "storage/crash_point.h"
#include "storage/errors.h"
#include "storage/segment_file_writer.h"
#include "storage/store_core.h"

namespace prefixd::storage {
namespace {

constexpr size_t kMaxLabelBytes = 4096;
constexpr int kMatchAttempts = 16;

// What a put is about; fixed at BeginPut.
struct PutPlan {
  StoreCore::Scope scope;
  std::vector<uint32_t> tokens;  // the whole prompt
  std::vector<BlockHash> hashes;
  std::string label;
  Match match;
  ChainPin pin;  // of the segment that the new one continues
};

class PutWriter final : public SegmentWriter {
 public:
  PutWriter(std::shared_ptr<StoreCore> core, PutPlan plan)
      : core_(std::move(core)), plan_(std::move(plan)) {}
  ~PutWriter() override { Abort(); }

  // Creates the file, unless there is nothing new to store.
  Status Start() {
    if (range().size() == 0) return {};
    const ModelRecord& model = plan_.scope.model;
    SegmentFilePlan file;
    file.manifest = EncodeManifest(
        {model, plan_.scope.tenant, plan_.label, core_->catalog->meta().block_tokens});
    SegmentHeader& header = file.header;
    header.store = core_->identity.store;
    RandomBytes(id_.bytes);
    header.segment = id_.bytes;
    if (plan_.match.n_tokens > 0) header.parent = plan_.match.id.bytes;
    header.model = model.fingerprint;
    header.tokens = range();
    header.n_layers = model.geometry.n_layers;
    header.n_kv_heads = model.geometry.n_kv_heads;
    header.key_dim = model.geometry.key_dim;
    header.value_dim = model.geometry.value_dim;
    header.dtype = model.geometry.dtype;
    header.manifest_bytes = file.manifest.size();
    header.created_unix_ms = created_unix_ms_ = NowUnixMs();
    PREFIXD_ASSIGN(const SegmentLayout layout, header.Layout());
    PREFIXD_ASSIGN(space_, core_->Reserve(layout.file_bytes()));
    CrashPoint("put.begin");
    file.path = SegmentPath(core_->options.dir, id_);
    file.token_ids.assign(plan_.tokens.begin() + header.tokens.begin, plan_.tokens.end());
    file.direct = core_->direct;
    file.max_buffer_bytes = core_->options.max_inflight_bytes;
    PREFIXD_ASSIGN(file_, SegmentFileWriter::Create(*core_->engine, std::move(file)));
    CrashPoint("put.created");
    return {};
  }

  TokenRange range() const override {
    return {plan_.match.n_tokens, static_cast<uint32_t>(plan_.tokens.size())};
  }

  Status WriteRows(uint32_t layer, uint32_t first, uint32_t n,
                   std::span<const std::byte> rows) override {
    PREFIXD_TRY(CheckOpen());
    if (!file_) {
      return InvalidArgument(
          "every token of this prompt is stored already; there is nothing to "
          "write");
    }
    return file_->WriteRows(layer, first, n, rows);
  }

  Result<SegmentId> Commit() override {
    PREFIXD_TRY(CheckOpen());
    if (!file_) return Finish(plan_.match.id);
    PREFIXD_TRY(file_->CheckComplete());
    CrashPoint("put.before_seal");
    const uint64_t sequence = core_->next_sequence++;
    if (Status sealed = file_->Seal(sequence, NowUnixMs()); !sealed.ok()) {
      Abort();
      return sealed.error();
    }
    CrashPoint("put.sealed");
    core_->bytes_written += file_->bytes_written();
    return Publish(sequence);
  }

  void Abort() override {
    if (done_) return;
    done_ = true;
    if (file_) {
      file_->Discard();
      core_->puts_aborted++;
    }
    Release();
  }

 private:
  Status CheckOpen() const {
    if (!done_) return {};
    return Error{Code::kFailedPrecondition, "this put was committed or aborted before"};
  }

  // The commit point: after it the prefix is durable and visible.
  Result<SegmentId> Publish(uint64_t sequence) {
    std::lock_guard commit(core_->commit_mutex);
    // Another put of the same tokens may have come first; then its bytes serve.
    auto existing = core_->FindLongest(plan_.scope, plan_.hashes, plan_.tokens);
    if (existing.ok() && existing->n_tokens == plan_.tokens.size()) {
      file_->Discard();
      return Finish(existing->id);
    }
    SegmentRecord record;
    record.id = id_;
    record.sequence = sequence;
    record.model = plan_.scope.model.name;
    record.tenant = plan_.scope.tenant;
    record.label = plan_.label;
    if (plan_.match.n_tokens > 0) record.parent = plan_.match.id;
    record.tokens = range();
    record.first_token = plan_.tokens[record.tokens.begin];
    record.file_bytes = file_->layout().file_bytes();
    record.created_unix_ms = created_unix_ms_;
    const uint32_t block = core_->catalog->meta().block_tokens;
    const auto own_hashes = std::span(plan_.hashes).subspan(record.tokens.begin / block);
    CrashPoint("commit.begin");
    if (Status committed = core_->catalog->CommitSegment(record, own_hashes); !committed.ok()) {
      // Whether the row is on disk is unknown until the catalog is opened anew; recovery then
      // keeps or frees the file, so it must stay.
      done_ = true;
      core_->puts_aborted++;
      Release();
      return committed.error();
    }
    CrashPoint("commit.done");
    core_->tree.Insert({record, "", record.created_unix_ms}, plan_.scope.id);
    core_->puts++;
    return Finish(id_);
  }

  SegmentId Finish(const SegmentId& id) {
    done_ = true;
    core_->Touch(id);
    CrashPoint("commit.before_acknowledgement");
    Release();
    return id;
  }

  void Release() {
    space_.Release();
    plan_.pin.Release();
  }

  // Destroyed in reverse: everything below needs the core.
  const std::shared_ptr<StoreCore> core_;
  PutPlan plan_;
  SegmentId id_;
  int64_t created_unix_ms_ = 0;
  SpaceReservation space_;
  std::unique_ptr<SegmentFileWriter> file_;
  bool done_ = false;
};

// Matches and pins what was matched; tries again when a removal comes between.
Status MatchAndPin(StoreCore& core, PutPlan& plan) {
  for (int attempt = 0; attempt < kMatchAttempts; ++attempt) {
    PREFIXD_ASSIGN(plan.match, core.FindLongest(plan.scope, plan.hashes, plan.tokens));
    // A few tokens in common (BOS, a chat header) must not chain unrelated prompts to one another:
    // the first could never be removed, and damage to it would take all of them away.
    if (plan.match.n_tokens < core.catalog->meta().block_tokens &&
        plan.match.n_tokens < plan.tokens.size()) {
      plan.match = {};
    }
    if (plan.match.n_tokens == 0) return {};
    auto pin = core.tree.Pin(plan.match.id);
    if (pin.ok()) {
      plan.pin = std::move(*pin);
      return {};
    }
  }
  return Error{Code::kUnavailable, "the stored prefix keeps changing; try again"};
}

}  // namespace

Result<std::unique_ptr<SegmentWriter>> BeginPut(std::shared_ptr<StoreCore> core,
                                                std::string_view model, std::string_view tenant,
                                                std::span<const uint32_t> tokens,
                                                std::string_view label) {
  if (tokens.empty()) return InvalidArgument("a prefix needs at least one token");
  if (tokens.size() > 1u << 31) return InvalidArgument("a prefix has at most 2^31 tokens");
  if (label.size() > kMaxLabelBytes) return InvalidArgument("a label has at most 4096 bytes");
  PutPlan plan;
  PREFIXD_ASSIGN(plan.scope, core->ResolveScope(model, tenant));
  plan.tokens.assign(tokens.begin(), tokens.end());
  plan.hashes =
      BlockHashes(plan.scope.model.fingerprint, tenant, tokens, core->catalog->meta().block_tokens);
  plan.label = label;
  PREFIXD_TRY(MatchAndPin(*core, plan));
  auto writer = std::make_unique<PutWriter>(std::move(core), std::move(plan));
  PREFIXD_TRY(writer->Start());
  return std::unique_ptr<SegmentWriter>(std::move(writer));
}

}  // namespace prefixd::storage
