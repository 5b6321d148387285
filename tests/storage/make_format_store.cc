// Makes the store of this version that tests/data keeps, so that later versions can be held to it:
//
//   build/release/tests/storage/make_format_store tests/data/store-v2
//   build/release/tests/storage/make_format_store tests/data/store-v3 tests/data/store-v3.key
//
// The second is encrypted under a key that it makes.
// Run it once when a version grows, never for an old version: what is committed is what
// that version wrote.
#include <cstdio>
#include <filesystem>

#include "storage/catalog/catalog.h"
#include "storage/crypt/key_ring.h"
#include "tests/storage/format_store.h"

namespace prefixd::storage {
namespace {

Result<SegmentId> PutWith(PrefixStore& store, const ModelRecord& model,
                          std::span<const uint32_t> tokens, const PutOptions& options) {
  PREFIXD_ASSIGN(auto writer, store.BeginPut(model.name, "tenant", tokens, "label", options));
  const RowFn finite = [](uint32_t, uint32_t, uint32_t, std::span<std::byte> row) {
    std::memset(row.data(), 0x3c, row.size());  // what is encoded must be
  };
  const bool encoded = options.encoding != RowEncoding::kAsGiven;
  PREFIXD_TRY(
      WriteAll(*writer, model.geometry, encoded ? finite : RowsFrom(States(tokens)), 16, true));
  return writer->Commit();
}

Status Fill(PrefixStore& store, uint32_t version) {
  const FormatStore f;
  const ModelRecord model = TestModel();
  PREFIXD_TRY(store.PutModel(model));
  PutOptions pinned;
  pinned.pinned = true;
  PREFIXD_ASSIGN(const SegmentId a, PutWith(store, model, f.a, pinned));
  PREFIXD_TRY(PutWith(store, model, f.b, {}));
  PREFIXD_TRY(PutWith(store, model, f.c, {}));
  const std::string blob = FormatStore::Blob(version);
  PREFIXD_TRY(store.PutBlob(a, "note", "maker/1", std::as_bytes(std::span(blob))));
  PutOptions encoded;
  encoded.encoding = RowEncoding::kInt8;
  PREFIXD_ASSIGN(const SegmentId e, PutWith(store, model, f.encoded, encoded));
  PREFIXD_TRY(store.SetLifetime(e, {{}, FormatStore::kExpires}));
  PutOptions derived;
  derived.derived = true;
  PREFIXD_TRY(PutWith(store, model, f.derived, derived));
  PREFIXD_TRY(PutWith(store, model, f.shorter, {}));
  PREFIXD_ASSIGN(const SegmentId leaf, PutWith(store, model, f.compacted, {}));
  PREFIXD_TRY(store.Compact(leaf, 4096));
  PREFIXD_ASSIGN(const SegmentId removed, PutWith(store, model, f.removed, {}));
  return store.Remove(removed);
}

Status Make(const std::filesystem::path& dir, const char* key_file) {
  if (std::filesystem::exists(dir)) {
    return Error{Code::kAlreadyExists, dir.string() + " exists; a committed store never changes"};
  }
  StoreOptions options;
  options.dir = dir;
  options.host_tier_bytes = 0;
  options.ballast_bytes = 0;
  options.min_free_bytes = 0;
  uint32_t version = kStoreFormatVersion;
  if (key_file != nullptr) {
    PREFIXD_TRY(MakeKeyFile(key_file));
    options.encryption_key_file = key_file;
    options.cipher = CipherKind::kXChaCha20Poly1305;  // every machine reads it
    version = kEncryptedFormatVersion;
  }
  {
    PREFIXD_ASSIGN(const auto store, PrefixStore::Open(options));
    PREFIXD_TRY(Fill(*store, version));
  }
  // What every opening makes anew.
  for (const char* name : {"lock", "catalog/LOCK", "catalog/LOG"}) {
    std::filesystem::remove(dir / name);
  }
  return {};
}

}  // namespace
}  // namespace prefixd::storage

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: make_format_store DIR [KEY_FILE]\n");
    return 2;
  }
  const prefixd::Status made = prefixd::storage::Make(argv[1], argc == 3 ? argv[2] : nullptr);
  if (made.ok()) return 0;
  std::fprintf(stderr, "make_format_store: %s\n", made.error().message.c_str());
  return 1;
}
