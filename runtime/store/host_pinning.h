// Registers the host tier's memory with the CUDA device, as blocks come and go.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

namespace prefixd {

// Thread-safety: all methods may be called concurrently.
class HostPinning {
 public:
  // Without a device, or in a build without CUDA, nothing is registered; the log says so once, and
  // state() does.
  static std::shared_ptr<HostPinning> Open();
  // Returns the hook for StoreOptions::on_host_block; null where there is no device. The hook keeps
  // the HostPinning alive.
  static std::function<void(std::span<std::byte>, bool)> Hook(std::shared_ptr<HostPinning> pinning);

  // Returns "registered", or why (some of) the memory is not.
  std::string state() const;

 private:
  void Block(std::span<std::byte> block, bool taken);
  void Fail(const std::string& why);

  mutable std::mutex mutex_;
  bool usable_ = true;
  std::string failure_;  // the first one
};

}  // namespace prefixd
