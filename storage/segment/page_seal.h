// Checks pages in their places, and encrypts and decrypts those of an encrypted file: what writers
// and readers of segment files share. The table of a file has an entry for each page before it: a
// checksum of 8 bytes, or, where the file is encrypted, a tag of 16. The header page is never
// encrypted; its tag is a MAC.
//
// Thread-safety: const methods may be called concurrently.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "storage/segment/segment_format.h"

namespace prefixd::storage {

class KeyRing;

class PageSeal {
 public:
  PageSeal() = default;
  // cipher: null where the file is not encrypted.
  explicit PageSeal(const Uuid& file, std::shared_ptr<const FileCipher> cipher = nullptr)
      : file_(file), cipher_(std::move(cipher)) {}
  // Returns the seal of the file with this header, whose page it checks. kFailedPrecondition: its
  // key is not in the ring (null: there is none); kCorrupt: the MAC is wrong.
  static Result<PageSeal> Of(const KeyRing* keys, const SegmentHeader& header,
                             ConstPageBytes header_page);

  const FileCipher* cipher() const { return cipher_.get(); }

  // Returns the entry of a page in the table.
  template <typename Word>
  Word* entry(Word* table, uint64_t page) const {
    return table + (cipher_ ? page * (kTagBytes / sizeof(uint64_t)) : page);
  }

  // Returns whether `bytes` are the page as it was written; puts what it holds in their place where
  // they are encrypted. entry: that of the page.
  bool Open(uint64_t page, PageBytes bytes, const uint64_t* entry) const {
    if (cipher_) [[unlikely]]
      return OpenEncrypted(page, bytes, entry);
    return PageChecksum(file_, page, bytes) == *entry;
  }
  // The same, and leaves the bytes as they are.
  bool Check(uint64_t page, ConstPageBytes bytes, const uint64_t* entry) const;
  // Puts the page, encrypted, into `out`, which may be `bytes`, and fills its entry, which must be
  // zeros. REQUIRES: the file is encrypted.
  void Seal(uint64_t page, ConstPageBytes bytes, PageBytes out, uint64_t* entry) const;
  // Fills the entry of a page that is stored as it is: of a file that is not encrypted, or page 0.
  void Note(uint64_t page, ConstPageBytes bytes, uint64_t* entry) const;

 private:
  bool OpenEncrypted(uint64_t page, PageBytes bytes, const uint64_t* entry) const;

  Uuid file_{};
  std::shared_ptr<const FileCipher> cipher_;
};

// Has the header's file encrypted under the newest key of the ring, or not where that is null, and
// returns its cipher. A header's layout depends on it.
Result<std::shared_ptr<const FileCipher>> EncryptNewFile(const KeyRing* keys,
                                                         SegmentHeader* header);

}  // namespace prefixd::storage
