// Bounds how many segment files are open: sessions keep those of their chains open, and the process
// may open only so many. Tenants share them: one that has files open gets another only while, with
// it, it has at most three times as many as are left.
//
// Thread-safety: all methods may be called concurrently. Outlives its places.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace prefixd::storage {

class OpenFiles {
 public:
  explicit OpenFiles(uint64_t most) : most_(most) {}
  OpenFiles(const OpenFiles&) = delete;
  OpenFiles& operator=(const OpenFiles&) = delete;

  // The place of one file, until it is destroyed. Move-only.
  class Place {
   public:
    Place(Place&& other) noexcept
        : files_(std::exchange(other.files_, nullptr)), tenant_(std::move(other.tenant_)) {}
    Place& operator=(Place&&) = delete;
    ~Place() {
      if (files_ != nullptr) files_->Give(tenant_);
    }

   private:
    friend class OpenFiles;
    Place(OpenFiles* files, std::string tenant) : files_(files), tenant_(std::move(tenant)) {}
    OpenFiles* files_;
    std::string tenant_;
  };

  // nullopt: there is none for this tenant now.
  std::optional<Place> Take(const std::string& tenant) {
    std::string name = tenant;
    std::lock_guard lock(mutex_);
    if (taken_ >= most_) return std::nullopt;
    const auto it = of_tenant_.try_emplace(tenant, 0).first;
    const uint64_t left = most_ - taken_ - 1;
    if (it->second > 0 && it->second + 1 > 3 * left) return std::nullopt;
    ++it->second;
    ++taken_;
    return Place(this, std::move(name));
  }

  uint64_t most() const { return most_; }

 private:
  void Give(const std::string& tenant) {
    std::lock_guard lock(mutex_);
    --taken_;
    const auto it = of_tenant_.find(tenant);
    if (--it->second == 0) of_tenant_.erase(it);
  }

  const uint64_t most_;
  std::mutex mutex_;
  uint64_t taken_ = 0;
  std::map<std::string, uint64_t> of_tenant_;
};

}  // namespace prefixd::storage
