// Opens encrypted stores, and looks for what must not lie on the disk.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "storage/crypt/key_ring.h"
#include "tests/storage/open_store.h"

namespace prefixd::storage {

// Returns the contents of every file below `dir`, by path.
inline std::map<std::string, std::string> ContentsOf(const std::filesystem::path& dir) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file()) {
      contents[std::filesystem::relative(entry.path(), dir)] = testing::ReadFile(entry.path());
    }
  }
  return contents;
}

// Returns the files below `dir` that contain `bytes`, by their paths.
inline std::vector<std::string> FilesWith(const std::filesystem::path& dir,
                                          std::string_view bytes) {
  std::vector<std::string> found;
  for (const auto& [path, text] : ContentsOf(dir)) {
    if (text.find(bytes) != text.npos) found.push_back(path);
  }
  return found;
}

template <typename T>
std::string_view Raw(const T& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0])};
}

// Returns token ids above 65535 as the catalog's records hold them (msgpack).
inline std::string InRecords(std::span<const uint32_t> tokens) {
  std::string out;
  for (const uint32_t t : tokens) {
    out += '\xce';
    for (const int shift : {24, 16, 8, 0}) out += static_cast<char>(t >> shift);
  }
  return out;
}

// A store with a key file of one key; nothing is open yet.
template <typename Base>
class EncryptedStore : public OpenStore<Base> {
 protected:
  EncryptedStore() {
    this->options_.encryption_key_file = key_file_;
    const auto made = MakeKeyFile(key_file_);
    EXPECT_TRUE(made.ok());
    if (made.ok()) key_ = *made;
  }

  std::shared_ptr<const KeyRing> Keys() const { return *KeyRing::Read(key_file_); }
  // Leaves the first line of the key file, the newest key, alone.
  void DropOldKeys() {
    std::string text = testing::ReadFile(key_file_);
    text.resize(text.find('\n') + 1);
    testing::WriteFile(key_file_, text);
  }
  // Opens the store without its key file, or with another; the error is expected.
  Error Refusal(const std::filesystem::path& key_file) {
    this->store_.reset();
    StoreOptions options = this->options_;
    options.encryption_key_file = key_file;
    const auto opened = PrefixStore::Open(options);
    EXPECT_FALSE(opened.ok());
    return opened.ok() ? Error{} : opened.error();
  }
  std::filesystem::path OtherKeyFile() {
    const auto file = this->dir_ / "other.key";
    if (!std::filesystem::exists(file)) static_cast<void>(MakeKeyFile(file));
    return file;
  }

  const std::filesystem::path key_file_ = this->dir_ / "store.key";
  KeyId key_;
};

}  // namespace prefixd::storage
