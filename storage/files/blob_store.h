// Stores small files beside segments: <segment>.<name>.blob, replaced atomically (temp, sync,
// rename, directory sync), read whole and verified. They are files and not catalog rows because
// indexes reach megabytes, and a rename already is the transaction they need.
//
// Thread-safety: all methods may be called concurrently. Callers pin the segment.
#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "storage/catalog/prefix_tree.h"
#include "storage/catalog/tenant_bytes.h"
#include "storage/crypt/key_ring.h"
#include "storage/io/io_engine.h"

namespace prefixd::storage {

class BlobStore {
 public:
  // read_deadline bounds the read of a whole blob (not in the scrub), then kUnavailable; 0: none.
  // keys: new blobs are encrypted under their newest; null: not.
  BlobStore(const std::filesystem::path& dir, IoEngine& engine,
            std::chrono::milliseconds read_deadline, std::shared_ptr<const KeyRing> keys = nullptr)
      : dir_(dir), engine_(engine), read_deadline_(read_deadline), keys_(std::move(keys)) {}

  // `tenant` is the segment's: the blob's bytes count there.
  Status Put(const SegmentId& id, const std::string& tenant, std::string_view name,
             std::string_view producer, std::span<const std::byte> bytes);
  // Encrypts it under the newest key if it is not yet. Returns whether it was written anew; a
  // missing blob is none, and so is a damaged one. REQUIRES: there are keys.
  Result<bool> Reencrypt(const SegmentId& id, const std::string& tenant, std::string_view name);
  // kNotFound: there is no blob, or another producer's. kCorrupt: it does not verify. Other errors
  // say nothing about the stored bytes.
  Result<std::vector<std::byte>> Get(const SegmentId& id, std::string_view name,
                                     std::string_view producer) const;
  // Reads and verifies the blob of any producer. Returns the file's bytes.
  Result<uint64_t> Check(const SegmentId& id, std::string_view name, IoPriority priority) const;
  // Deletes the file; a missing file is no error.
  Status Remove(const SegmentId& id, std::string_view name);
  // Deletes the file, unless it verifies after all. Returns whether it did.
  Result<bool> DropDamaged(const SegmentId& id, std::string_view name);

  std::vector<std::string> List(const SegmentId& id) const;
  uint64_t BytesOf(const SegmentId& id) const;
  TenantBytes Usage() const;
  uint64_t TotalBytes() const;
  // Returns the physical bytes of a blob file with this payload.
  uint64_t BytesFor(std::string_view name, std::string_view producer, size_t payload) const;
  // Records a file found at open.
  void Register(const SegmentId& id, const std::string& tenant, std::string_view name,
                uint64_t file_bytes);
  // Removes the files of a segment that is gone from the catalog.
  Status RemoveAll(const SegmentId& id);

 private:
  struct Blob {
    std::string producer;
    std::vector<std::byte> payload;
    uint64_t file_bytes = 0;
    std::optional<KeyId> key;  // that it is encrypted under
  };
  struct File {
    uint64_t bytes = 0;
    uint64_t version = 0;  // another one after each replacement
  };
  struct Files {
    std::string tenant;
    std::map<std::string, File, std::less<>> blobs;  // by name
  };
  // Writes a blob's file, unless the file of that name has become another than `version` (not 0).
  // Returns whether it did.
  Result<bool> Write(const SegmentId& id, const std::string& tenant, std::string_view name,
                     std::string_view producer, std::span<const std::byte> bytes, uint64_t version);
  uint64_t VersionOf(const SegmentId& id, std::string_view name) const;  // 0: none; needs mutex_
  Result<Blob> Read(const SegmentId& id, std::string_view name, IoPriority priority) const;
  // Reads once more if the blob does not verify, and a few times more, with growing pauses, when
  // the system could not read it.
  Result<Blob> ReadPatiently(const SegmentId& id, std::string_view name, IoPriority priority) const;
  Status RemoveLocked(const SegmentId& id, std::string_view name);  // needs mutex_
  void Note(const SegmentId& id, const std::string& tenant, std::string_view name,
            uint64_t file_bytes);  // needs mutex_

  const std::filesystem::path dir_;
  IoEngine& engine_;
  const std::chrono::milliseconds read_deadline_;
  const std::shared_ptr<const KeyRing> keys_;
  std::atomic<uint64_t> temp_counter_{0};
  mutable std::mutex mutex_;
  std::unordered_map<SegmentId, Files, SegmentIdHash> files_;
  uint64_t last_version_ = 0;
  TenantBytes usage_;
};

}  // namespace prefixd::storage
