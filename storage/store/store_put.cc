#include "storage/store/store_put.h"

#include <algorithm>
#include <optional>

#include "base/capture_errors.h"
#include "base/session_arguments.h"
#include "storage/catalog/segment_inspect.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/io/file.h"
#include "storage/segment/row_encoding.h"
#include "storage/segment/segment_file_writer.h"
#include "storage/segment/unix_time.h"
#include "storage/store/put_plan.h"
#include "storage/store/store_match.h"

namespace prefixd::storage {
namespace {

constexpr int kMatchAttempts = 16;

class PutWriter final : public SegmentWriter {
 public:
  PutWriter(std::shared_ptr<StoreCore> core, PutPlan plan)
      : core_(std::move(core)), plan_(std::move(plan)) {}
  ~PutWriter() override { Abort(); }

  // Creates the file, unless there is nothing new to store.
  Status Start() {
    if (range().size() == 0) return {};
    SegmentRecord named;
    named.model = plan_.scope.model.name;
    named.tenant = plan_.scope.tenant;
    named.label = plan_.label;
    PREFIXD_ASSIGN(record_memory_, core_->options.MemoryOf(named.tenant)
                                       .Take(MemoryKind::kCatalog, PrefixTree::MemoryBytes(named)));
    PREFIXD_TRY(CheckWritable(core_->options.dir));
    const ModelRecord& model = plan_.scope.model;
    SegmentFilePlan file;
    file.manifest = EncodeManifest({model,
                                    plan_.scope.tenant,
                                    plan_.label,
                                    core_->catalog->meta().block_tokens,
                                    true,
                                    {},
                                    {},
                                    plan_.options.live});
    SegmentHeader& header = file.header;
    header.store = core_->identity.store;
    RandomBytes(id_.bytes);
    header.segment = header.file = id_.bytes;
    if (plan_.match.n_tokens > 0) header.parent = plan_.match.id.bytes;
    header.model = model.fingerprint;
    header.tokens = range();
    header.SetGeometry(model.geometry);
    header.encoding = plan_.options.encoding;
    header.lineage = plan_.lineage;
    if (header.lineage != Lineage{}) header.incompat |= kIncompatDerivedRows;
    if (header.encoding != RowEncoding::kAsGiven) {
      header.incompat |= kIncompatEncodedRows;
      encoder_.emplace();
    }
    PREFIXD_ASSIGN(file.cipher, EncryptNewFile(core_->keys.get(), &header));
    header.manifest_bytes = file.manifest.size();
    header.created_unix_ms = created_unix_ms_ = NowUnixMs();
    PREFIXD_ASSIGN(const SegmentLayout layout, header.Layout());
    auto reserved = core_->room->Reserve(plan_.scope.tenant, layout.file_bytes(), Room::kMayEvict);
    if (!reserved.ok()) {
      NoteRefusal(reserved.error());
      return reserved.error();
    }
    space_ = *std::move(reserved);
    CrashPoint("put.begin");
    file.path = SegmentPath(core_->options.dir, header.file);
    file.token_ids.assign(plan_.tokens.begin() + header.tokens.begin, plan_.tokens.end());
    file.direct = core_->direct;
    // The bound is twice the disk's in-flight bytes, so that the disk has its next writes before
    // the caller comes with more.
    file.max_buffer_bytes = 2 * core_->options.max_inflight_bytes;
    file.slabs = core_->slabs;
    file.memory = core_->options.MemoryOf(plan_.scope.tenant);
    PREFIXD_ASSIGN(file_, SegmentFileWriter::Create(*core_->engine, std::move(file)));
    if (file_->allocated()) space_.Allocated();
    CrashPoint("put.created");
    return {};
  }

  TokenRange range() const override {
    return {plan_.match.n_tokens, static_cast<uint32_t>(plan_.tokens.size())};
  }

  Status CheckRun(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n) const override {
    PREFIXD_TRY(CheckOpen());
    PREFIXD_ASSIGN(heads, ResolvePutHeads(plan_.scope.model.geometry, heads));
    return file_ ? file_->CheckRun(layer, heads, first, n) : Status();
  }

  Status CheckComplete(HeadRange heads) const override {
    PREFIXD_TRY(CheckOpen());
    PREFIXD_ASSIGN(heads, ResolvePutHeads(plan_.scope.model.geometry, heads));
    return file_ ? file_->CheckComplete(heads) : Status();
  }

  Status WriteRows(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n,
                   std::span<const std::byte> rows) override {
    PREFIXD_TRY(CheckOpen());
    const KvGeometry& g = plan_.scope.model.geometry;
    PREFIXD_ASSIGN(heads, ResolvePutHeads(g, heads));
    if (!file_) {
      return InvalidArgument(
          "every token of this prompt is stored already; there is nothing to "
          "write");
    }
    if (!encoder_) return file_->WriteRows(layer, heads, first, n, rows);
    PREFIXD_TRY(file_->CheckRun(layer, heads, first, n));
    const RowShape row = g.row(layer);
    const HeadRange own = HeadsIn(g, layer, heads);
    if (const size_t expected = size_t{own.n} * n * row.bytes(); rows.size() != expected) {
      return InvalidArgument("rows of " + std::to_string(rows.size()) + " bytes instead of " +
                             std::to_string(expected));
    }
    const RowEncoder::Encoded encoded = encoder_->Encode(row, rows);
    if (encoded.not_finite) {
      return InvalidArgument("the row of layer " + std::to_string(layer) + ", KV head " +
                             std::to_string(own.first + *encoded.not_finite / n) + ", token " +
                             std::to_string(first + *encoded.not_finite % n) +
                             " holds NaN or Inf; nothing was stored of it");
    }
    return file_->WriteRows(layer, heads, first, n, encoded.rows);
  }

  Status AwaitRoom(uint32_t n) override {
    PREFIXD_TRY(CheckOpen());
    return file_ ? file_->AwaitRoom(n) : Status();
  }

  Result<SegmentId> Commit() override {
    PREFIXD_TRY(CheckOpen());
    if (!file_) return FinishStored(plan_.match);
    PREFIXD_TRY(CheckComplete({}));
    CrashPoint("put.before_seal");
    SequenceTicket sequence = core_->catalog->sequences().Next();
    if (Status sealed = file_->Seal(sequence.number(), NowUnixMs(), error()); !sealed.ok()) {
      Abort();
      return sealed.error();
    }
    CrashPoint("put.sealed");
    core_->counters.bytes_written += file_->bytes_written();
    PREFIXD_ASSIGN(const Match stored, Publish(sequence));
    if (stored.n_tokens > 0) {
      plan_.match = stored;  // nothing is new any more
      return FinishStored(stored);
    }
    if (!plan_.pin.empty()) core_->segments->Touch(plan_.match.id);
    Finish();
    return id_;
  }

  void Abort() override {
    if (done_) return;
    done_ = true;
    if (file_) {
      file_->Discard();
      core_->counters.puts_aborted++;
    }
    Release();
  }

 private:
  Status CheckOpen() const {
    if (!done_) return {};
    return Error{Code::kFailedPrecondition, "this put was committed or aborted before"};
  }

  // So that a later miss can be explained. Nothing else depends on it.
  void NoteRefusal(const Error& error) const {
    constexpr uint64_t kLeastFree = 32ull << 20;
    constexpr int64_t kAgainMs = 60'000;  // a client that tries again does not fill the history
    if (plan_.options.live) return;       // nobody asks for a session's own tokens
    const uint32_t first = plan_.match.n_tokens / core_->catalog->meta().block_tokens;
    if (error.code != Code::kResourceExhausted || plan_.hashes.size() <= first) return;
    // On a disk that is nearly full the ballast must not go for it.
    const auto free = FreeBytes(core_->options.dir);
    if (!free.ok() || *free < kLeastFree) return;
    const auto known = core_->catalog->FindGone(plan_.scope.tenant, plan_.hashes.back());
    if (!known.ok() || (*known && (*known)->reason == GoneReason::kRefused &&
                        NowUnixMs() - (*known)->unix_ms < kAgainMs)) {
      return;
    }
    (void)core_->catalog->NoteGone({GoneReason::kRefused,
                                    plan_.scope.tenant,
                                    {},
                                    range(),
                                    NowUnixMs(),
                                    error.message,
                                    SampleBlocks(std::span(plan_.hashes).subspan(first))});
  }

  // Searches for a put of the same tokens that came first, and makes this one visible if there is
  // none. The search reads the disk, so it goes without the lock, and again when others committed
  // meanwhile. A put that loses that race every time is stored beside its equal, if there is one.
  Result<Match> Publish(SequenceTicket& sequence) {
    Acceptance accept{plan_.options.accept.approximate, plan_.lineage};
    if (plan_.lineage == Lineage{}) accept = {};  // exact rows give way to exact ones alone
    for (int attempt = 0;; ++attempt) {
      const uint64_t seen = core_->tree.Inserted(plan_.scope.id);
      auto existing = FindLongest(*core_, plan_.scope, plan_.hashes, plan_.tokens, accept);
      if (existing.ok() && existing->n_tokens == plan_.tokens.size()) {
        // Held before this one goes: it may be evicted, removed or expire at any time.
        auto held = core_->tree.Pin(existing->id);
        if (!held.ok()) continue;
        plan_.pin = std::move(*held);
        file_->Discard();
        return existing;
      }
      std::lock_guard commit(core_->commit_mutex);
      if (attempt < kMatchAttempts && core_->tree.Inserted(plan_.scope.id) != seen) continue;
      PREFIXD_TRY(MakeVisible(sequence));
      return Match{};
    }
  }

  // Refuses a commit of which nothing is written yet: the put ends, and leaves nothing.
  Status CheckCommit() {
    Status may = core_->catalog->MayApply();
    if (may.ok() && !plan_.pin.empty()) {
      const auto sound = core_->tree.Pin(plan_.match.id);
      if (!sound.ok()) {
        may = Error{sound.error().code, sound.error().message +
                                            "; what this prompt continues was lost while it was "
                                            "put: put it again"};
      }
    }
    if (!may.ok()) Abort();
    return may;
  }

  // This is the commit point: after it the prefix is durable and visible. REQUIRES commit_mutex.
  Status MakeVisible(SequenceTicket& sequence) {
    PREFIXD_TRY(CheckCommit());
    SegmentRecord record;
    record.id = id_;
    record.file = id_.bytes;
    record.sequence = sequence.number();
    record.model = plan_.scope.model.name;
    record.tenant = plan_.scope.tenant;
    record.label = plan_.label;
    if (plan_.match.n_tokens > 0) record.parent = plan_.match.id;
    record.tokens = range();
    record.first_token = plan_.tokens[record.tokens.begin];
    const uint32_t block = core_->catalog->meta().block_tokens;
    if (record.is_root()) record.lead = LeadOf(plan_.tokens, block);
    record.file_bytes = file_->layout().file_bytes();
    record.created_unix_ms = created_unix_ms_;
    record.encoding = plan_.options.encoding;
    record.encoding_error = error();
    record.lineage = plan_.lineage;
    record.live = plan_.options.live;
    record.pinned = plan_.options.pinned;
    record.expires_unix_ms = Expires();
    CatalogChange change;
    change.put.push_back({record, OwnHashes(plan_.hashes, record.tokens.begin, block)});
    CrashPoint("put.before_commit");
    const Status committed = CaptureErrors([&]() -> Status {
      PREFIXD_TRY(core_->catalog->Apply(change));
      CrashPoint("put.committed");
      // The put is its first use: without one it would be the next to be evicted.
      space_.Settle([&] {
        core_->tree.Insert(
            {{record, "", core_->options.Now(), 1, record.created_unix_ms}, plan_.scope.id});
      });
      return {};
    });
    if (!committed.ok()) {
      // It is unknown whether the row is on disk until the catalog is opened anew; recovery then
      // keeps or frees the file, so the file must stay, and so must its part of the quota.
      sequence.LeaveOpen();
      done_ = true;
      space_.Keep();
      core_->counters.puts_aborted++;
      Release();
      return committed;
    }
    record_memory_.Release();
    core_->counters.puts++;
    return {};
  }

  // The prompt was stored before, so its id is the shortest name that keeps the whole prompt.
  Result<SegmentId> FinishStored(const Match& match) {
    const auto n_tokens = static_cast<uint32_t>(plan_.tokens.size());
    SegmentId name = match.id;
    uint32_t best = UINT32_MAX;
    const int64_t now = NowUnixMs();
    for (const AliasRecord& alias : core_->tree.AliasesInto(match.id)) {
      if (alias.n_tokens < n_tokens || alias.n_tokens >= best) continue;
      if (Expired(alias.expires_unix_ms, now)) continue;
      best = alias.n_tokens;
      name = alias.id;
    }
    if (Status kept = core_->names->Keep(name, plan_.options.pinned, Expires()); !kept.ok()) {
      Abort();
      return kept.error();
    }
    core_->segments->Touch(match.id);
    Finish();
    return name;
  }

  EncodingError error() const { return encoder_ ? encoder_->error() : EncodingError{}; }

  int64_t Expires() const {
    const auto ttl = static_cast<int64_t>(plan_.options.ttl_ms);
    return ttl == 0 ? 0 : NowUnixMs() + ttl;
  }

  void Finish() {
    done_ = true;
    Release();
  }

  void Release() {
    space_.Release();
    record_memory_.Release();
    plan_.pin.Release();
    plan_.open = {};
    plan_.model.reset();
  }

  // Members are destroyed in reverse order, and everything below needs the core.
  const std::shared_ptr<StoreCore> core_;
  PutPlan plan_;
  SegmentId id_;
  int64_t created_unix_ms_ = 0;
  SpaceReservation space_;
  MemoryCharge record_memory_;  // of what the tree will keep
  std::unique_ptr<SegmentFileWriter> file_;
  std::optional<RowEncoder> encoder_;  // where rows are not stored as given
  bool done_ = false;
};

}  // namespace

Result<std::unique_ptr<SegmentWriter>> BeginPut(std::shared_ptr<StoreCore> core,
                                                std::string_view model, std::string_view tenant,
                                                std::span<const uint32_t> tokens,
                                                std::string_view label, const PutOptions& options) {
  PREFIXD_ASSIGN(PutPlan plan, PlanPut(*core, model, tenant, tokens, label, options));
  auto writer = std::make_unique<PutWriter>(std::move(core), std::move(plan));
  PREFIXD_TRY(writer->Start());
  return std::unique_ptr<SegmentWriter>(std::move(writer));
}

}  // namespace prefixd::storage
