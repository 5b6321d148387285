// Declares what deriving data from stored segments needs: their rows, and the blobs beside them.
//
// Thread-safety: all methods may be called concurrently. Errors are those of PrefixStore.
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
  // n_tokens cuts the prefix (0: the whole prefix).
  virtual Result<std::shared_ptr<const StoredPrefix>> OpenPrefix(const SegmentId& id,
                                                                 uint32_t n_tokens) = 0;

  // Blobs are small data beside a segment: summaries, indexes, query samples. They are read whole
  // and verified. `producer` names the code that made a blob; a Get with another producer is
  // kNotFound. Put replaces.
  virtual Status PutBlob(const SegmentId& id, std::string_view name, std::string_view producer,
                         std::span<const std::byte> bytes) = 0;
  virtual Result<std::vector<std::byte>> GetBlob(const SegmentId& id, std::string_view name,
                                                 std::string_view producer) const = 0;
  virtual std::vector<std::string> ListBlobs(const SegmentId& id) const = 0;
  // A missing blob is no error.
  virtual Status RemoveBlob(const SegmentId& id, std::string_view name) = 0;
};

}  // namespace prefixd::storage
