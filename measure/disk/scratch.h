// Gives a measurement a folder of its own, and sees to it that nothing is left of it.
//
// Thread-safety: RunInScratch is called by a process that has one thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "prefixd/result.h"

namespace prefixd::bench {

// Chooses where measurements lie unless the user says it: the first folder for temporary files that
// lies on the disk of `store` (a store's directory, or where it will be), else the first one.
std::filesystem::path ScratchParent(const std::filesystem::path& store);
bool OnOneDisk(const std::filesystem::path& a, const std::filesystem::path& b);

// Refuses (kFailedPrecondition) a directory that holds a store or lies in one, and
// (kInvalidArgument) one that does not exist or cannot be written to.
Status CheckScratchParent(const std::filesystem::path& parent);

// Bytes that may be written below `parent`.
uint64_t FreeBytes(const std::filesystem::path& parent);

// Makes a folder in `parent` and runs work(folder) in a child process. When the child ends, however
// it ends, or when SIGINT, SIGTERM or SIGHUP arrives, the child, the processes it started and the
// folder go. Returns work's value, or 128 + the signal's number. Folders that killed runs left
// behind in `parent` go first; processes of them that are still dying are waited for. Folders of
// runs that live are never touched.
Result<int> RunInScratch(const std::filesystem::path& parent,
                         const std::function<int(const std::filesystem::path&)>& work);

}  // namespace prefixd::bench
