// A stored prefix as a file of its own, "prefixd-prefix-v1" (docs/format.md): rows, token ids and
// what they belong to, so that a prefix can go to another store or be looked at by other programs.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <filesystem>
#include <string>

#include "prefixd/client.h"
#include "prefixd/result.h"

namespace prefixd::ctl {

struct PrefixFile {
  std::string prefix, model, label;
  uint32_t n_tokens = 0;
  uint64_t bytes = 0;  // of rows and token ids
};

// Writes the prefix to `path`, all of it or nothing, readable by its owner alone: it holds a
// prompt. What is there is replaced. kCorrupt when rows do not verify, kCancelled when `progress`
// says so.
Result<PrefixFile> ExportPrefix(Store& client, const std::string& prefix,
                                const std::filesystem::path& path, const ProgressFn& progress);

// Puts such a file for the client's tenant, and registers its model where the store has none of the
// name. kInvalidArgument: another kind of file, tensors that are missing or of another shape, rows
// that are not finite; kCorrupt: a damaged one; kAlreadyExists: the store's model of that name has
// another geometry or identity. No prefix is stored then.
Result<PutResult> PutPrefixFile(Store& client, const std::filesystem::path& path,
                                const ProgressFn& progress);

}  // namespace prefixd::ctl
