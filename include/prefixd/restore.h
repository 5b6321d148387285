// All rows of a stored prefix, back into an engine's own cache: layer by layer, the first layer
// first, so that the engine can begin with it; what comes next is read while the engine works on
// what came.
//
//   auto restore = Restore::Begin(session, {});
//   while (true) {
//     auto run = (*restore)->Next();
//     if (!run.ok()) ...;                 // damaged, cancelled, daemon gone
//     if (!run->has_value()) break;       // all of it was handed out
//     copy (*run)->k and (*run)->v into the cache at layer (*run)->layer, (*run)->tokens
//   }
//
// Thread-safety: Next is called by one thread at a time, Cancel by any. One reading thread of its
// own for each Restore.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "prefixd/result.h"
#include "prefixd/session.h"
#include "prefixd/types.h"

namespace prefixd {

struct RestoreOptions {
  TokenRange tokens;                        // end 0: to the end of the prefix
  uint32_t first_layer = 0, end_layer = 0;  // [first, end); end 0: to the last
  KvOrder order = KvOrder::kTokenMajor;     // of what is handed out
  // What may lie in memory: read ahead, and in the caller's hands. Never less than two runs, which
  // are chunks where the rows are settled (StoredPart::chunk_tokens).
  uint64_t buffer_bytes = 128ull << 20;
  // (bytes handed out, bytes in all, "bytes"), by Next on its caller's thread. False: cancel.
  ProgressFn progress;
};

// Rows of every KV head of one layer, as ReadLayer delivers them. Borrowed: until the next Next.
struct RestoredRun {
  uint32_t layer = 0;
  TokenRange tokens;
  std::span<const std::byte> k, v;
};

class Restore {
 public:
  // Begins to read. kInvalidArgument: tokens or layers that are not there. Keeps the session.
  static Result<std::unique_ptr<Restore>> Begin(std::shared_ptr<Session> session,
                                                const RestoreOptions& options);
  // Cancels, and waits for the read that is under way.
  virtual ~Restore() = default;

  // The next run, in order of layers and in them of tokens; waits for it. Nothing: that was all.
  // After an error (of the read; kCancelled) every call returns it.
  virtual Result<std::optional<RestoredRun>> Next() = 0;
  // Next returns kCancelled from now on, also where it waits; what is read is let go.
  virtual void Cancel() = 0;
};

}  // namespace prefixd
