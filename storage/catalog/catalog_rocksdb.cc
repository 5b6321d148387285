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
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>
#include <rocksdb/write_buffer_manager.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

#include "storage/catalog/catalog.h"
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

// RocksDB's own log file is noise, so this logger passes on errors alone.
class QuietLogger final : public rocksdb::Logger {
 public:
  QuietLogger() : rocksdb::Logger(rocksdb::InfoLogLevel::ERROR_LEVEL) {}
  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list args) override {
    char line[512];
    std::vsnprintf(line, sizeof(line), format, args);
    std::string_view text(line);
    while (text.ends_with('\n')) text.remove_suffix(1);
    LogWarning("rocksdb: " + std::string(text));
  }
};

class RocksCatalog final : public Catalog {
 public:
  static Result<std::unique_ptr<Catalog>> Open(const std::filesystem::path& dir,
                                               const CatalogMeta& fresh,
                                               std::function<Status()> make_room) {
    rocksdb::Options options;
    options.create_if_missing = true;
    options.paranoid_checks = true;
    options.track_and_verify_wals_in_manifest = true;
    // RocksDB cuts the log at the first damage (a power cut may tear its last record). Commits that
    // go with it are not lost: their sealed segments carry numbers that the catalog has then not
    // decided about, and recovery commits them again.
    options.wal_recovery_mode = rocksdb::WALRecoveryMode::kPointInTimeRecovery;
    options.info_log = std::make_shared<QuietLogger>();
    options.compression = rocksdb::kNoCompression;  // hashes do not compress
    options.write_buffer_size = 4 << 20;
    options.max_write_buffer_number = 2;
    options.max_total_wal_size = 16 << 20;
    options.max_open_files = 64;
    options.max_background_jobs = 2;
    options.keep_log_file_num = 1;
    // Opening a store starts no threads that outlive their use: it has a few dozen table files at
    // most, and no code reads the statistics.
    options.max_file_opening_threads = 1;
    options.stats_dump_period_sec = 0;
    options.stats_persist_period_sec = 0;
    rocksdb::BlockBasedTableOptions table;
    table.block_cache = rocksdb::NewLRUCache(kCatalogCacheBytes);
    table.cache_index_and_filter_blocks = true;
    options.write_buffer_manager =
        std::make_shared<rocksdb::WriteBufferManager>(kCatalogCacheBytes / 2, table.block_cache);
    options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));

    auto catalog = std::make_unique<RocksCatalog>();
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
    return std::unique_ptr<Catalog>(std::move(catalog));
  }

  const CatalogMeta& meta() const override { return meta_; }

  Status PutModel(const ModelRecord& model) override {
    rocksdb::WriteBatch batch = NewBatch();
    batch.Put(Key('m', model.name), EncodeModel(model));
    return Write(batch, true, "storing a model");
  }

  Result<std::vector<ModelRecord>> LoadModels() const override {
    std::vector<ModelRecord> models;
    PREFIXD_TRY(Scan("m", [&](std::string_view, std::string_view value) -> Status {
      PREFIXD_ASSIGN(models.emplace_back(), DecodeModel(value));
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
    for (const SegmentId& id : change.remove) {
      PREFIXD_TRY(DeleteHashes(batch, id));
      for (const char kind : {'s', 'q', 'u', 'c'}) batch.Delete(Key(kind, Raw(id.bytes)));
    }
    for (const CatalogChange::Put& put : change.put) {
      const std::string_view id = Raw(put.record.id.bytes);
      batch.Put(Key('s', id), EncodeSegment(put.record));
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
      batch.Put(Key('a', Raw(alias.id.bytes)), EncodeAlias(alias));
    }
    PREFIXD_TRY(Write(batch, true, "committing"));
    for (const uint64_t number : deciding) sequences_.Decide(number);
    return {};
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
      auto record = DecodeSegment(value);
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
    for (CatalogSegment& s : segments) {
      const std::string_view id = Raw(s.record.id.bytes);
      PREFIXD_TRY(GetOptional(Key('q', id), s.quarantine));
      std::string used;
      PREFIXD_TRY(GetOptional(Key('u', id), used));
      if (used.size() >= sizeof(int64_t)) std::memcpy(&s.last_used_unix_ms, used.data(), 8);
      if (used.size() >= kUseBytes) std::memcpy(&s.heat, used.data() + 8, sizeof(s.heat));
      PREFIXD_TRY(GetTime('c', id, s.verified_unix_ms));
    }
    return segments;
  }

  Result<std::vector<AliasRecord>> LoadAliases() const override {
    std::vector<AliasRecord> aliases;
    PREFIXD_TRY(Scan("a", [&](std::string_view, std::string_view value) -> Status {
      PREFIXD_ASSIGN(aliases.emplace_back(), DecodeAlias(value));
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

  Status DeleteHashes(rocksdb::WriteBatch& batch, const SegmentId& segment) const {
    const std::string_view id = Raw(segment.bytes);
    std::string hashes;
    PREFIXD_TRY(GetOptional(Key('b', id), hashes));
    for (size_t at = 0; at + sizeof(BlockHash) <= hashes.size(); at += sizeof(BlockHash)) {
      batch.Delete(Key('h', std::string_view(hashes).substr(at, sizeof(BlockHash))).append(id));
    }
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

  // Leaves `unix_ms` as it is when there is no such row.
  Status GetTime(char kind, std::string_view segment, int64_t& unix_ms) const {
    std::string value;
    PREFIXD_TRY(GetOptional(Key(kind, segment), value));
    if (value.size() == sizeof(unix_ms)) std::memcpy(&unix_ms, value.data(), sizeof(unix_ms));
    return {};
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
  std::unique_ptr<rocksdb::DB> db_;
  CatalogMeta meta_;
  Sequences sequences_;
};

}  // namespace

Result<std::unique_ptr<Catalog>> Catalog::Open(const std::filesystem::path& dir,
                                               const CatalogMeta& fresh,
                                               std::function<Status()> make_room) {
  return RocksCatalog::Open(dir, fresh, std::move(make_room));
}

}  // namespace prefixd::storage
