// Tries a small prompt, to know how long a run will take on this machine.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>

#include "measure/models/model_shape.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Seconds that a byte of rows takes: making it, putting it once, and attaching to it with its
// summaries and indexes.
struct RowSeconds {
  double making = 0, putting = 0, attaching = 0;
};

// Of one layer of `tokens`, below `dir`, which is left empty.
Result<RowSeconds> TrySmallPrompt(const ModelShape& model, uint32_t tokens,
                                  const std::filesystem::path& dir);

}  // namespace prefixd::bench
