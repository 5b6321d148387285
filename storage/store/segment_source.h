// What deriving data of stored segments takes: their rows, and the blobs that lie beside them.
//
// Thread-safety: all methods may be called concurrently. Errors as PrefixStore's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/segment/prefix_info.h"
#include "storage/store/stored_prefix.h"

namespace prefixd::storage {

class SegmentSource {
 public:
  virtual ~SegmentSource() = default;

  virtual Result<PrefixInfo> GetPrefix(const SegmentId& id) const = 0;
  // n_tokens cuts the prefix (0: all of it).
  virtual Result<std::shared_ptr<const StoredPrefix>> OpenPrefix(const SegmentId& id,
                                                                 uint32_t n_tokens) = 0;

  // Small things beside a segment: summaries, indexes, query samples. Read whole, verified.
  // `producer` names what made it; a Get with another producer is kNotFound. Put replaces.
  virtual Status PutBlob(const SegmentId& id, std::string_view name, std::string_view producer,
                         std::span<const std::byte> bytes) = 0;
  virtual Result<std::vector<std::byte>> GetBlob(const SegmentId& id, std::string_view name,
                                                 std::string_view producer) const = 0;
  virtual std::vector<std::string> ListBlobs(const SegmentId& id) const = 0;
  // Nothing if there is no such blob.
  virtual Status RemoveBlob(const SegmentId& id, std::string_view name) = 0;
};

}  // namespace prefixd::storage
