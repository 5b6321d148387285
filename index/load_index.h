// A stored index, whatever its kind.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "index/search/key_index.h"
#include "prefixd/result.h"

namespace prefixd::index {

// What Serialize returned. Bytes that are truncated, damaged, foreign or of another version are
// kCorrupt, found by the envelope's checksum before FAISS parses anything: rebuild the index.
Result<std::unique_ptr<KeyIndex>> LoadIndex(std::span<const std::byte> bytes);

}  // namespace prefixd::index
