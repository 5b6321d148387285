// Declares the interface that prefixd needs from remote storage: a flat space of immutable objects.
// A real engine (an object store, RADOS) implements this; storage/remote/remote_memory.h does so in
// this process.
//
// Thread-safety: all methods may be called concurrently. Errors: kUnavailable when the tier does
// not answer in time (trying again may work), kNotFound for unknown names. A tier is not trusted:
// everything it returns is verified against checksums that were stored with the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd::storage {

struct RemoteRange {
  uint64_t offset = 0;
  std::span<std::byte> out;
};

class RemoteTier {
 public:
  virtual ~RemoteTier() = default;
  virtual std::string_view name() const = 0;  // for people: "memory", "rados pool x"

  // Creates an object, durably and whole, unless one of that name exists (kAlreadyExists). Names
  // are printable ASCII with slashes, at most 200 bytes.
  virtual Status PutIfAbsent(std::string_view object, std::span<const std::byte> bytes) = 0;
  // Fills all ranges or fails; a range beyond the end is kInvalidArgument.
  virtual Status Read(std::string_view object, std::span<const RemoteRange> ranges) const = 0;
  // A missing object is no error.
  virtual Status Delete(std::string_view object) = 0;
  virtual Result<uint64_t> Stat(std::string_view object) const = 0;  // bytes
};

}  // namespace prefixd::storage
