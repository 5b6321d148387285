// Encrypts and authenticates what lies on the disk (docs/format.md#encryption). The one door to
// libsodium's ciphers: its headers appear in cipher.cc alone.
//
//   master key (a line of the key file)
//     └ of one file, by its uuid ─▶ FileCipher: pages under their numbers, MACs of what stays clear
//     └ of one store ─▶ StoreSecret, wrapped: seals values of the catalog, keys the block hashes
//
// A nonce is the number of a page under a key that one file alone has, or random and 192 bits long.
//
// Thread-safety: all const methods may be called concurrently. Keys lie in memory that is locked
// where the system allows it, is in no core dump, and is wiped when it is given back.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd::storage {

inline constexpr size_t kKeyBytes = 32;
inline constexpr size_t kTagBytes = 16;

// Names a master key without telling anything of it.
struct KeyId {
  std::array<uint8_t, 16> bytes{};
  std::string ToString() const;  // 32 hex digits
  static std::optional<KeyId> Parse(std::string_view hex);
  auto operator<=>(const KeyId&) const = default;
};

// The numbers are stored and never change.
enum class CipherKind : uint32_t { kNone = 0, kAes256Gcm = 1, kXChaCha20Poly1305 = 2 };
inline bool KnownCipher(uint32_t kind) { return kind <= 2; }
std::string_view CipherName(CipherKind kind);
bool CipherAvailable(CipherKind kind);  // on this CPU
CipherKind FastestCipher();

// Owns memory for a key; move-only.
class SecretBytes {
 public:
  SecretBytes() = default;
  static Result<SecretBytes> Make(size_t bytes);  // zeros
  uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }
  std::span<const uint8_t> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  std::unique_ptr<uint8_t, Free> data_;
  size_t size_ = 0;
};

// Overwrites bytes, also where the compiler sees that nobody reads them again.
void Wipe(std::span<char> bytes);

class MasterKey {
 public:
  // hex: 64 digits. kInvalidArgument, without a word of them, for anything else.
  static Result<MasterKey> FromHex(std::string_view hex);
  // Returns 64 random hex digits for a key file.
  static std::string NewHex();

  const KeyId& id() const { return id_; }
  // Returns the key for one purpose and the thing of that name: 32 bytes.
  Result<SecretBytes> Derive(std::string_view purpose, std::span<const uint8_t> name) const;

 private:
  SecretBytes bytes_;
  KeyId id_;
};

// What a file is. The numbers enter its keys and never change.
enum class FileKind : uint8_t { kSegment = 0, kBlob = 1 };

class FileCipher {
 public:
  using Mac = std::array<std::byte, 32>;

  // kFailedPrecondition where this CPU lacks the cipher.
  static Result<std::shared_ptr<const FileCipher>> Of(const MasterKey& master, CipherKind cipher,
                                                      FileKind kind, std::span<const uint8_t> file);
  FileCipher(const FileCipher&) = delete;
  FileCipher& operator=(const FileCipher&) = delete;
  ~FileCipher();

  // Encrypts `plain` into as many bytes at `out`, which may be the same, and writes kTagBytes to
  // `tag`. `beside` is authenticated with it. REQUIRES: no page is sealed twice in a file's life.
  void Seal(uint64_t page, std::span<const std::byte> plain, std::byte* out, std::byte* tag,
            std::span<const std::byte> beside = {}) const;
  // Decrypts `bytes` in place. False: they, the tag or `beside` are not what was sealed as this
  // page of this file; the bytes are then of no use.
  [[nodiscard]] bool Open(uint64_t page, std::span<std::byte> bytes, const std::byte* tag,
                          std::span<const std::byte> beside = {}) const;
  // Authenticates bytes that stay in clear; the same place may have several in its life.
  Mac MacOf(uint64_t page, std::span<const std::byte> bytes) const;
  [[nodiscard]] bool IsMac(uint64_t page, std::span<const std::byte> bytes,
                           std::span<const std::byte> mac) const;

 private:
  struct Keys;
  FileCipher(CipherKind cipher, Keys* keys) : cipher_(cipher), keys_(keys) {}

  const CipherKind cipher_;
  Keys* const keys_;
};

// A random secret that a store keeps for life, wrapped under its master key: what is made with it
// need not be made anew when the master key changes.
class StoreSecret {
 public:
  static Result<StoreSecret> Make();  // a random one
  // kCorrupt: `wrapped` is not what Wrap returned under this key for this store.
  static Result<StoreSecret> Unwrap(const MasterKey& key, std::span<const uint8_t> store,
                                    std::string_view wrapped);
  Result<std::string> Wrap(const MasterKey& key, std::span<const uint8_t> store) const;

  // Keys the block hashes: without it nobody can test a guess of a prompt.
  std::span<const uint8_t> hash_key() const { return hashes_.span(); }
  // Seals a value of the catalog; `key` is what it stands under.
  std::string Seal(std::string_view key, std::string_view value) const;
  Result<std::string> Open(std::string_view key, std::string_view sealed) const;

 private:
  static Result<StoreSecret> Of(SecretBytes secret);

  SecretBytes secret_, hashes_, values_;
};

}  // namespace prefixd::storage
