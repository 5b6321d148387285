// Counts the allocations of a test program that is built with count_allocations.cc, which replaces
// the global operators new and delete.
#pragma once

#include <atomic>
#include <cstdint>

namespace prefixd::testing {

extern std::atomic<uint64_t> allocations;

}  // namespace prefixd::testing
