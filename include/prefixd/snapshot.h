// Keeps a store's files as they were at one moment, so that they can be copied while the store goes
// on.
//
// Thread-safety: a Snapshot may be used by any thread.
#pragma once

#include <filesystem>

namespace prefixd {

// `dir` lies in the store's directory and is a store's directory itself: STORE, catalog/ and
// segments/, the last as hard links. Files in it do not change. They keep their space on the disk
// while the snapshot lives; destroying it removes them. So does opening the store.
class Snapshot {
 public:
  virtual ~Snapshot() = default;
  virtual const std::filesystem::path& dir() const = 0;
};

}  // namespace prefixd
