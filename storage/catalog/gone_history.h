// Keeps the history of what is gone in the catalog's database: at most kMaxGone records, and
// kMaxGoneOfTenant of a tenant; the oldest gives way. Keys:
//   r <number, big-endian>          -> the record (segment/gone_record.h)
//   g <block> <number, big-endian>  -> empty
//
// Only who has a prompt's tokens can name its blocks, and a record is found for its own tenant
// alone.
//
// Thread-safety: Add and Find may be called concurrently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "prefixd/result.h"
#include "storage/segment/gone_record.h"

namespace rocksdb {
class DB;
class WriteBatch;
}  // namespace rocksdb

namespace prefixd::storage {

inline constexpr size_t kMaxGone = 8192, kMaxGoneOfTenant = 512;

class GoneHistory {
 public:
  Status Load(rocksdb::DB& db);
  // Adds the record to the batch, and the removal of those that give way to it, whether they can be
  // read or not.
  void Add(rocksdb::DB& db, const GoneRecord& record, rocksdb::WriteBatch& batch);
  // Returns the latest record of this tenant that names the block. A record that does not decode is
  // left out.
  Result<std::optional<GoneRecord>> Find(rocksdb::DB& db, std::string_view tenant,
                                         const BlockHash& block) const;

 private:
  void Drop(rocksdb::DB& db, uint64_t number, rocksdb::WriteBatch& batch);

  mutable std::mutex mutex_;
  uint64_t next_ = 1;
  std::map<uint64_t, std::string> tenant_of_;  // by number, oldest first
  std::map<std::string, std::deque<uint64_t>, std::less<>> of_tenant_;
};

}  // namespace prefixd::storage
