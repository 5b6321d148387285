// Implements a remote tier in this process's memory: tests run against it, and it defines the
// meaning of the interface.
//
// Thread-safety: like RemoteTier.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "storage/remote/remote_tier.h"

namespace prefixd::storage {

class MemoryRemoteTier : public RemoteTier {
 public:
  std::string_view name() const override { return "memory"; }
  Status PutIfAbsent(std::string_view object, std::span<const std::byte> bytes) override;
  Status Read(std::string_view object, std::span<const RemoteRange> ranges) const override;
  Status Delete(std::string_view object) override;
  Result<uint64_t> Stat(std::string_view object) const override;

  std::vector<std::string> List() const;

 protected:
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<std::byte>, std::less<>> objects_;
};

}  // namespace prefixd::storage
