// The catalog in RocksDB. Keys, by first byte:
//   v                        -> store meta
//   m <name>                 -> model record
//   s <segment id>           -> segment record
//   b <segment id>           -> its block hashes, concatenated (what removal has to delete)
//   h <hash> <segment id>    -> empty
//   q <segment id>           -> why it is quarantined
//   u <segment id>           -> last use, unix ms (written without sync)
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "storage/catalog.h"
#include "storage/errors.h"

namespace prefixd::storage {
namespace {

constexpr uint32_t kMetaBytes = 4 + 4 + 16;

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

// RocksDB's own log file is noise; only its errors are passed on.
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
                                               const CatalogMeta& fresh, LogDamage on_damage) {
    rocksdb::Options options;
    options.create_if_missing = true;
    options.paranoid_checks = true;
    options.track_and_verify_wals_in_manifest = true;
    // Damage in the log must not go unnoticed: RocksDB's default silently drops the commits after
    // it, and recovery would take their segments for orphans.
    options.wal_recovery_mode = on_damage == LogDamage::kRefuse
                                    ? rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords
                                    : rocksdb::WALRecoveryMode::kPointInTimeRecovery;
    options.info_log = std::make_shared<QuietLogger>();
    options.compression = rocksdb::kNoCompression;  // hashes do not compress
    options.write_buffer_size = 4 << 20;
    options.max_write_buffer_number = 2;
    options.max_total_wal_size = 16 << 20;
    options.max_open_files = 64;
    options.max_background_jobs = 2;
    options.keep_log_file_num = 1;
    rocksdb::BlockBasedTableOptions table;
    table.block_cache = rocksdb::NewLRUCache(8 << 20);
    options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));

    auto catalog = std::make_unique<RocksCatalog>();
    rocksdb::DB* db = nullptr;
    const rocksdb::Status status = rocksdb::DB::Open(options, dir.string(), &db);
    if (!status.ok()) return DbError(status, "open");
    catalog->db_.reset(db);
    PREFIXD_TRY(catalog->LoadOrWriteMeta(fresh));
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

  Status CommitSegment(const SegmentRecord& record, std::span<const BlockHash> hashes) override {
    const std::string_view id = Raw(record.id.bytes);
    rocksdb::WriteBatch batch = NewBatch();
    batch.Put(Key('s', id), EncodeSegment(record));
    std::string all;
    all.reserve(hashes.size_bytes());
    for (const BlockHash& hash : hashes) {
      batch.Put(Key('h', Raw(hash)).append(id), "");
      all += Raw(hash);
    }
    if (!all.empty()) batch.Put(Key('b', id), all);
    return Write(batch, true, "committing a segment");
  }

  Status RemoveSegment(const SegmentId& segment) override {
    const std::string_view id = Raw(segment.bytes);
    rocksdb::WriteBatch batch = NewBatch();
    std::string hashes;
    const rocksdb::Status found = db_->Get(rocksdb::ReadOptions(), Key('b', id), &hashes);
    if (!found.ok() && !found.IsNotFound()) return DbError(found, "reading block hashes");
    for (size_t at = 0; at + sizeof(BlockHash) <= hashes.size(); at += sizeof(BlockHash)) {
      batch.Delete(Key('h', std::string_view(hashes).substr(at, sizeof(BlockHash))).append(id));
    }
    for (const char kind : {'s', 'b', 'q', 'u'}) batch.Delete(Key(kind, id));
    return Write(batch, true, "removing a segment");
  }

  Status SetQuarantine(const SegmentId& segment, const std::string& reason) override {
    rocksdb::WriteBatch batch = NewBatch();
    const std::string key = Key('q', Raw(segment.bytes));
    reason.empty() ? batch.Delete(key) : batch.Put(key, reason);
    return Write(batch, true, "recording a quarantine");
  }

  Status SetLastUsed(const SegmentId& segment, int64_t unix_ms) override {
    rocksdb::WriteBatch batch = NewBatch();
    batch.Put(Key('u', Raw(segment.bytes)),
              rocksdb::Slice(reinterpret_cast<const char*>(&unix_ms), sizeof(unix_ms)));
    return Write(batch, false, "recording a use");
  }

  Result<std::vector<CatalogSegment>> LoadSegments() const override {
    std::vector<CatalogSegment> segments;
    PREFIXD_TRY(Scan("s", [&](std::string_view, std::string_view value) -> Status {
      CatalogSegment s;
      PREFIXD_ASSIGN(s.record, DecodeSegment(value));
      s.last_used_unix_ms = s.record.created_unix_ms;
      segments.push_back(std::move(s));
      return {};
    }));
    for (CatalogSegment& s : segments) {
      const std::string_view id = Raw(s.record.id.bytes);
      PREFIXD_TRY(GetOptional(Key('q', id), s.quarantine));
      std::string used;
      PREFIXD_TRY(GetOptional(Key('u', id), used));
      if (used.size() == sizeof(int64_t)) std::memcpy(&s.last_used_unix_ms, used.data(), 8);
    }
    return segments;
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

  Status Write(rocksdb::WriteBatch& batch, bool sync, const char* what) {
    rocksdb::WriteOptions options;
    options.sync = sync;
    const rocksdb::Status status = db_->Write(options, &batch);
    if (!status.ok()) return DbError(status, what);
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
      return Write(batch, true, "creating");
    }
    if (value.size() != kMetaBytes) {
      return Error{Code::kCorrupt, "catalog: the store's own record is malformed"};
    }
    std::memcpy(&meta_.format_version, value.data(), 4);
    std::memcpy(&meta_.block_tokens, value.data() + 4, 4);
    std::memcpy(meta_.store.data(), value.data() + 8, 16);
    return {};
  }

  std::unique_ptr<rocksdb::DB> db_;
  CatalogMeta meta_;
};

}  // namespace

Result<std::unique_ptr<Catalog>> Catalog::Open(const std::filesystem::path& dir,
                                               const CatalogMeta& fresh, LogDamage on_damage) {
  return RocksCatalog::Open(dir, fresh, on_damage);
}

}  // namespace prefixd::storage
