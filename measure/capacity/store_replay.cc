#include "measure/capacity/store_replay.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "runtime/store/local_store.h"
#include "storage/files/store_options.h"
#include "storage/store/prefix_store.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

constexpr const char* kReplayModel = "replay";
constexpr uint32_t kDim = kReplayRowBytes / 4;  // a key and a value in bf16
constexpr uint32_t kVocabulary = 1 << 16;

// Rows by token, so that what is restored can be compared.
class Rows {
 public:
  Rows() : rows_(size_t{kVocabulary} * kDim * 2) {
    std::mt19937_64 rng(7);
    for (size_t b = 0; b < rows_.size(); b += 2) {  // bf16 in [1, 2)
      rows_[b] = std::byte(rng()), rows_[b + 1] = std::byte{0x3f};
    }
  }
  std::span<const std::byte> of(uint32_t token) const {
    return std::span(rows_).subspan(size_t{token} * kDim * 2, kDim * 2);
  }

 private:
  std::vector<std::byte> rows_;
};

uint64_t DiskBytesWritten() {
  std::ifstream in("/proc/self/io");
  std::string name;
  uint64_t value = 0;
  while (in >> name >> value) {
    if (name == "write_bytes:") return value;
  }
  return 0;
}

class StoreReplay {
 public:
  StoreReplay(const RequestLog& log, const ReplayOptions& options) : log_(log), o_(options) {}

  Result<ReplayOutcome> Run() {
    PREFIXD_TRY(Open());
    const auto begun = std::chrono::steady_clock::now();
    const uint64_t before = DiskBytesWritten();
    for (const Request& request : log_.requests) {
      PREFIXD_TRY(Serve(request));
      if (o_.progress) o_.progress(out_.hits.requests, log_.requests.size());
    }
    PREFIXD_TRY(WaitRewritten());
    out_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    PREFIXD_ASSIGN(const RuntimeStats stats, store_->Stats());
    out_.segments = stats.prefixes;
    out_.stored_bytes = stats.bytes_on_disk;
    out_.written_bytes = stats.bytes_written;
    for (const TenantStats& tenant : stats.tenants) out_.evictions += tenant.evictions;
    store_.reset();
    out_.disk_bytes = DiskBytesWritten() - before;
    return out_;
  }

 private:
  Status Open() {
    RuntimeOptions o;
    o.dir = o_.dir;
    o.quota_bytes = o_.quota_bytes;
    o.min_free_bytes = 0;
    o.host_tier_bytes = 64 << 20;
    // Rows alone: what is made of them depends on the model, and these are no model's.
    o.recluster = o.build_codes = o.build_ivf = false;
    o.phi_features = "none";
    o.estimators = {EstimatorKind::kNone, EstimatorKind::kMoment};
    o.scrub_bytes_per_second = 0;
    if (!o_.compact) o.compact_max_tokens = 0;
    const int64_t begun = std::chrono::duration_cast<std::chrono::milliseconds>(
                              std::chrono::system_clock::now().time_since_epoch())
                              .count();
    PREFIXD_ASSIGN(auto store, LocalStore::Open(o, [this, begun](storage::StoreOptions at) {
                     at.clock = [now = now_ms_, begun] { return begun + now->load(); };
                     return storage::PrefixStore::Open(at);
                   }));
    if (o_.serve) {
      PREFIXD_ASSIGN(store_, o_.serve(std::move(store)));
    } else {
      store_ = std::move(store);
    }
    KvGeometry g;
    g.n_layers = 1;
    g.n_q_heads = g.n_kv_heads = 1;
    g.key_dim = g.value_dim = kDim;
    g.layers.assign(1, {0.25f, 0, 0});
    return store_->RegisterModel({kReplayModel, g, {{"weights", kReplayModel}}, {}});
  }

  Status WaitRewritten() {
    for (;;) {
      PREFIXD_ASSIGN(const RuntimeStats stats, store_->Stats());
      if (stats.rewrite_queue == 0) return {};
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  // An id at a place stands for the same tokens wherever it comes.
  std::vector<uint32_t> TokensOf(const Request& request) const {
    std::vector<uint32_t> tokens(request.input_tokens);
    for (size_t t = 0; t < tokens.size(); ++t) {
      uint64_t x = request.blocks[t / log_.block_tokens] * 0x9e3779b97f4a7c15ull +
                   (t % log_.block_tokens + 1) * 0xd1b54a32d192ed03ull;
      x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
      tokens[t] = static_cast<uint32_t>((x >> 40) % kVocabulary);
    }
    return tokens;
  }

  Status Serve(const Request& request) {
    ++out_.hits.requests;
    out_.hits.input_tokens += request.input_tokens;
    now_ms_->store(static_cast<int64_t>(request.seconds * 1000));
    const std::vector<uint32_t> tokens = TokensOf(request);
    PREFIXD_ASSIGN(const PrefixMatch match, store_->Match({kReplayModel, "", tokens}));
    if (match.n_tokens > 0) {
      PREFIXD_TRY(RestoreRows(tokens, match));
      ++out_.hits.requests_hit;
      out_.hits.Hit(HitTokens(request, match.n_tokens));
    }
    return Put(request, tokens);
  }

  Status RestoreRows(std::span<const uint32_t> tokens, const PrefixMatch& match) {
    AttachSpec spec;
    spec.model = kReplayModel;
    spec.prefix = match.prefix;
    spec.n_tokens = match.n_tokens;
    spec.policy.mode = StepMode::kFull;
    PREFIXD_ASSIGN(const auto session, store_->Attach(spec));
    constexpr uint32_t kRun = 16'384;
    std::vector<std::byte> k(size_t{kRun} * kDim * 2), v(k.size());
    for (uint32_t begin = 0; begin < match.n_tokens; begin += kRun) {
      const TokenRange run{begin, std::min(begin + kRun, match.n_tokens)};
      const size_t bytes = size_t{run.size()} * kDim * 2;
      PREFIXD_TRY(
          session->ReadLayer({0, run}, std::span(k).first(bytes), std::span(v).first(bytes)));
      for (uint32_t t = run.begin; t < run.end; ++t) {
        const auto expected = rows_.of(tokens[t]);
        const size_t at = size_t{t - run.begin} * expected.size();
        if (std::memcmp(&k[at], expected.data(), expected.size()) != 0 ||
            std::memcmp(&v[at], expected.data(), expected.size()) != 0) {
          return Error{Code::kCorrupt, "token " + std::to_string(t) + " of request " +
                                           std::to_string(out_.hits.requests) +
                                           " was restored with other rows than were put"};
        }
      }
    }
    return {};
  }

  Status Put(const Request& request, const std::vector<uint32_t>& tokens) {
    auto put = store_->BeginPut({kReplayModel, "", tokens});
    if (put.ok() && (*put)->missing().size() > 0) {
      const TokenRange missing = (*put)->missing();
      std::vector<std::byte> rows(size_t{missing.size()} * kDim * 2);
      for (uint32_t t = missing.begin; t < missing.end; ++t) {
        const auto row = rows_.of(tokens[t]);
        std::memcpy(&rows[size_t{t - missing.begin} * row.size()], row.data(), row.size());
      }
      PREFIXD_TRY((*put)->Write(0, missing.begin, missing.size(), rows, rows));
    }
    if (!put.ok()) return Refused(put.error());
    const TokenRange missing = (*put)->missing();
    const auto stored = (*put)->Commit();
    if (!stored.ok()) return Refused(stored.error());
    // The next request finds nothing of this one under way: a segment that is worked on stays.
    PREFIXD_TRY(store_->WaitReady(stored->prefix, nullptr));
    out_.hits.stored_tokens += stored->stored_tokens;
    out_.row_bytes += uint64_t{stored->stored_tokens} * kReplayRowBytes;
    for (size_t b = missing.begin / log_.block_tokens; b < request.blocks.size(); ++b) {
      if (!seen_.insert(request.blocks[b]).second) continue;
      const uint64_t begin = uint64_t{b} * log_.block_tokens;
      out_.hits.distinct_tokens +=
          std::min<uint64_t>(log_.block_tokens, request.input_tokens - begin);
    }
    return {};
  }

  Status Refused(const Error& error) {
    if (error.code != Code::kResourceExhausted) return error;
    ++out_.refused;
    return {};
  }

  const RequestLog& log_;
  const ReplayOptions& o_;
  const Rows rows_;
  const std::shared_ptr<std::atomic<int64_t>> now_ms_ = std::make_shared<std::atomic<int64_t>>(0);
  std::shared_ptr<Store> store_;
  ReplayOutcome out_;
  std::unordered_set<uint64_t> seen_;
};

}  // namespace

Result<ReplayOutcome> ReplayInStore(const RequestLog& log, const ReplayOptions& options) {
  return StoreReplay(log, options).Run();
}

Result<StoreShape> MeasureStoreShape(const fs::path& dir) {
  constexpr uint32_t kFew = 1000, kMany = 65'000;
  double bytes[2] = {0, 0};
  for (const uint32_t tokens : {kFew, kMany}) {
    RequestLog log;
    log.block_tokens = 1 << 20;
    log.requests = {{0, tokens, 1, {1}}};
    ReplayOptions options;
    options.dir = dir;
    PREFIXD_ASSIGN(const ReplayOutcome out, ReplayInStore(log, options));
    bytes[tokens == kMany] = double(out.stored_bytes);
    std::error_code ec;
    fs::remove_all(dir, ec);
  }
  StoreShape shape;
  shape.token_bytes = (bytes[1] - bytes[0]) / (kMany - kFew);
  shape.segment_bytes = bytes[0] - kFew * shape.token_bytes;
  return shape;
}

}  // namespace prefixd::bench
