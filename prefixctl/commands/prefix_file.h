// Writes a stored prefix to a file of its own, "prefixd-prefix-v1" (docs/format.md), and puts such
// files. A file holds rows, token ids and the model, so that a prefix can go to another store or
// other programs can read it.
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
  uint64_t bytes = 0;  // rows and token ids
};

// Writes the prefix to `path`, whole or not at all, and replaces a file that is there. Only its
// owner may read it, because it holds a prompt. kCorrupt when rows do not verify, kCancelled when
// `progress` returns false.
Result<PrefixFile> ExportPrefix(Store& client, const std::string& prefix,
                                const std::filesystem::path& path, const ProgressFn& progress);

// Puts such a file for the client's tenant, and registers its model when the store has none of the
// name. kInvalidArgument: another kind of file, tensors that are missing or of another shape, rows
// that are not finite; kCorrupt: a damaged file; kAlreadyExists: the store's model of that name has
// another geometry or identity. No prefix is stored after an error.
Result<PutResult> PutPrefixFile(Store& client, const std::filesystem::path& path,
                                const ProgressFn& progress);

}  // namespace prefixd::ctl
