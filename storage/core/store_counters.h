// Counts what an open store has done; PrefixStore::Stats reports it.
#pragma once

#include <atomic>
#include <cstdint>

namespace prefixd::storage {

struct StoreCounters {
  std::atomic<uint64_t> bytes_written{0}, bytes_read{0}, puts{0}, puts_aborted{0};
  std::atomic<uint64_t> bytes_rewritten{0}, reclustered{0}, compacted{0};
  std::atomic<uint64_t> recovered_orphans{0}, recovered_commits{0}, checksum_failures{0};
  std::atomic<uint64_t> scrub_bytes{0}, scrub_damaged{0}, expired{0}, warmed_bytes{0};
  std::atomic<uint64_t> unchecked_segments{0};  // that CheckEnds has not come to since the start
};

}  // namespace prefixd::storage
