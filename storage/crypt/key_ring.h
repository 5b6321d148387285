// Holds the master keys of a store, read from its key file: a line of 64 hex digits each, the
// newest first; empty lines and what follows a # are ignored. New files are encrypted under the
// first key, the others are for files of before (docs/operations.md#encryption-at-rest).
//
// Thread-safety: a KeyRing does not change.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/crypt/cipher.h"

namespace prefixd::storage {

class KeyRing {
 public:
  // kFailedPrecondition: others than its owner may read or change the file, or its owner is neither
  // this user nor root (for root: anybody). Of root's files in $CREDENTIALS_DIRECTORY the group may
  // read, which is how systemd hands them over. kNotFound: it cannot be opened. kInvalidArgument
  // names the line that is no key.
  static Result<std::shared_ptr<KeyRing>> Read(const std::filesystem::path& file);

  const MasterKey& newest() const { return keys_.front(); }
  std::span<const MasterKey> keys() const { return keys_; }  // at least one
  const MasterKey* Find(const KeyId& id) const;              // null: it does not have it
  const std::filesystem::path& file() const { return file_; }

  // What new files are encrypted with: the fastest on this CPU.
  CipherKind cipher() const { return cipher_; }
  // For tests and benchmarks.
  void set_cipher(CipherKind cipher) { cipher_ = cipher; }

 private:
  std::filesystem::path file_;
  std::vector<MasterKey> keys_;
  CipherKind cipher_ = CipherKind::kNone;
};

// Says why a key is not to be had: "key 01ab..., which FILE does not have", or that there is no key
// file. keys: null where there is none.
std::string LacksKey(const KeyRing* keys, const KeyId& id);

// Returns the cipher of a file that is encrypted under `id`. kFailedPrecondition: the key is not in
// the ring, which may be null, or this CPU lacks the cipher.
Result<std::shared_ptr<const FileCipher>> CipherOf(const KeyRing* keys, const KeyId& id,
                                                   CipherKind cipher, FileKind kind,
                                                   std::span<const uint8_t> file);

// Makes a key file with one new key, for its owner alone, and returns the key's id.
// kAlreadyExists: there is a file; none is ever overwritten.
Result<KeyId> MakeKeyFile(const std::filesystem::path& file);
// Puts a new key before those of the file, which is replaced in one step and keeps its owner.
Result<KeyId> AddKeyToFile(const std::filesystem::path& file);

}  // namespace prefixd::storage
