#include "storage/catalog/catalog_db_options.h"

#include <rocksdb/cache.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_buffer_manager.h>

#include <cstdarg>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "storage/catalog/catalog.h"
#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

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

}  // namespace

rocksdb::Options CatalogDbOptions() {
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
  return options;
}

}  // namespace prefixd::storage
