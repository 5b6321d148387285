#include "bench/storage/stored_reads.h"

#include <chrono>
#include <memory>

#include "bench/prompts/traced_store.h"
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
    PREFIXD_ASSIGN(const std::string prefix, PutTrace(*store, kModel, trace_, /*queries=*/false));
    PREFIXD_TRY(store->WaitReady(prefix, nullptr));
    return store->WaitRewritten(nullptr);
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
