#include "storage/remote/remote_memory.h"

#include <algorithm>
#include <cstring>

namespace prefixd::storage {
namespace {

Error NoObject(std::string_view object) {
  return {Code::kNotFound, "no object '" + std::string(object) + "' in the remote tier"};
}

}  // namespace

Status MemoryRemoteTier::PutIfAbsent(std::string_view object, std::span<const std::byte> bytes) {
  std::lock_guard lock(mutex_);
  const bool fresh =
      objects_.try_emplace(std::string(object), std::vector(bytes.begin(), bytes.end())).second;
  if (fresh) return {};
  return Error{Code::kAlreadyExists, "object '" + std::string(object) + "' exists"};
}

Status MemoryRemoteTier::Read(std::string_view object, std::span<const RemoteRange> ranges) const {
  std::lock_guard lock(mutex_);
  const auto it = objects_.find(object);
  if (it == objects_.end()) return NoObject(object);
  const std::vector<std::byte>& bytes = it->second;
  for (const RemoteRange& range : ranges) {
    if (range.offset > bytes.size() || range.out.size() > bytes.size() - range.offset) {
      return InvalidArgument("a range beyond the end of object '" + std::string(object) + "'");
    }
    std::memcpy(range.out.data(), bytes.data() + range.offset, range.out.size());
  }
  return {};
}

Status MemoryRemoteTier::Delete(std::string_view object) {
  std::lock_guard lock(mutex_);
  if (const auto it = objects_.find(object); it != objects_.end()) objects_.erase(it);
  return {};
}

Result<uint64_t> MemoryRemoteTier::Stat(std::string_view object) const {
  std::lock_guard lock(mutex_);
  const auto it = objects_.find(object);
  if (it == objects_.end()) return NoObject(object);
  return uint64_t{it->second.size()};
}

std::vector<std::string> MemoryRemoteTier::List() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, bytes] : objects_) names.push_back(name);
  return names;
}

}  // namespace prefixd::storage
