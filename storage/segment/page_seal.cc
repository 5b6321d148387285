#include "storage/segment/page_seal.h"

#include <array>

#include "base/check.h"
#include "storage/crypt/key_ring.h"

namespace prefixd::storage {
namespace {

std::byte* Tag(uint64_t* entry) { return reinterpret_cast<std::byte*>(entry); }
const std::byte* Tag(const uint64_t* entry) { return reinterpret_cast<const std::byte*>(entry); }

}  // namespace

Result<PageSeal> PageSeal::Of(const KeyRing* keys, const SegmentHeader& header,
                              ConstPageBytes header_page) {
  if (!header.encrypted()) return PageSeal(header.file);
  auto cipher = CipherOf(keys, header.key, header.cipher, FileKind::kSegment, header.file);
  if (!cipher.ok()) {
    return Error{cipher.error().code, "a segment cannot be read: " + cipher.error().message};
  }
  PREFIXD_TRY(CheckMac(cipher->get(), 0, header_page));
  return PageSeal(header.file, *std::move(cipher));
}

bool PageSeal::OpenEncrypted(uint64_t page, PageBytes bytes, const uint64_t* entry) const {
  if (page == 0) return cipher_->IsMac(page, bytes, {Tag(entry), kTagBytes});
  return cipher_->Open(page, bytes, Tag(entry));
}

bool PageSeal::Check(uint64_t page, ConstPageBytes bytes, const uint64_t* entry) const {
  if (!cipher_) return PageChecksum(file_, page, bytes) == *entry;
  std::array<std::byte, kPageBytes> copy;
  std::memcpy(copy.data(), bytes.data(), copy.size());
  return OpenEncrypted(page, copy, entry);
}

void PageSeal::Seal(uint64_t page, ConstPageBytes bytes, PageBytes out, uint64_t* entry) const {
  // A second page under one nonce would give both away: what was sealed before has a tag.
  PREFIXD_CHECK(cipher_ && page != 0 && entry[0] == 0 && entry[1] == 0, page, entry[0], entry[1]);
  cipher_->Seal(page, bytes, out.data(), Tag(entry));
}

void PageSeal::Note(uint64_t page, ConstPageBytes bytes, uint64_t* entry) const {
  if (!cipher_) {
    *entry = PageChecksum(file_, page, bytes);
    return;
  }
  PREFIXD_CHECK(page == 0, page);
  const FileCipher::Mac mac = cipher_->MacOf(page, bytes);
  std::memcpy(entry, mac.data(), kTagBytes);
}

Result<std::shared_ptr<const FileCipher>> EncryptNewFile(const KeyRing* keys,
                                                         SegmentHeader* header) {
  if (keys == nullptr) {
    header->SetCipher(CipherKind::kNone, {});
    return std::shared_ptr<const FileCipher>();
  }
  header->SetCipher(keys->cipher(), keys->newest().id());
  return FileCipher::Of(keys->newest(), header->cipher, FileKind::kSegment, header->file);
}

}  // namespace prefixd::storage
