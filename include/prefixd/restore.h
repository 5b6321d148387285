// Restores all rows of a stored prefix into an engine's own cache, layer by layer, the first layer
// first, so that the engine can begin with it; the next runs are read while the engine works on
// this one.
//
//   auto restore = Restore::Begin(session, {});
//   while (true) {
//     auto run = (*restore)->Next();
//     if (!run.ok()) ...;                 // damaged, cancelled, daemon gone
//     if (!run->has_value()) break;       // all of it was handed out
//     copy (*run)->k and (*run)->v into the cache at layer (*run)->layer, (*run)->tokens
//   }
//
// Thread-safety: one thread at a time calls Next, any thread Cancel. Each Restore has its own
// reading thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "prefixd/partition.h"
#include "prefixd/progress.h"
#include "prefixd/result.h"
#include "prefixd/session.h"

namespace prefixd {

struct RestoreOptions {
  TokenRange tokens;                        // end 0: to the end of the prefix
  uint32_t first_layer = 0, end_layer = 0;  // [first, end); end 0: to the last
  KvOrder order = KvOrder::kTokenMajor;     // order of the rows handed out
  // Bounds the memory of rows that wait for Next and rows in the caller's hands. Never less than
  // two runs, which are chunks where the rows are reclustered (StoredPart::chunk_tokens).
  uint64_t buffer_bytes = 128ull << 20;
  // Next calls it with (bytes handed out, total bytes, "bytes") on its caller's thread. False
  // cancels.
  ProgressFn progress;
};

// Rows of every KV head of one layer, in ReadLayer's layout. Borrowed until the next Next.
struct RestoredRun {
  uint32_t layer = 0;
  TokenRange tokens;
  std::span<const std::byte> k, v;
};

class Restore {
 public:
  // Begins to read. kInvalidArgument: tokens or layers that do not exist. Keeps the session.
  static Result<std::unique_ptr<Restore>> Begin(std::shared_ptr<Session> session,
                                                const RestoreOptions& options);
  // Cancels, and waits for the running read.
  virtual ~Restore() = default;

  // Waits for the next run, in order of layers and within them of tokens; nullopt after the last
  // one. After an error (of a read; kCancelled) every call returns it.
  virtual Result<std::optional<RestoredRun>> Next() = 0;
  // Makes Next return kCancelled from now on, also where it waits, and frees what was read.
  virtual void Cancel() = 0;
};

}  // namespace prefixd
