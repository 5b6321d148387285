// Fuzzes blob files. Every byte has a meaning: bytes that decode are exactly what the encoder
// writes.
#include <unistd.h>
#include <xxhash.h>

#include <filesystem>
#include <string>

#include "storage/crypt/key_ring.h"
#include "storage/segment/blob_format.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

using storage::BlobContents;
using storage::DecodeBlob;
using storage::EncodeBlob;

// The checksum is the last field of the header; it counts as zero in the sum.
constexpr size_t kChecksumAt = storage::kBlobHeaderBytes - sizeof(uint64_t);

void PutChecksumRight(Bytes& file) {
  if (file.size() < storage::kBlobHeaderBytes) return;
  std::memset(file.data() + kChecksumAt, 0, sizeof(uint64_t));
  const uint64_t sum = XXH3_64bits(file.data(), file.size());
  std::memcpy(file.data() + kChecksumAt, &sum, sizeof(sum));
}

void Check(const Bytes& file) {
  const auto decoded = DecodeBlob(file);
  if (decoded.ok()) FUZZ_EXPECT(EncodeBlob(*decoded) == file);
  // An encrypted one, with a key that cannot be its own and with none.
  static const auto keys = [] {
    const auto dir = std::filesystem::temp_directory_path() / "prefixd-blob-fuzz";
    const auto path = dir.string() + std::to_string(::getpid()) + ".key";
    static_cast<void>(storage::MakeKeyFile(path));
    const auto ring = storage::KeyRing::Read(path);
    std::filesystem::remove(path);
    return ring.ok() ? *ring : nullptr;
  }();
  for (const storage::KeyRing* ring : {static_cast<const storage::KeyRing*>(nullptr),
                                       static_cast<const storage::KeyRing*>(keys.get())}) {
    Bytes copy = file;
    FUZZ_EXPECT(storage::OpenBlob(copy, ring).ok() == decoded.ok());
  }
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  const uint8_t mode = Whole<uint8_t>(in) % 3;
  if (mode < 2) {
    Bytes file = Rest(in);
    if (mode == 1) PutChecksumRight(file);
    Check(file);
    return;
  }
  BlobContents contents;
  Fill(in, contents.segment.bytes);
  const std::string name = in.ConsumeRandomLengthString(100);
  const std::string producer = in.ConsumeRandomLengthString(1100);
  const auto payload = in.ConsumeBytes<uint8_t>(Whole<uint16_t>(in));
  contents.name = name;
  contents.producer = producer;
  contents.payload = std::as_bytes(std::span(payload));
  const Bytes file = EncodeBlob(contents);
  const auto back = DecodeBlob(file);
  FUZZ_EXPECT(back.ok() && back->segment == contents.segment && back->name == name);
  FUZZ_EXPECT(back->producer == producer && std::ranges::equal(back->payload, contents.payload));
  CheckDamaged(in, file, Check, PutChecksumRight);
}

}  // namespace prefixd::fuzz
