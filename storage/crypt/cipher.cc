#include "storage/crypt/cipher.h"

#include <sodium.h>

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/check.h"

namespace prefixd::storage {
namespace {

constexpr size_t kValueNonceBytes = crypto_aead_xchacha20poly1305_ietf_NPUBBYTES;
static_assert(kTagBytes == crypto_aead_aes256gcm_ABYTES &&
              kTagBytes == crypto_aead_xchacha20poly1305_ietf_ABYTES);
static_assert(kKeyBytes == crypto_aead_aes256gcm_KEYBYTES &&
              kKeyBytes == crypto_aead_xchacha20poly1305_ietf_KEYBYTES);

void StartSodium() {
  static const int ready = ::sodium_init();  // idempotent and thread-safe
  PREFIXD_CHECK(ready >= 0, ready);          // < 0 only without entropy
}

unsigned char* Bytes(std::byte* p) { return reinterpret_cast<unsigned char*>(p); }
const unsigned char* Bytes(const std::byte* p) { return reinterpret_cast<const unsigned char*>(p); }
const unsigned char* Bytes(std::string_view s) {
  return reinterpret_cast<const unsigned char*>(s.data());
}

// Purposes are part of the format.
constexpr std::string_view kPageKey = "prefixd page key 1", kMacKey = "prefixd mac key 1",
                           kWrapKey = "prefixd wrap key 1", kIdKey = "prefixd key id 1",
                           kHashKey = "prefixd hash key 1", kValueKey = "prefixd value key 1";

// Keyed BLAKE2b of a purpose and a name: both are prefixed by their lengths, so that no two of them
// meet.
void Derived(std::span<const uint8_t> key, std::string_view purpose, std::span<const uint8_t> name,
             uint8_t* out, size_t bytes) {
  crypto_generichash_state state;
  crypto_generichash_init(&state, key.data(), key.size(), bytes);
  for (const auto part : {std::as_bytes(std::span(purpose)), std::as_bytes(name)}) {
    const uint64_t n = part.size();
    crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(&n), sizeof(n));
    crypto_generichash_update(&state, Bytes(part.data()), part.size());
  }
  crypto_generichash_final(&state, out, bytes);
  ::sodium_memzero(&state, sizeof(state));
}

Result<SecretBytes> DerivedKey(std::span<const uint8_t> key, std::string_view purpose,
                               std::span<const uint8_t> name) {
  PREFIXD_ASSIGN(SecretBytes out, SecretBytes::Make(kKeyBytes));
  Derived(key, purpose, name, out.data(), out.size());
  return out;
}

}  // namespace

std::string KeyId::ToString() const {
  std::string hex(2 * bytes.size() + 1, '\0');
  ::sodium_bin2hex(hex.data(), hex.size(), bytes.data(), bytes.size());
  hex.pop_back();
  return hex;
}

std::optional<KeyId> KeyId::Parse(std::string_view hex) {
  KeyId id;
  size_t n = 0;
  if (hex.size() != 2 * id.bytes.size() ||
      ::sodium_hex2bin(id.bytes.data(), id.bytes.size(), hex.data(), hex.size(), nullptr, &n,
                       nullptr) != 0 ||
      n != id.bytes.size()) {
    return std::nullopt;
  }
  return id;
}

std::string_view CipherName(CipherKind kind) {
  if (kind == CipherKind::kNone) return "none";
  return kind == CipherKind::kAes256Gcm ? "AES-256-GCM" : "XChaCha20-Poly1305";
}

bool CipherAvailable(CipherKind kind) {
  StartSodium();
  return kind != CipherKind::kAes256Gcm || ::crypto_aead_aes256gcm_is_available() == 1;
}

CipherKind FastestCipher() {
  return CipherAvailable(CipherKind::kAes256Gcm) ? CipherKind::kAes256Gcm
                                                 : CipherKind::kXChaCha20Poly1305;
}

void SecretBytes::Free::operator()(uint8_t* p) const { ::sodium_free(p); }

Result<SecretBytes> SecretBytes::Make(size_t bytes) {
  StartSodium();
  SecretBytes out;
  out.data_.reset(static_cast<uint8_t*>(::sodium_malloc(bytes)));
  if (!out.data_) return Error{Code::kResourceExhausted, "there is no memory for a key"};
  std::memset(out.data_.get(), 0, bytes);
  out.size_ = bytes;
  return out;
}

void Wipe(std::span<char> bytes) { ::sodium_memzero(bytes.data(), bytes.size()); }

Result<MasterKey> MasterKey::FromHex(std::string_view hex) {
  MasterKey key;
  PREFIXD_ASSIGN(key.bytes_, SecretBytes::Make(kKeyBytes));
  size_t n = 0;
  if (hex.size() != 2 * kKeyBytes ||
      ::sodium_hex2bin(key.bytes_.data(), kKeyBytes, hex.data(), hex.size(), nullptr, &n,
                       nullptr) != 0 ||
      n != kKeyBytes) {
    return InvalidArgument("a key is 64 hexadecimal digits");
  }
  Derived(key.bytes_.span(), kIdKey, {}, key.id_.bytes.data(), key.id_.bytes.size());
  return key;
}

std::string MasterKey::NewHex() {
  StartSodium();
  std::array<unsigned char, kKeyBytes> key;
  ::randombytes_buf(key.data(), key.size());
  std::string hex(2 * key.size() + 1, '\0');
  ::sodium_bin2hex(hex.data(), hex.size(), key.data(), key.size());
  ::sodium_memzero(key.data(), key.size());
  hex.pop_back();
  return hex;
}

Result<SecretBytes> MasterKey::Derive(std::string_view purpose,
                                      std::span<const uint8_t> name) const {
  return DerivedKey(bytes_.span(), purpose, name);
}

struct FileCipher::Keys {
  crypto_aead_aes256gcm_state aes;  // the key schedule, aligned to 16 bytes
  uint8_t page[kKeyBytes];
  uint8_t mac[kKeyBytes];
};

namespace {

// Hands out pieces of locked memory: a store has more files open than a process may have mappings,
// of which each allocation of libsodium's takes several.
template <typename T>
class SecretPool {
 public:
  T* Take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) {
      StartSodium();
      auto* more = static_cast<T*>(::sodium_allocarray(kAtOnce, sizeof(T)));
      if (more == nullptr) return nullptr;
      free_.reserve(taken_ + kAtOnce);  // Give must not fail
      for (size_t i = 0; i < kAtOnce; ++i) free_.push_back(more + i);
      taken_ += kAtOnce;
    }
    T* piece = free_.back();
    free_.pop_back();
    return piece;
  }
  void Give(T* piece) {
    ::sodium_memzero(piece, sizeof(T));
    std::lock_guard lock(mutex_);
    free_.push_back(piece);
  }

 private:
  static constexpr size_t kAtOnce = 64;
  static_assert(sizeof(T) % 16 == 0);  // libsodium's arrays end at the end of a page

  std::mutex mutex_;
  std::vector<T*> free_;
  size_t taken_ = 0;
};

// Never destroyed: files may be closed late.
template <typename T>
SecretPool<T>& PoolOf() {
  static auto* pool = new SecretPool<T>();
  return *pool;
}

// The nonce of a page: its number, little-endian, then zeros.
template <size_t N>
std::array<unsigned char, N> NonceOf(uint64_t page) {
  std::array<unsigned char, N> nonce{};
  std::memcpy(nonce.data(), &page, sizeof(page));
  return nonce;
}

}  // namespace

Result<std::shared_ptr<const FileCipher>> FileCipher::Of(const MasterKey& master, CipherKind cipher,
                                                         FileKind kind,
                                                         std::span<const uint8_t> file) {
  if (!CipherAvailable(cipher)) {
    return Error{Code::kFailedPrecondition,
                 "it is encrypted with " + std::string(CipherName(cipher)) +
                     ", which this CPU has no instructions for; read it on a machine whose CPU has "
                     "AES-NI"};
  }
  PREFIXD_CHECK(cipher != CipherKind::kNone, file.size());
  // Cipher and kind are in the name: two of either never use one key.
  std::vector<uint8_t> name(file.begin(), file.end());
  name.push_back(static_cast<uint8_t>(cipher));
  name.push_back(static_cast<uint8_t>(kind));
  PREFIXD_ASSIGN(const SecretBytes page, master.Derive(kPageKey, name));
  PREFIXD_ASSIGN(const SecretBytes mac, master.Derive(kMacKey, name));
  Keys* keys = PoolOf<Keys>().Take();
  if (keys == nullptr) return Error{Code::kResourceExhausted, "there is no memory for a key"};
  std::memcpy(keys->page, page.data(), kKeyBytes);
  std::memcpy(keys->mac, mac.data(), kKeyBytes);
  if (cipher == CipherKind::kAes256Gcm) {
    ::crypto_aead_aes256gcm_beforenm(&keys->aes, keys->page);
  }
  return std::shared_ptr<const FileCipher>(new FileCipher(cipher, keys));
}

FileCipher::~FileCipher() { PoolOf<Keys>().Give(keys_); }

void FileCipher::Seal(uint64_t page, std::span<const std::byte> plain, std::byte* out,
                      std::byte* tag, std::span<const std::byte> beside) const {
  if (cipher_ == CipherKind::kAes256Gcm) {
    const auto nonce = NonceOf<crypto_aead_aes256gcm_NPUBBYTES>(page);
    ::crypto_aead_aes256gcm_encrypt_detached_afternm(
        Bytes(out), Bytes(tag), nullptr, Bytes(plain.data()), plain.size(), Bytes(beside.data()),
        beside.size(), nullptr, nonce.data(), &keys_->aes);
    return;
  }
  const auto nonce = NonceOf<crypto_aead_xchacha20poly1305_ietf_NPUBBYTES>(page);
  ::crypto_aead_xchacha20poly1305_ietf_encrypt_detached(
      Bytes(out), Bytes(tag), nullptr, Bytes(plain.data()), plain.size(), Bytes(beside.data()),
      beside.size(), nullptr, nonce.data(), keys_->page);
}

bool FileCipher::Open(uint64_t page, std::span<std::byte> bytes, const std::byte* tag,
                      std::span<const std::byte> beside) const {
  if (cipher_ == CipherKind::kAes256Gcm) {
    const auto nonce = NonceOf<crypto_aead_aes256gcm_NPUBBYTES>(page);
    return ::crypto_aead_aes256gcm_decrypt_detached_afternm(
               Bytes(bytes.data()), nullptr, Bytes(bytes.data()), bytes.size(), Bytes(tag),
               Bytes(beside.data()), beside.size(), nonce.data(), &keys_->aes) == 0;
  }
  const auto nonce = NonceOf<crypto_aead_xchacha20poly1305_ietf_NPUBBYTES>(page);
  return ::crypto_aead_xchacha20poly1305_ietf_decrypt_detached(
             Bytes(bytes.data()), nullptr, Bytes(bytes.data()), bytes.size(), Bytes(tag),
             Bytes(beside.data()), beside.size(), nonce.data(), keys_->page) == 0;
}

FileCipher::Mac FileCipher::MacOf(uint64_t page, std::span<const std::byte> bytes) const {
  Mac mac;
  crypto_generichash_state state;
  crypto_generichash_init(&state, keys_->mac, kKeyBytes, mac.size());
  const std::array<uint64_t, 2> place = {page, bytes.size()};
  crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(place.data()),
                            sizeof(place));
  crypto_generichash_update(&state, Bytes(bytes.data()), bytes.size());
  crypto_generichash_final(&state, Bytes(mac.data()), mac.size());
  ::sodium_memzero(&state, sizeof(state));
  return mac;
}

bool FileCipher::IsMac(uint64_t page, std::span<const std::byte> bytes,
                       std::span<const std::byte> mac) const {
  const Mac own = MacOf(page, bytes);
  return mac.size() <= own.size() && ::sodium_memcmp(own.data(), mac.data(), mac.size()) == 0;
}

Result<StoreSecret> StoreSecret::Of(SecretBytes secret) {
  StoreSecret out;
  PREFIXD_ASSIGN(out.hashes_, DerivedKey(secret.span(), kHashKey, {}));
  PREFIXD_ASSIGN(out.values_, DerivedKey(secret.span(), kValueKey, {}));
  out.secret_ = std::move(secret);
  return out;
}

Result<StoreSecret> StoreSecret::Make() {
  PREFIXD_ASSIGN(SecretBytes secret, SecretBytes::Make(kKeyBytes));
  ::randombytes_buf(secret.data(), secret.size());
  return Of(std::move(secret));
}

namespace {

// Seals under a random nonce: nonce, what is sealed, tag.
std::string SealRandomly(const SecretBytes& key, std::string_view beside,
                         std::span<const uint8_t> plain) {
  std::string out(kValueNonceBytes + plain.size() + kTagBytes, '\0');
  auto* at = reinterpret_cast<unsigned char*>(out.data());
  ::randombytes_buf(at, kValueNonceBytes);
  ::crypto_aead_xchacha20poly1305_ietf_encrypt(at + kValueNonceBytes, nullptr, plain.data(),
                                               plain.size(), Bytes(beside), beside.size(), nullptr,
                                               at, key.data());
  return out;
}

// REQUIRES: `out` has kValueNonceBytes + kTagBytes fewer bytes than `sealed`.
bool OpenRandomly(const SecretBytes& key, std::string_view beside, std::string_view sealed,
                  uint8_t* out) {
  return ::crypto_aead_xchacha20poly1305_ietf_decrypt(
             out, nullptr, nullptr, Bytes(sealed) + kValueNonceBytes,
             sealed.size() - kValueNonceBytes, Bytes(beside), beside.size(), Bytes(sealed),
             key.data()) == 0;
}

}  // namespace

Result<std::string> StoreSecret::Wrap(const MasterKey& key, std::span<const uint8_t> store) const {
  PREFIXD_ASSIGN(const SecretBytes wrapping, key.Derive(kWrapKey, store));
  return SealRandomly(wrapping, {}, secret_.span());
}

Result<StoreSecret> StoreSecret::Unwrap(const MasterKey& key, std::span<const uint8_t> store,
                                        std::string_view wrapped) {
  const Error damaged{Code::kCorrupt, "the store's wrapped secret is damaged"};
  if (wrapped.size() != kValueNonceBytes + kKeyBytes + kTagBytes) return damaged;
  PREFIXD_ASSIGN(const SecretBytes wrapping, key.Derive(kWrapKey, store));
  PREFIXD_ASSIGN(SecretBytes secret, SecretBytes::Make(kKeyBytes));
  if (!OpenRandomly(wrapping, {}, wrapped, secret.data())) return damaged;
  return Of(std::move(secret));
}

std::string StoreSecret::Seal(std::string_view key, std::string_view value) const {
  return SealRandomly(values_, key, {reinterpret_cast<const uint8_t*>(value.data()), value.size()});
}

Result<std::string> StoreSecret::Open(std::string_view key, std::string_view sealed) const {
  const Error damaged{Code::kCorrupt, "a sealed value of the catalog does not verify"};
  if (sealed.size() < kValueNonceBytes + kTagBytes) return damaged;
  std::string out(sealed.size() - kValueNonceBytes - kTagBytes, '\0');
  if (!OpenRandomly(values_, key, sealed, reinterpret_cast<uint8_t*>(out.data()))) return damaged;
  return out;
}

}  // namespace prefixd::storage
