#include "storage/catalog/gone_history.h"

#include <rocksdb/db.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <memory>

namespace prefixd::storage {
namespace {

Error GoneError(const rocksdb::Status& status) {
  return {status.IsCorruption() ? Code::kCorrupt : Code::kIo,
          "catalog: reading what is gone: " + status.ToString()};
}

std::string Number(uint64_t number) {
  std::string out(sizeof(number), '\0');
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = static_cast<char>(number >> (8 * (out.size() - 1 - i)));
  }
  return out;
}

std::optional<uint64_t> ParseNumber(rocksdb::Slice bytes) {
  if (bytes.size() != sizeof(uint64_t)) return std::nullopt;
  uint64_t number = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    number = number << 8 | static_cast<uint8_t>(bytes[i]);
  }
  return number;
}

std::string BlockKey(const BlockHash& block) {
  return "g" + std::string(reinterpret_cast<const char*>(block.data()), block.size());
}

}  // namespace

Status GoneHistory::Load(rocksdb::DB& db) {
  std::lock_guard lock(mutex_);
  std::unique_ptr<rocksdb::Iterator> it(db.NewIterator(rocksdb::ReadOptions()));
  for (it->Seek("r"); it->Valid() && it->key().starts_with("r"); it->Next()) {
    rocksdb::Slice rest = it->key();
    rest.remove_prefix(1);
    const auto number = ParseNumber(rest);
    if (!number) continue;
    next_ = std::max(next_, *number + 1);
    const auto record = DecodeGone({it->value().data(), it->value().size()});
    const std::string tenant = record.ok() ? record->tenant : "";
    tenant_of_[*number] = tenant;
    of_tenant_[tenant].push_back(*number);
  }
  if (!it->status().ok()) return GoneError(it->status());
  return {};
}

// A record that cannot be read goes all the same, so that it does not stand in the way of removals.
// Its blocks' entries stay; Find passes over them.
void GoneHistory::Drop(rocksdb::DB& db, uint64_t number, rocksdb::WriteBatch& batch) {
  std::string value;
  const std::string key = "r" + Number(number);
  const rocksdb::Status read = db.Get(rocksdb::ReadOptions(), key, &value);
  if (const auto record = DecodeGone(value); read.ok() && record.ok()) {
    for (const BlockHash& block : record->blocks) batch.Delete(BlockKey(block) + Number(number));
  }
  batch.Delete(key);
  const auto at = tenant_of_.find(number);
  const auto own = of_tenant_.find(at->second);
  std::erase(own->second, number);
  if (own->second.empty()) of_tenant_.erase(own);
  tenant_of_.erase(at);
}

// The lists may run ahead of a batch that then fails: that costs a record, and the next Load counts
// anew.
void GoneHistory::Add(rocksdb::DB& db, const GoneRecord& record, rocksdb::WriteBatch& batch) {
  std::lock_guard lock(mutex_);
  while (tenant_of_.size() >= kMaxGone) {
    Drop(db, tenant_of_.begin()->first, batch);
  }
  while (true) {
    const auto own = of_tenant_.find(record.tenant);
    if (own == of_tenant_.end() || own->second.size() < kMaxGoneOfTenant) break;
    Drop(db, own->second.front(), batch);
  }
  const uint64_t number = next_++;
  batch.Put("r" + Number(number), EncodeGone(record));
  for (const BlockHash& block : record.blocks) batch.Put(BlockKey(block) + Number(number), "");
  tenant_of_[number] = record.tenant;
  of_tenant_[record.tenant].push_back(number);
}

Result<std::optional<GoneRecord>> GoneHistory::Find(rocksdb::DB& db, std::string_view tenant,
                                                    const BlockHash& block) const {
  const std::string prefix = BlockKey(block);
  std::optional<uint64_t> latest;
  std::optional<GoneRecord> found;
  std::unique_ptr<rocksdb::Iterator> it(db.NewIterator(rocksdb::ReadOptions()));
  for (it->Seek(prefix); it->Valid() && it->key().starts_with(prefix); it->Next()) {
    rocksdb::Slice rest = it->key();
    rest.remove_prefix(prefix.size());
    const auto number = ParseNumber(rest);
    if (!number || (latest && *number < *latest)) continue;
    std::string value;
    const rocksdb::Status read = db.Get(rocksdb::ReadOptions(), "r" + Number(*number), &value);
    if (read.IsNotFound()) continue;
    if (!read.ok()) return GoneError(read);
    auto record = DecodeGone(value);
    if (!record.ok() || record->tenant != tenant) continue;
    latest = number;
    found = *std::move(record);
  }
  if (!it->status().ok()) return GoneError(it->status());
  return found;
}

}  // namespace prefixd::storage
