// Keeps the catalog in RocksDB. Keys, by first byte:
//   v                        -> store meta
//   m <name>                 -> model record
//   s <segment id>           -> segment record
//   b <segment id>           -> its block hashes, concatenated (removal deletes these)
//   h <hash> <segment id>    -> empty
//   q <segment id>           -> why it is quarantined
//   a <alias id>             -> alias record
//   u <segment id>           -> last use, unix ms; decayed uses, float32 (written without sync)
//   c <segment id>           -> when it last verified, unix ms (written without sync)
//   p                        -> the scrub's position: file uuid, next page (written without sync)
//   n                        -> sequence numbers: the highest, then the undecided (uint64 each)
//   r, g                     -> what is gone, and its blocks (gone_history.h)
// The values of m, s and a are sealed where the store has a secret: they hold token ids and names.
#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/utilities/checkpoint.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "storage/catalog/catalog.h"
#include "storage/catalog/catalog_db_options.h"
#include "storage/catalog/gone_history.h"
#include "storage/catalog/manifest_tail.h"
#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

constexpr uint32_t kMetaBytes = 4 + 4 + 16;
constexpr size_t kUseBytes = sizeof(int64_t) + sizeof(float);  // older rows hold the time alone
constexpr size_t kScrubPositionBytes = 16 + 8;

Error DbError(const rocksdb::Status& status, const char* what) {
  const Code code = status.IsCorruption() ? Code::kCorrupt
                    : status.IsNoSpace()  ? Code::kResourceExhausted
                                          : Code::kIo;
  return {code, std::string("catalog: ") + what + ": " + status.ToString()};
}

std::string_view View(const rocksdb::Slice& s) { return {s.data(), s.size()}; }

std::string Key(char kind, std::string_view rest) { return kind + std::string(rest); }

template <size_t N>
std::string_view Raw(const std::array<uint8_t, N>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), N};
}

class RocksCatalog final : public Catalog {
 public:
  static Result<std::unique_ptr<Catalog>> Open(const std::filesystem::path& dir,
                                               const CatalogMeta& fresh,
                                               std::function<Status()> make_room,
                                               std::shared_ptr<const StoreSecret> secret) {
    const rocksdb::Options options = CatalogDbOptions();
    auto catalog = std::make_unique<RocksCatalog>();
    catalog->secret_ = std::move(secret);
    catalog->make_room_ = std::move(make_room);
    rocksdb::DB* db = nullptr;
    rocksdb::Status status = rocksdb::DB::Open(options, dir.string(), &db);
    if (status.IsCorruption()) {
      PREFIXD_ASSIGN(const auto cut, CutTornManifest(dir));
      if (cut) {
        LogWarning("catalog: the end of " + cut->file.filename().string() +
                   " was torn and is cut off; opening it again");
        status = rocksdb::DB::Open(options, dir.string(), &db);
        if (!status.ok()) PREFIXD_TRY(Restore(*cut));
      }
    }
    if (!status.ok()) return DbError(status, "open");
    catalog->db_.reset(db);
    PREFIXD_TRY(catalog->LoadOrWriteMeta(fresh));
    std::string numbers;
    PREFIXD_TRY(catalog->GetOptional("n", numbers));
    PREFIXD_TRY(catalog->sequences_.Restore(numbers));
    PREFIXD_TRY(catalog->gone_.Load(*db));
    return std::unique_ptr<Catalog>(std::move(catalog));
  }

  const CatalogMeta& meta() const override { return meta_; }

  Status PutModel(const ModelRecord& model) override {
    rocksdb::WriteBatch batch = NewBatch();
    PutSealed(batch, Key('m', model.name), EncodeModel(model));
    return Write(batch, true, "storing a model");
  }

  Result<std::vector<ModelRecord>> LoadModels() const override {
    std::vector<ModelRecord> models;
    PREFIXD_TRY(Scan("m", [&](std::string_view name, std::string_view value) -> Status {
      PREFIXD_ASSIGN(const std::string opened, Opened(Key('m', name), value));
      PREFIXD_ASSIGN(models.emplace_back(), DecodeModel(opened));
      return {};
    }));
    return models;
  }

  Status RemoveModel(std::string_view name) override {
    rocksdb::WriteBatch batch = NewBatch();
    batch.Delete(Key('m', name));
    return Write(batch, true, "removing a model");
  }

  Sequences& sequences() override { return sequences_; }

  Status Apply(const CatalogChange& change) override {
    rocksdb::WriteBatch batch = NewBatch();
    std::vector<uint64_t> deciding;
    for (const CatalogChange::Put& put : change.put) deciding.push_back(put.record.sequence);
    batch.Put("n", sequences_.Row(deciding));
    for (GoneRecord record : change.gone) {
      PREFIXD_ASSIGN(const std::vector<BlockHash> hashes, HashesOf(record.id));
      record.blocks = SampleBlocks(hashes);
      gone_.Add(*db_, record, batch);
    }
    for (const SegmentId& id : change.remove) {
      PREFIXD_TRY(DeleteHashes(batch, id));
      for (const char kind : {'s', 'q', 'u', 'c'}) batch.Delete(Key(kind, Raw(id.bytes)));
    }
    for (const CatalogChange::Put& put : change.put) {
      const std::string_view id = Raw(put.record.id.bytes);
      PutSealed(batch, Key('s', id), EncodeSegment(put.record));
      if (!put.hashes) continue;
      PREFIXD_TRY(DeleteHashes(batch, put.record.id));
      std::string all;
      all.reserve(put.hashes->size() * sizeof(BlockHash));
      for (const BlockHash& hash : *put.hashes) {
        batch.Put(Key('h', Raw(hash)).append(id), "");
        all += Raw(hash);
      }
      if (!all.empty()) batch.Put(Key('b', id), all);
    }
    for (const SegmentId& id : change.remove_aliases) batch.Delete(Key('a', Raw(id.bytes)));
    for (const AliasRecord& alias : change.put_aliases) {
      PutSealed(batch, Key('a', Raw(alias.id.bytes)), EncodeAlias(alias));
    }
    PREFIXD_TRY(Write(batch, true, "committing"));
    for (const uint64_t number : deciding) sequences_.Decide(number);
    return {};
  }

  Status MayApply() override { return make_room_ ? make_room_() : Status(); }
  Status NoteGone(const GoneRecord& record) override {
    rocksdb::WriteBatch batch = NewBatch();
    gone_.Add(*db_, record, batch);
    return Write(batch, false, "recording what is gone");
  }

  Result<std::optional<GoneRecord>> FindGone(std::string_view tenant,
                                             const BlockHash& block) const override {
    return gone_.Find(*db_, tenant, block);
  }

  Status SetQuarantine(const SegmentId& segment, const std::string& reason) override {
    rocksdb::WriteBatch batch = NewBatch();
    const std::string key = Key('q', Raw(segment.bytes));
    reason.empty() ? batch.Delete(key) : batch.Put(key, reason);
    return Write(batch, true, "recording a quarantine");
  }

  Status SetLastUsed(const SegmentId& segment, int64_t unix_ms, float heat) override {
    char value[kUseBytes];
    std::memcpy(value, &unix_ms, sizeof(unix_ms));
    std::memcpy(value + sizeof(unix_ms), &heat, sizeof(heat));
    rocksdb::WriteBatch batch = NewBatch();
    batch.Put(Key('u', Raw(segment.bytes)), rocksdb::Slice(value, sizeof(value)));
    return Write(batch, false, "recording a use");
  }

  Status SetVerified(const SegmentId& segment, int64_t unix_ms) override {
    return SetTime('c', segment, unix_ms, "recording a verification");
  }

  Status SetScrubPosition(const ScrubPosition& position) override {
    std::string value(Raw(position.file));
    value.append(reinterpret_cast<const char*>(&position.next_page), sizeof(uint64_t));
    rocksdb::WriteBatch batch = NewBatch();
    batch.Put("p", value);
    return Write(batch, false, "recording where the scrub stands");
  }

  Result<ScrubPosition> LoadScrubPosition() const override {
    ScrubPosition position;
    std::string value;
    PREFIXD_TRY(GetOptional("p", value));
    if (value.size() != kScrubPositionBytes) return position;
    std::memcpy(position.file.data(), value.data(), position.file.size());
    std::memcpy(&position.next_page, value.data() + position.file.size(), sizeof(uint64_t));
    return position;
  }

  Result<std::vector<CatalogSegment>> LoadSegments() const override {
    std::vector<CatalogSegment> segments;
    PREFIXD_TRY(Scan("s", [&](std::string_view id, std::string_view value) -> Status {
      CatalogSegment s;
      if (id.size() != s.record.id.bytes.size()) {
        return Error{Code::kCorrupt, "catalog: a segment's key has the wrong length"};
      }
      auto opened = Opened(Key('s', id), value);
      auto record = opened.ok() ? DecodeSegment(*opened) : Result<SegmentRecord>(opened.error());
      if (record.ok() && id == Raw(record->id.bytes)) {
        s.record = std::move(*record);
      } else if (record.ok() || record.error().code == Code::kCorrupt) {
        std::memcpy(s.record.id.bytes.data(), id.data(), id.size());
        s.record.file = s.record.id.bytes;  // unless it was rewritten
      } else {
        return record.error();
      }
      s.last_used_unix_ms = s.verified_unix_ms = s.record.created_unix_ms;
      segments.push_back(std::move(s));
      return {};
    }));
    // What else is known of them is scanned too, which is far less work than three gets for each.
    // Segments are in the order of their keys.
    const auto find = [&](std::string_view id) -> CatalogSegment* {
      const auto it = std::ranges::lower_bound(
          segments, id, {}, [](const CatalogSegment& s) { return Raw(s.record.id.bytes); });
      return it != segments.end() && Raw(it->record.id.bytes) == id ? &*it : nullptr;
    };
    PREFIXD_TRY(Scan("q", [&](std::string_view id, std::string_view why) -> Status {
      if (CatalogSegment* s = find(id)) s->quarantine = why;
      return {};
    }));
    PREFIXD_TRY(Scan("u", [&](std::string_view id, std::string_view used) -> Status {
      CatalogSegment* s = find(id);
      if (!s) return {};
      if (used.size() >= sizeof(int64_t)) std::memcpy(&s->last_used_unix_ms, used.data(), 8);
      if (used.size() >= kUseBytes) std::memcpy(&s->heat, used.data() + 8, sizeof(s->heat));
      return {};
    }));
    PREFIXD_TRY(Scan("c", [&](std::string_view id, std::string_view when) -> Status {
      CatalogSegment* s = find(id);
      if (s && when.size() == sizeof(int64_t)) std::memcpy(&s->verified_unix_ms, when.data(), 8);
      return {};
    }));
    return segments;
  }

  Status CopyTo(const std::filesystem::path& dir) const override {
    rocksdb::Checkpoint* made = nullptr;
    rocksdb::Status status = rocksdb::Checkpoint::Create(db_.get(), &made);
    const std::unique_ptr<rocksdb::Checkpoint> checkpoint(made);
    if (status.ok()) status = checkpoint->CreateCheckpoint(dir.string());
    if (!status.ok()) return DbError(status, "copying");
    return {};
  }

  Result<std::vector<AliasRecord>> LoadAliases() const override {
    std::vector<AliasRecord> aliases;
    PREFIXD_TRY(Scan("a", [&](std::string_view id, std::string_view value) -> Status {
      PREFIXD_ASSIGN(const std::string opened, Opened(Key('a', id), value));
      PREFIXD_ASSIGN(aliases.emplace_back(), DecodeAlias(opened));
      return {};
    }));
    return aliases;
  }

  Result<std::vector<SegmentId>> FindBlock(const BlockHash& hash) const override {
    std::vector<SegmentId> ids;
    PREFIXD_TRY(Scan(Key('h', Raw(hash)), [&](std::string_view rest, std::string_view) -> Status {
      SegmentId id;
      if (rest.size() != id.bytes.size()) {
        return Error{Code::kCorrupt, "catalog: a block hash key has the wrong length"};
      }
      std::memcpy(id.bytes.data(), rest.data(), rest.size());
      ids.push_back(id);
      return {};
    }));
    return ids;
  }

 private:
  static rocksdb::WriteBatch NewBatch() {
    return rocksdb::WriteBatch(0, 0, /*protection_bytes_per_key=*/8, 0);
  }

  // A sealed value is bound to its key, so that none can stand for another.
  void PutSealed(rocksdb::WriteBatch& batch, const std::string& key, std::string value) const {
    batch.Put(key, secret_ ? secret_->Seal(key, value) : std::move(value));
  }
  Result<std::string> Opened(const std::string& key, std::string_view value) const {
    if (!secret_) return std::string(value);
    return secret_->Open(key, value);
  }

  Result<std::vector<BlockHash>> HashesOf(const SegmentId& segment) const {
    std::string bytes;
    PREFIXD_TRY(GetOptional(Key('b', Raw(segment.bytes)), bytes));
    std::vector<BlockHash> hashes(bytes.size() / sizeof(BlockHash));
    if (!hashes.empty())
      std::memcpy(hashes.data(), bytes.data(), hashes.size() * sizeof(BlockHash));
    return hashes;
  }

  Status DeleteHashes(rocksdb::WriteBatch& batch, const SegmentId& segment) const {
    const std::string_view id = Raw(segment.bytes);
    PREFIXD_ASSIGN(const std::vector<BlockHash> hashes, HashesOf(segment));
    for (const BlockHash& hash : hashes) batch.Delete(Key('h', Raw(hash)).append(id));
    batch.Delete(Key('b', id));
    return {};
  }

  Status Write(rocksdb::WriteBatch& batch, bool sync, const char* what) {
    if (make_room_) PREFIXD_TRY(make_room_());
    rocksdb::WriteOptions options;
    options.sync = sync;
    const rocksdb::Status status = db_->Write(options, &batch);
    if (!status.ok()) return DbError(status, what);
    return {};
  }

  Status SetTime(char kind, const SegmentId& segment, int64_t unix_ms, const char* what) {
    rocksdb::WriteBatch batch = NewBatch();
    batch.Put(Key(kind, Raw(segment.bytes)),
              rocksdb::Slice(reinterpret_cast<const char*>(&unix_ms), sizeof(unix_ms)));
    return Write(batch, false, what);
  }

  Status GetOptional(const std::string& key, std::string& value) const {
    value.clear();
    const rocksdb::Status status = db_->Get(rocksdb::ReadOptions(), key, &value);
    if (!status.ok() && !status.IsNotFound()) return DbError(status, "reading");
    return {};
  }

  // Calls `row(rest of key, value)` for all keys that start with `prefix`.
  template <typename Row>
  Status Scan(const std::string& prefix, Row row) const {
    std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(rocksdb::ReadOptions()));
    for (it->Seek(prefix); it->Valid() && it->key().starts_with(prefix); it->Next()) {
      PREFIXD_TRY(row(View(it->key()).substr(prefix.size()), View(it->value())));
    }
    if (!it->status().ok()) return DbError(it->status(), "scanning");
    return {};
  }

  Status LoadOrWriteMeta(const CatalogMeta& fresh) {
    std::string value;
    PREFIXD_TRY(GetOptional("v", value));
    if (value.empty()) {
      meta_ = fresh;
      value.resize(kMetaBytes);
      std::memcpy(value.data(), &meta_.format_version, 4);
      std::memcpy(value.data() + 4, &meta_.block_tokens, 4);
      std::memcpy(value.data() + 8, meta_.store.data(), 16);
      rocksdb::WriteBatch batch = NewBatch();
      batch.Put("v", value);
      batch.Put("n", sequences_.Row({}));
      return Write(batch, true, "creating");
    }
    if (value.size() != kMetaBytes) {
      return Error{Code::kCorrupt, "catalog: the store's own record is malformed"};
    }
    std::memcpy(&meta_.format_version, value.data(), 4);
    std::memcpy(&meta_.block_tokens, value.data() + 4, 4);
    std::memcpy(meta_.store.data(), value.data() + 8, 16);
    if (meta_.format_version > fresh.format_version) {
      return Error{Code::kFailedPrecondition,
                   "the catalog has format version " + std::to_string(meta_.format_version) +
                       "; this prefixd knows up to " + std::to_string(fresh.format_version) +
                       ". It was left unchanged"};
    }
    if (meta_.format_version == fresh.format_version) return {};
    // Every older record is still read, so the upgrade raises the number alone.
    meta_.format_version = fresh.format_version;
    std::memcpy(value.data(), &meta_.format_version, 4);
    rocksdb::WriteBatch batch = NewBatch();
    batch.Put("v", value);
    return Write(batch, true, "upgrading");
  }

  std::function<Status()> make_room_;
  std::shared_ptr<const StoreSecret> secret_;
  std::unique_ptr<rocksdb::DB> db_;
  CatalogMeta meta_;
  Sequences sequences_;
  GoneHistory gone_;
};

}  // namespace

Result<std::unique_ptr<Catalog>> Catalog::Open(const std::filesystem::path& dir,
                                               const CatalogMeta& fresh,
                                               std::function<Status()> make_room,
                                               std::shared_ptr<const StoreSecret> secret) {
  return RocksCatalog::Open(dir, fresh, std::move(make_room), std::move(secret));
}

}  // namespace prefixd::storage
