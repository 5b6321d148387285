// Damages data at rest: segments as they were put, reclustered, compacted with blobs of their own,
// and both. The harness changes every byte of a segment's metadata in turn and random bytes of its
// rows; it zeroes and swaps whole pages, and takes some from another segment or from an older one
// with the same tokens; it changes bytes of blobs, of the STORE file and of the catalog. Then the
// store serves right data or none; it finds damage that a checksum covers; and it serves repaired
// data again.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>

#include "storage/catalog/store_dir.h"
#include "storage/segment/segment_format.h"
#include "tests/reliability/harness/harness.h"
#include "tests/reliability/harness/report.h"
#include "tests/reliability/shim/checksum_seam.h"
#include "tests/reliability/workload/workload.h"
#include "tests/storage/read/finite_rows.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;
namespace {

// A quarter of the segments each is as put; reclustered; compacted; compacted and reclustered.
// Every third is encoded, so that after kAlike segments the next one repeats the first's making.
constexpr size_t kSegments = 24, kAlike = 12;
constexpr bool Reclustered(size_t i) { return i / 3 % 2 == 1; }
constexpr bool Compacted(size_t i) { return i / 6 % 2 == 1; }
constexpr uint32_t kTokens = 100;
constexpr uint64_t kRounds = 40;
constexpr uint64_t kFlipsPerCycle = kSegments * kRounds;
constexpr uint64_t kMetadataPages = 5;  // header, token ids, manifest, table, footer
constexpr uint64_t kMetadataBytes = kMetadataPages * kPageBytes;
constexpr uint64_t kMetadataCycles = (kMetadataBytes + kFlipsPerCycle - 1) / kFlipsPerCycle;
// Later cycles damage the order of reclustered rows, which half of the segments have.
constexpr uint64_t kOrderCycles = (kPageBytes + kFlipsPerCycle / 2 - 1) / (kFlipsPerCycle / 2);

std::string ReadAll(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

void Overwrite(const fs::path& path, uint64_t offset, std::string_view bytes) {
  std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
  out.seekp(static_cast<std::streamoff>(offset));
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

struct Segment {
  SegmentId id;       // id of its prefix
  SegmentId segment;  // the segment in which that ends: another after a compaction
  Tokens tokens;
  fs::path path;
  std::string sound;  // contents of its file
  std::string stale;  // contents of an earlier segment's file with the same tokens
  SegmentLayout layout;
  std::vector<std::byte> blob;
};

struct Damage {
  uint64_t offset = 0;
  std::string bytes;    // the bytes that are there instead
  bool covered = true;  // whether a checksum covers the damage
};

class Damager {
 public:
  Damager(fs::path dir, uint64_t seed, Journal& report)
      : dir_(std::move(dir)), rng_(seed), report_(report) {}

  bool Build() {
    if (!Open()) return false;
    if (!store_->PutModel(model_).ok()) return Wrong("cannot put the model");
    for (uint32_t i = 0; i < kSegments; ++i) {
      Segment s;
      s.tokens = {1'000'000 + i};
      const Tokens more = RandomTokens(rng_, kTokens - 1, 1000);
      s.tokens.insert(s.tokens.end(), more.begin(), more.end());
      s.blob = BlobBytes(0, 7 + i);
      s.blob.resize(500);
      for (std::string* file : {&s.stale, &s.sound}) {
        Status made = Make(i, s);
        if (!made.ok()) return Wrong("cannot make a segment: " + made.error().ToString());
        *file = ReadAll(s.path);
        if (file == &s.stale && !store_->Remove(s.id).ok()) return Wrong("cannot remove");
      }
      const auto blob = store_->GetBlob(s.segment, "b", "p");
      if (!blob.ok() || *blob != s.blob) return Wrong("a blob did not stay with its segment");
      const auto header = SegmentHeader::Decode(
          ConstPageBytes(reinterpret_cast<const std::byte*>(s.sound.data()), kPageBytes));
      if (!header.ok()) return Wrong("a sound header does not decode");
      const auto layout = header->Layout();
      if (!layout.ok()) return Wrong("a sound header has no layout");
      s.layout = *layout;
      if (s.layout.reclustered() != Reclustered(i))
        return Wrong("a segment does not lie as asked for");
      segments_.push_back(std::move(s));
    }
    return true;
  }

  // Flips metadata bytes [first, first + kFlipsPerCycle), one a segment and round.
  void FlipMetadata(uint64_t first) {
    for (uint64_t r = 0; r < kRounds; ++r) {
      std::vector<Damage> damage;
      for (size_t i = 0; i < kSegments; ++i) {
        damage.push_back(MetadataFlip(i, (first + r * kSegments + i) % kMetadataBytes));
      }
      Round(damage);
      report_.Count(kSegments, "metadata flips");
    }
  }

  // Flips bytes [first, first + kFlipsPerCycle / 2) of reclustered segments' stored order, those of
  // the run of that number; for other segments, bytes of rows.
  void FlipOrders(uint64_t first, uint64_t run) {
    for (uint64_t r = 0; r < kRounds; ++r) {
      std::vector<Damage> damage;
      uint64_t at = first + r * kSegments / 2;
      for (size_t i = 0; i < kSegments; ++i) {
        const SegmentLayout& layout = segments_[i].layout;
        const uint64_t page =
            layout.order_page + run % std::max<uint64_t>(1, layout.table_page - layout.order_page);
        damage.push_back(Reclustered(i) ? Flip(i, page * kPageBytes + at++ % kPageBytes)
                                        : RowFlip(i));
      }
      Round(damage);
      report_.Count(kSegments / 2, "flips in stored orders");
      report_.Count(kSegments / 2, "data flips");
    }
  }

  void FlipData() {
    for (uint64_t r = 0; r < kRounds; ++r) {
      std::vector<Damage> damage;
      const bool pages = r % 8 == 0;
      for (size_t i = 0; i < kSegments; ++i) {
        damage.push_back(pages ? PageDamage(i) : RowFlip(i));
      }
      Round(damage);
      report_.Count(kSegments, pages ? "pages replaced" : "data flips");
    }
  }

  // Flips every byte of the header, name and producer in turn, and of the payload.
  void FlipBlobs(uint64_t from) {
    if (!store_ && !Open()) return;
    for (size_t i = 0; i < kSegments; ++i) {
      const Segment& s = segments_[i];
      const fs::path path = BlobPath(dir_, s.segment, "b");
      const std::string sound = ReadAll(path);
      const uint64_t at = (from + i) % sound.size();
      std::string bad(1, static_cast<char>(sound[at] ^ Mask()));
      Overwrite(path, at, bad);
      const auto got = store_->GetBlob(s.segment, "b", "p");
      if (got.ok()) Wrong("a blob with byte " + std::to_string(at) + " changed was served");
      // A damaged blob is deleted, so that ingest derives it again.
      if (fs::exists(path)) Wrong("a damaged blob was kept");
      if (!store_->PutBlob(s.segment, "b", "p", s.blob).ok()) Wrong("a blob cannot be put again");
      const auto again = store_->GetBlob(s.segment, "b", "p");
      if (!again.ok() || *again != s.blob) Wrong("a blob that was put again was not served");
      report_.Count(1, "blob flips");
    }
  }

  // Checks that the store does not open, or is right.
  void FlipStoreFile() {
    store_.reset();
    const fs::path path = dir_ / "STORE";
    const std::string sound = ReadAll(path);
    for (uint64_t at = 0; at < sound.size(); ++at) {
      Overwrite(path, at, std::string(1, static_cast<char>(sound[at] ^ Mask())));
      if (TryOpen()) {
        for (const Segment& s : segments_) Served(s);
        store_.reset();
      }
      Overwrite(path, at, std::string_view(sound).substr(at, 1));
      report_.Count(1, "STORE flips");
    }
  }

  // The flips are made on copies, for opening a store with a damaged log mends it.
  void FlipCatalog(uint64_t copies) {
    store_.reset();
    const fs::path sound = dir_;
    for (uint64_t i = 0; i < copies; ++i) {
      dir_ = sound.parent_path() / "copy";
      fs::copy(sound, dir_, fs::copy_options::recursive);
      std::vector<fs::path> files;
      for (const auto& entry : fs::directory_iterator(dir_ / "catalog")) {
        if (entry.is_regular_file() && entry.file_size() > 0) files.push_back(entry.path());
      }
      std::sort(files.begin(), files.end());
      const fs::path path = files[rng_() % files.size()];
      const std::string content = ReadAll(path);
      const uint64_t at = rng_() % content.size();
      Overwrite(path, at, std::string(1, static_cast<char>(content[at] ^ Mask())));
      if (TryOpen()) {
        for (const Segment& s : segments_) Served(s);
        store_.reset();
      }
      fs::remove_all(dir_);
      report_.Count(1, "catalog flips");
    }
    dir_ = sound;
  }

 private:
  bool Wrong(const std::string& what) {
    report_.Violation(what);
    return false;
  }

  bool TryOpen() {
    auto opened = PrefixStore::Open(WorkloadOptions(dir_));
    if (!opened.ok()) return false;
    store_ = std::move(*opened);
    return true;
  }
  bool Open() {
    store_.reset();
    return TryOpen() || Wrong("the store does not open");
  }

  Result<SegmentId> PutRows(std::span<const uint32_t> tokens, RowEncoding encoding) {
    const KvGeometry& g = model_.geometry;
    PREFIXD_ASSIGN(auto writer,
                   store_->BeginPut(model_.name, "t", tokens, "label", {.encoding = encoding}));
    PREFIXD_TRY(WriteAll(*writer, g, FiniteRows(g.row(0), tokens), /*chunk=*/37, true));
    return writer->Commit();
  }

  // Puts the tokens of `s` and its blob, in the form of the i-th segment.
  Status Make(uint32_t i, Segment& s) {
    const RowEncoding encoding = EncodingOf(i);
    if (Compacted(i)) {
      PREFIXD_ASSIGN(const SegmentId first,
                     PutRows(std::span(s.tokens).first(kTokens * 2 / 5), encoding));
      PREFIXD_ASSIGN(s.id, PutRows(s.tokens, encoding));
      PREFIXD_TRY(store_->Remove(first));
      const NewBlob blob{"b", "p", s.blob};
      PREFIXD_ASSIGN(s.segment, store_->Compact(s.id, kTokens, std::span(&blob, 1)));
    } else {
      PREFIXD_ASSIGN(s.id, PutRows(s.tokens, encoding));
      s.segment = s.id;
      PREFIXD_TRY(store_->PutBlob(s.segment, "b", "p", s.blob));
    }
    if (Reclustered(i)) PREFIXD_TRY(store_->Recluster(s.segment, WorkloadSettling()));
    PREFIXD_ASSIGN(const PrefixInfo info, store_->GetPrefix(s.id));
    s.path = SegmentPath(dir_, info.file);
    return {};
  }

  uint8_t Mask() { return static_cast<uint8_t>(1 + rng_() % 255); }

  Damage Flip(size_t i, uint64_t offset) {
    return {offset, std::string(1, static_cast<char>(segments_[i].sound[offset] ^ Mask())), true};
  }

  Damage RowFlip(size_t i) {
    return Flip(i, rng_() % (segments_[i].layout.table_page * kPageBytes));
  }

  Damage MetadataFlip(size_t i, uint64_t ordinal) {
    const SegmentLayout& layout = segments_[i].layout;
    const uint64_t pages[kMetadataPages] = {0, layout.token_page, layout.manifest_page,
                                            layout.table_page, layout.footer_page};
    const uint64_t page = pages[ordinal / kPageBytes], in_page = ordinal % kPageBytes;
    Damage damage = Flip(i, page * kPageBytes + in_page);
    // The bytes behind the last checksum, or tag, of the table have no meaning.
    damage.covered =
        page != layout.table_page || in_page < layout.table_page * layout.shape.check_bytes;
    return damage;
  }

  Damage PageDamage(size_t i) {
    const Segment& s = segments_[i];
    const uint64_t page = rng_() % s.layout.total_pages();
    const auto page_of = [](const std::string& file, uint64_t p) {
      return file.substr(p * kPageBytes, kPageBytes);
    };
    Damage damage{page * kPageBytes, "", true};
    switch (rng_() % 4) {
      case 0:
        damage.bytes.assign(kPageBytes, '\0');
        break;
      case 1:
        damage.bytes = page_of(s.sound, (page + 1 + rng_() % 3) % s.layout.total_pages());
        break;
      case 2:
        damage.bytes = page_of(segments_[(i + kAlike) % kSegments].sound, page);
        break;
      default:
        damage.bytes = page_of(s.stale, page);
    }
    damage.covered = damage.bytes != page_of(s.sound, page);
    return damage;
  }

  // Returns true for rows that are served and right, false for an error or a miss.
  bool Served(const Segment& s) {
    const auto match = store_->LongestMatch("m", "t", s.tokens);
    if (match.ok() && match->n_tokens > s.tokens.size()) Wrong("a match is longer than asked");
    const auto prefix = store_->OpenPrefix(s.id, 0);
    if (!prefix.ok()) return false;
    const auto difference = Compare(
        **prefix, s.tokens, FiniteRows(model_.geometry.row(0), s.tokens, (*prefix)->parts()));
    if (!difference.ok()) return false;
    if (!difference->empty()) Wrong("wrong bytes were served: " + *difference);
    return difference->empty();
  }

  void Round(const std::vector<Damage>& damage) {
    if (!store_ && !Open()) return;
    const bool reopen = rng_() % 4 == 0;
    if (reopen) store_.reset();
    for (size_t i = 0; i < kSegments; ++i) {
      Overwrite(segments_[i].path, damage[i].offset, damage[i].bytes);
    }
    if (reopen && !Open()) return;
    for (const Segment& s : segments_) {
      if (!Served(s)) report_.Count(1, "refused at once");
    }
    const auto report = store_->Verify(nullptr, nullptr);
    if (!report.ok()) {
      Wrong("verify: " + report.error().ToString());
      return;
    }
    std::string all;
    for (const std::string& damaged : report->damaged) all += damaged;
    for (size_t i = 0; i < kSegments; ++i) {
      const bool found = all.find(segments_[i].segment.ToString()) != std::string::npos;
      if (damage[i].covered && !found) {
        Wrong("damage at offset " + std::to_string(damage[i].offset) + " was not found");
      }
      if (found && Served(segments_[i])) Wrong("a segment found damaged was served");
    }
    for (size_t i = 0; i < kSegments; ++i) {
      Overwrite(
          segments_[i].path, damage[i].offset,
          std::string_view(segments_[i].sound).substr(damage[i].offset, damage[i].bytes.size()));
    }
    const auto after = store_->Verify(nullptr, nullptr);
    if (!after.ok() || !after->damaged.empty()) Wrong("repaired segments do not verify");
    for (const Segment& s : segments_) {
      if (rng_() % 8 == 0 && !Served(s)) Wrong("a repaired segment is not served");
    }
  }

  fs::path dir_;
  std::mt19937_64 rng_;
  Journal& report_;
  ModelRecord model_ = WorkloadModel();
  std::unique_ptr<PrefixStore> store_;
  std::vector<Segment> segments_;
};

}  // namespace

void DamageCycle(uint64_t number, uint64_t seed, Journal& report, bool checksums) {
  const Scratch scratch;
  const fs::path errors = scratch.path() / "errors";
  const ChildEnd end = RunChild(
      [&] {
        if (!checksums) SwitchChecksumsOff();
        Damager damager(scratch.path() / "store", seed, report);
        if (!damager.Build()) return 0;
        if (number < kMetadataCycles) {
          damager.FlipMetadata(number * kFlipsPerCycle);
        } else if (const uint64_t n = number - kMetadataCycles; n < kOrderCycles) {
          damager.FlipOrders(n * kFlipsPerCycle / 2, n);
        } else {
          damager.FlipData();
        }
        damager.FlipBlobs(number * kSegments);
        if (number == 0) damager.FlipStoreFile();
        damager.FlipCatalog(number % 4 == 0 ? 8 : 0);
        return 0;
      },
      errors);
  if (!end.exited || end.code != 0) {
    report.Violation(end.Describe() + Tail(errors));
  }
}

Prepared PrepareDamage(bool) {
  return {.cycle = [](uint64_t number, uint64_t seed, Journal& report) {
    DamageCycle(number, seed, report, /*checksums=*/true);
  }};
}

}  // namespace prefixd::storage::reliability
