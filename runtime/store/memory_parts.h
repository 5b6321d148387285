// Divides a store's memory: fills in what follows from RuntimeOptions::memory_bytes.
//
// Thread-safety: free functions.
#pragma once

#include <cstdint>
#include <memory>

#include "base/memory_budget.h"
#include "prefixd/options.h"
#include "prefixd/result.h"

namespace prefixd {

// The memory of the machine, or of the control group that this process is in if that is less.
uint64_t MachineMemory();

// Returns the options with their memory and its parts in bytes. kInvalidArgument when the memory is
// too little for a store, or the parts that are given do not fit into it.
//   machine: what MachineMemory returns
Result<RuntimeOptions> WithMemoryParts(RuntimeOptions options, uint64_t machine);
// Bounds what idle open segments keep in memory.
uint64_t TablesBytes(const RuntimeOptions& resolved);
std::shared_ptr<MemoryBudget> NewMemoryBudget(const RuntimeOptions& resolved);

}  // namespace prefixd
