#include "bench/storage/stored_reads.h"

#include <chrono>
#include <memory>

#include "attention/rows/rows.h"
#include "runtime/store/local_store.h"
#include "storage/segment/segment_layout.h"
#include "storage/store/prefix_store.h"

namespace prefixd::bench {
namespace {

using storage::kPageBytes;
using storage::RowPart;
using Clock = std::chrono::steady_clock;

constexpr char kModel[] = "trace";

class Replay {
 public:
  Replay(const RetrievalTrace& trace, const std::filesystem::path& dir) : trace_(trace) {
    runtime_.dir = dir;
    runtime_.host_tier_bytes = 0;
    runtime_.build_codes = runtime_.build_ivf = false;  // the trace gives the sets
    storage_.dir = dir;
    storage_.host_tier_bytes = 0;
  }

  Result<std::vector<StoredReads>> Run() {
    std::vector<StoredReads> out;
    PREFIXD_TRY(Store(/*recluster=*/false));
    PREFIXD_ASSIGN(out.emplace_back(), Read("rows in order of arrival", RowPart::kRow, false));
    PREFIXD_TRY(Store(/*recluster=*/true));
    PREFIXD_ASSIGN(out.emplace_back(), Read("rows, reclustered", RowPart::kRow, true));
    PREFIXD_ASSIGN(out.emplace_back(), Read("values alone, reclustered", RowPart::kValue, true));
    return out;
  }

 private:
  // Puts the prompt, if it is not there yet, and waits for the background work on it.
  Status Store(bool recluster) {
    runtime_.recluster = recluster;
    PREFIXD_ASSIGN(const auto store, prefixd::LocalStore::Open(runtime_));
    const KvGeometry& g = trace_.geometry;
    PREFIXD_TRY(store->RegisterModel({kModel, g, {{"weights", "trace"}}, {}}));
    PREFIXD_ASSIGN(const auto put, store->BeginPut({kModel, "", trace_.tokens, "trace"}));
    for (uint32_t layer = 0; layer < g.n_layers && put->missing().size() > 0; ++layer) {
      const auto k = Bytes(layer, &RetrievalTrace::Head::keys, g.key_dim);
      const auto v = Bytes(layer, &RetrievalTrace::Head::values, g.value_dim);
      PREFIXD_TRY(put->Write(layer, 0, trace_.n_tokens, k, v));
    }
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    PREFIXD_TRY(store->WaitReady(stored.prefix, nullptr));
    return store->WaitRewritten(nullptr);
  }

  // Returns [n][n_kv_heads][dim] in the stored dtype.
  std::vector<std::byte> Bytes(uint32_t layer, std::vector<float> RetrievalTrace::Head::*part,
                               uint32_t dim) const {
    const KvGeometry& g = trace_.geometry;
    std::vector<float> all;
    all.reserve(size_t{trace_.n_tokens} * g.n_kv_heads * dim);
    for (size_t t = 0; t < trace_.n_tokens; ++t) {
      for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
        const auto& of_head = trace_.heads[size_t{layer} * g.n_kv_heads + h].*part;
        const auto row = of_head.begin() + static_cast<ptrdiff_t>(t * dim);
        all.insert(all.end(), row, row + dim);
      }
    }
    std::vector<std::byte> bytes(all.size() * DTypeBytes(g.dtype));
    FromFloat(g.dtype, all, bytes.data());
    return bytes;
  }

  Result<StoredReads> Read(const char* name, RowPart part, bool reclustered) const {
    PREFIXD_ASSIGN(const auto store, storage::PrefixStore::Open(storage_));
    PREFIXD_ASSIGN(const auto match, store->LongestMatch(kModel, "", trace_.tokens));
    PREFIXD_ASSIGN(const auto prefix, store->OpenPrefix(match.id, 0));
    if (prefix->n_tokens() != trace_.n_tokens || prefix->info().reclustered != reclustered) {
      return Error{Code::kInternal, std::string(name) + ": the prompt is not stored like that"};
    }
    StoredReads out{name, {}, {}};
    for (size_t f = 0; f < trace_.heads[0].sets.size(); ++f)
      PREFIXD_TRY(ReadSets(*prefix, f, part, out));
    return out;
  }

  Status ReadSets(const storage::StoredPrefix& prefix, size_t fraction, RowPart part,
                  StoredReads& out) const {
    const RowShape row = trace_.geometry.row(0);
    const uint32_t heads = trace_.geometry.n_kv_heads;
    const size_t bytes = storage::PartBytes(row, part);
    const size_t per_page = std::max<size_t>(1, kPageBytes / bytes);
    const auto steps = double(trace_.heads[0].sets[fraction].size());
    storage::ReadStats stats;
    uint64_t rows = 0, best = 0;
    std::vector<std::byte> to;
    const auto begun = Clock::now();
    for (size_t head = 0; head < trace_.heads.size(); ++head) {
      for (const std::vector<uint32_t>& ids : trace_.heads[head].sets[fraction]) {
        to.resize(ids.size() * bytes);
        PREFIXD_TRY(prefix.ReadRows(static_cast<uint32_t>(head / heads),
                                    static_cast<uint32_t>(head % heads), ids, part, {to, bytes},
                                    &stats));
        rows += ids.size();
        best += (ids.size() + per_page - 1) / per_page;
      }
    }
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
    const double row_bytes = double(rows * row.bytes());
    out.reads.push_back({double(rows) / steps, double(stats.pages_ssd) / steps,
                         double(stats.pages_ssd * kPageBytes) / row_bytes,
                         double(best * kPageBytes) / row_bytes});
    out.ms_per_step.push_back(ms / steps);
    return {};
  }

  const RetrievalTrace& trace_;
  RuntimeOptions runtime_;
  storage::StoreOptions storage_;
};

}  // namespace

Result<std::vector<StoredReads>> MeasureStoredReads(const RetrievalTrace& trace,
                                                    const std::filesystem::path& dir) {
  auto reads = Replay(trace, dir).Run();
  std::error_code ec;
  std::filesystem::remove_all(dir, ec);
  return reads;
}

}  // namespace prefixd::bench
