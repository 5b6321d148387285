// Measures what encryption at rest costs: durable put, cold restore and cold random rows of an
// encrypted store beside those of one in clear, in turns, on one disk; and the speed of ciphers and
// of the checksum on one core, which are the floor.
//
// Geometry: Llama-3.2-1B (16 layers, 8 KV heads of 64, bf16): 32 KiB of rows a token.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/support/bench_main.h"
#include "measure/disk/medium.h"
#include "measure/disk/scratch.h"
#include "measure/prompts/bench_prompt.h"
#include "measure/timing/json_file.h"
#include "measure/timing/paired.h"
#include "measure/timing/timed.h"
#include "storage/crypt/key_ring.h"
#include "storage/segment/page_seal.h"
#include "storage/store/prefix_store.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;
using storage::CipherKind;

struct Options {
  uint32_t tokens = 4096, pairs = 7, rows = 4096;
  std::filesystem::path dir = ScratchParent("/var/lib/prefixd");
  std::string json_file;
};

// One store with one prompt, in clear or encrypted.
class Side {
 public:
  Side(const Options& options, const std::filesystem::path& dir, CipherKind cipher)
      : options_(options) {
    at_.dir = dir;
    at_.host_tier_bytes = 0;  // every read goes to the disk
    at_.cipher = cipher;
    if (cipher != CipherKind::kNone) at_.encryption_key_file = dir.parent_path() / "key";
  }

  Status Open() {
    PREFIXD_ASSIGN(store_, storage::PrefixStore::Open(at_));
    PREFIXD_TRY(store_->PutModel({kModelName, {}, geometry_, "{}"}));
    rows_.resize(options_.tokens * geometry_.token_bytes() / geometry_.n_layers);
    std::mt19937_64 rng(1);
    for (size_t i = 0; i + 8 <= rows_.size(); i += 8) {
      const uint64_t random = rng();
      std::memcpy(rows_.data() + i, &random, sizeof(random));
    }
    return {};
  }

  Result<Sample> Put() {
    prefix_.reset();
    if (stored_) PREFIXD_TRY(store_->Remove(id_));
    stored_ = false;
    std::vector<uint32_t> tokens(options_.tokens);
    for (uint32_t& t : tokens) t = next_++;
    const auto bytes = double(rows_.size()) * geometry_.n_layers;
    PREFIXD_ASSIGN(const Sample sample, Timed(bytes, bytes, [&]() -> Status {
                     PREFIXD_ASSIGN(const auto put, store_->BeginPut(kModelName, "", tokens, ""));
                     for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
                       PREFIXD_TRY(put->WriteRows(layer, 0, options_.tokens, rows_));
                     }
                     PREFIXD_ASSIGN(id_, put->Commit());
                     return {};
                   }));
    stored_ = true;
    PREFIXD_ASSIGN(prefix_, store_->OpenPrefix(id_, 0));
    return sample;
  }

  // One thread.
  Result<Sample> Restore() {
    const auto bytes = double(rows_.size()) * geometry_.n_layers;
    const size_t head = rows_.size() / geometry_.n_kv_heads;
    return Timed(bytes, bytes, [&]() -> Status {
      for (uint32_t layer = 0; layer < geometry_.n_layers; ++layer) {
        for (uint32_t h = 0; h < geometry_.n_kv_heads; ++h) {
          PREFIXD_TRY(prefix_->ReadRange(layer, h, {0, options_.tokens},
                                         std::span(out_).first(head), nullptr));
        }
      }
      return {};
    });
  }

  // Single rows, each in a page of its own; bytes are those of the pages.
  Result<Sample> Rows() {
    std::vector<uint32_t> ids;
    for (uint32_t t = 3; t < options_.tokens; t += 64) ids.push_back(t);
    const uint32_t runs = std::max<uint32_t>(1, options_.rows / static_cast<uint32_t>(ids.size()));
    const double n = double(ids.size()) * runs;
    const size_t bytes = ids.size() * geometry_.row(0).bytes();
    return Timed(n, n * storage::kPageBytes, [&]() -> Status {
      for (uint32_t run = 0; run < runs; ++run) {
        const uint32_t of = run % (geometry_.n_layers * geometry_.n_kv_heads);
        PREFIXD_TRY(prefix_->ReadRows(of / geometry_.n_kv_heads, of % geometry_.n_kv_heads, ids,
                                      std::span(out_).first(bytes), nullptr));
      }
      return {};
    });
  }

  void MakeRoom() { out_.resize(rows_.size()); }

 private:
  const Options& options_;
  const KvGeometry geometry_ = Llama1B();
  storage::StoreOptions at_;
  std::unique_ptr<storage::PrefixStore> store_;
  std::vector<std::byte> rows_, out_;
  std::shared_ptr<const storage::StoredPrefix> prefix_;
  storage::SegmentId id_;
  bool stored_ = false;
  uint32_t next_ = 0;
};

void Print(const Paired& p, json& report) {
  std::printf(
      "%-28s %8.1f (%.1f-%.1f) %-7s clear %8.1f  ratio %.2f (%.2f-%.2f)  CPU s/GB %.2f, "
      "clear %.2f\n",
      p.name.c_str(), p.ours.median / p.unit_divisor, p.ours.low / p.unit_divisor,
      p.ours.high / p.unit_divisor, p.unit.c_str(), p.floor.median / p.unit_divisor, p.ratio.median,
      p.ratio.low, p.ratio.high, p.ours_cpu, p.floor_cpu);
  report["lines"].push_back({{"name", p.name},
                             {"encrypted", p.ours},
                             {"clear", p.floor},
                             {"ratio", p.ratio},
                             {"cpu_seconds_per_gb", p.ours_cpu},
                             {"clear_cpu_seconds_per_gb", p.floor_cpu}});
}

// Pages of 4 KiB that lie in the cache, on one core.
Status MeasureCiphers(const Options& options, const storage::MasterKey& key, json& report) {
  constexpr size_t kPages = 64, kRounds = 400;
  std::vector<std::byte> plain(kPages * storage::kPageBytes), sealed(plain.size());
  std::vector<uint64_t> tags(kPages * 2);
  const auto bytes = double(plain.size()) * kRounds;
  const auto page = [](std::vector<std::byte>& all, size_t i) {
    return storage::PageBytes(all.data() + i * storage::kPageBytes, storage::kPageBytes);
  };
  const auto measure = [&](const std::string& name, const auto& round) -> Status {
    PREFIXD_ASSIGN(const Paired p, MeasurePairs(
                                       {name, "MB/s", "", 1e6}, options.pairs,
                                       [&] {
                                         return Timed(bytes, bytes, [&]() -> Status {
                                           for (size_t r = 0; r < kRounds; ++r) round();
                                           return {};
                                         });
                                       },
                                       nullptr));
    std::printf("%-28s %8.0f MB/s on one core\n", name.c_str(), p.ours.median / 1e6);
    report["ciphers"].push_back({{"name", name}, {"bytes_per_second", p.ours}});
    return {};
  };
  for (const CipherKind kind : {CipherKind::kAes256Gcm, CipherKind::kXChaCha20Poly1305}) {
    if (!storage::CipherAvailable(kind)) continue;
    const storage::Uuid file{};
    PREFIXD_ASSIGN(const auto cipher,
                   storage::FileCipher::Of(key, kind, storage::FileKind::kSegment, file));
    const auto tag = [&](size_t i) { return reinterpret_cast<std::byte*>(tags.data() + 2 * i); };
    const auto seal = [&] {
      for (size_t i = 0; i < kPages; ++i) {
        cipher->Seal(i + 1, page(plain, i), page(sealed, i).data(), tag(i));
      }
    };
    bool sound = true;
    PREFIXD_TRY(measure(std::string(storage::CipherName(kind)) + ", encrypt", seal));
    PREFIXD_TRY(measure(std::string(storage::CipherName(kind)) + ", decrypt", [&] {
      // A page that is opened lies in clear; its copy is a twentieth of the time.
      static thread_local std::vector<std::byte> copy(storage::kPageBytes);
      for (size_t i = 0; i < kPages; ++i) {
        std::memcpy(copy.data(), page(sealed, i).data(), copy.size());
        sound &= cipher->Open(i + 1, copy, tag(i));
      }
    }));
    if (!sound) return Error{Code::kInternal, "a page did not come back"};
  }
  const storage::PageSeal checksum{storage::Uuid{}};
  return measure("checksum (XXH3)", [&] {
    for (size_t i = 0; i < kPages; ++i) checksum.Note(i, page(plain, i), &tags[i]);
  });
}

Status Run(const Options& options, const std::filesystem::path& dir) {
  const Medium medium = MediumOf(dir);
  if (!medium.disk) std::printf("%s\n", medium.sentence.c_str());
  PREFIXD_TRY(storage::MakeKeyFile(dir / "key"));
  PREFIXD_ASSIGN(const auto keys, storage::KeyRing::Read(dir / "key"));
  json report = {{"on_disk", medium.disk}};
  PREFIXD_TRY(MeasureCiphers(options, keys->newest(), report));
  for (const CipherKind kind : {CipherKind::kAes256Gcm, CipherKind::kXChaCha20Poly1305}) {
    if (!storage::CipherAvailable(kind)) continue;
    const std::string name(storage::CipherName(kind));
    Side clear(options, dir / ("clear-" + name), CipherKind::kNone);
    Side encrypted(options, dir / name, kind);
    for (Side* side : {&clear, &encrypted}) {
      PREFIXD_TRY(side->Open());
      side->MakeRoom();
    }
    const auto measure = [&](const std::string& what, const char* unit, double divisor,
                             Result<Sample> (Side::*run)()) -> Status {
      PREFIXD_ASSIGN(const Paired p,
                     MeasurePairs(
                         {name + ", " + what, unit, "clear", divisor}, options.pairs,
                         [&] { return (encrypted.*run)(); }, [&] { return (clear.*run)(); }));
      Print(p, report);
      return {};
    };
    PREFIXD_TRY(measure("put", "MB/s", 1e6, &Side::Put));
    PREFIXD_TRY(measure("restore", "MB/s", 1e6, &Side::Restore));
    PREFIXD_TRY(measure("rows", "rows/s", 1, &Side::Rows));
  }
  if (options.json_file.empty()) return {};
  return WriteJson(options.json_file, report);
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  using namespace prefixd::bench;
  Options options;
  CLI::App app("What encryption at rest costs, beside a store in clear.");
  app.add_option("--tokens", options.tokens, "Tokens of the stored prompt, 32 KiB each")
      ->check(CLI::Range(1024, 1 << 18))
      ->capture_default_str();
  app.add_option("--pairs", options.pairs, "Measured pairs per line")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--rows", options.rows, "Single rows of a run")->capture_default_str();
  app.add_option(
         "--dir", options.dir,
         "A directory on the disk to be measured; the stores lie in a folder there, which goes")
      ->capture_default_str();
  return BenchMain(app, argc, argv, options.json_file, [&]() -> prefixd::Status {
    PREFIXD_ASSIGN(
        const int code, RunInScratch(options.dir, [&](const std::filesystem::path& folder) {
          const prefixd::Status status = Run(options, folder);
          if (status.ok()) return 0;
          std::fprintf(stderr, "encryption_bench: %s\n", status.error().ToString().c_str());
          return 1;
        }));
    if (code == 0) return {};
    return prefixd::Error{prefixd::Code::kCancelled,
                          "ended early, with status " + std::to_string(code)};
  });
}
