#include "prefixd/restore.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/capture_errors.h"
#include "base/opened_here.h"

namespace prefixd {
namespace {

// One read is large enough to keep the disk busy, and small enough that the first layer arrives
// soon.
constexpr uint64_t kRunBytes = 8ull << 20;
// Runs read in one call. Some buffers go around among as many: fresh memory is slow.
constexpr size_t kRunsAtOnce = 4;

// Whole lines of the caches: parts of them are slow to copy to (base/rows/copy_rows.h).
struct FreeLines {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using Lines = std::unique_ptr<std::byte[], FreeLines>;
Lines NewLines(size_t bytes) {
  constexpr size_t kLine = 64;
  Lines lines(static_cast<std::byte*>(std::aligned_alloc(kLine, (bytes / kLine + 1) * kLine)));
  if (lines == nullptr) throw std::bad_alloc();
  return lines;
}

struct Buffer {
  Lines k, v;
};

class RestoreImpl final : public Restore {
 public:
  RestoreImpl(std::shared_ptr<Session> session, const RestoreOptions& options)
      : session_(std::move(session)), options_(options) {
    uint64_t all_layers = 0;
    for (uint32_t l = options_.first_layer; l < options_.end_layer; ++l) {
      const LayerTokens of = TokensOf(l);
      k_token_ = std::max(k_token_, of.k);
      v_token_ = std::max(v_token_, of.v);
      all_layers += of.k + of.v;
    }
    const uint64_t token = std::max<uint64_t>(1, k_token_ + v_token_);
    const auto wanted = static_cast<uint32_t>(
        std::max<uint64_t>(1, std::min(kRunBytes, options_.buffer_bytes / 2) / token));
    for (uint32_t at = options_.tokens.begin; at < options_.tokens.end; at = runs_.back().end) {
      const uint32_t end = RunEnd(session_->info().parts, at, wanted);
      runs_.push_back({at, std::clamp(end, at + 1, options_.tokens.end)});
      longest_ = std::max(longest_, runs_.back().size());
    }
    total_bytes_ = all_layers * options_.tokens.size();
    const uint64_t fit =
        longest_ == 0 || all_layers == 0 ? 2 : options_.buffer_bytes / (longest_ * token);
    free_.resize(std::max<uint64_t>(2, fit));
    reader_ = std::thread([this] {
      const Status read = CaptureErrors([this]() -> Status {
        Read();
        return {};
      });
      if (read.ok()) return;
      std::lock_guard lock(mutex_);
      if (failed_.ok()) failed_ = read;
      changed_.notify_all();
    });
  }

  ~RestoreImpl() override {
    Cancel();
    reader_.join();
  }
  RestoreImpl(const RestoreImpl&) = delete;
  RestoreImpl& operator=(const RestoreImpl&) = delete;

  Result<std::optional<RestoredRun>> Next() override {
    PREFIXD_TRY(opened_.Check());  // a child of fork() would wait for a thread that it has not
    RestoredRun run;
    {
      std::unique_lock lock(mutex_);
      if (lent_) {
        free_.push_back(std::move(*lent_));
        lent_.reset();
        changed_.notify_all();
      }
      changed_.wait(lock, [&] { return !ready_.empty() || read_all_ || !failed_.ok(); });
      if (!failed_.ok()) return failed_.error();
      if (ready_.empty()) return std::optional<RestoredRun>();
      run = ready_.front().run;
      lent_ = std::move(ready_.front().buffer);
      ready_.pop_front();
    }
    done_bytes_ += run.k.size() + run.v.size();
    if (options_.progress && !options_.progress(done_bytes_, total_bytes_, "bytes")) {
      Cancel();
      return Cancelled();
    }
    return std::optional(run);
  }

  void Cancel() override {
    std::lock_guard lock(mutex_);
    if (failed_.ok()) failed_ = Cancelled();
    ready_.clear();
    changed_.notify_all();
  }

 private:
  struct Ready {
    RestoredRun run;
    Buffer buffer;
  };

  // Bytes of one token of one layer.
  struct LayerTokens {
    size_t k = 0, v = 0;
  };
  LayerTokens TokensOf(uint32_t layer) const {
    const LayerShape shape = session_->info().geometry.layer(layer);
    return {shape.n_kv_heads * shape.row().key_bytes(),
            shape.n_kv_heads * shape.row().value_bytes()};
  }

  static Error Cancelled() { return {Code::kCancelled, "the restore was cancelled"}; }

  // Runs on the reading thread. What there are buffers for is read in one call, so that no run
  // waits for the one before it.
  void Read() {
    std::deque<RestoredRun> wanted = Wanted();
    while (!wanted.empty()) {
      std::vector<Buffer> buffers = TakeFree(std::min(kRunsAtOnce, wanted.size()));
      if (buffers.empty()) return;
      std::vector<LayerRead> reads;
      for (size_t i = 0; i < buffers.size(); ++i) {
        auto& [layer, tokens, k, v] = wanted[i];
        if (!buffers[i].k) {
          buffers[i].k = NewLines(longest_ * k_token_);
          buffers[i].v = NewLines(longest_ * v_token_);
        }
        const LayerTokens of = TokensOf(layer);
        const std::span keys(buffers[i].k.get(), tokens.size() * of.k);
        const std::span values(buffers[i].v.get(), tokens.size() * of.v);
        k = keys, v = values;
        LayerSlice slice;
        slice.layer = layer;
        slice.tokens = tokens;
        slice.order = options_.order;
        reads.push_back({slice, keys, values});
      }
      Status read = session_->ReadLayers(reads, [&](size_t i) {
        std::lock_guard lock(mutex_);
        if (!failed_.ok()) return false;
        ready_.push_back({wanted.front(), std::move(buffers[i])});
        wanted.pop_front();
        changed_.notify_all();
        return true;
      });
      std::lock_guard lock(mutex_);
      if (failed_.ok()) failed_ = std::move(read);
      if (failed_.ok()) continue;
      changed_.notify_all();
      return;
    }
    std::lock_guard lock(mutex_);
    read_all_ = true;
    changed_.notify_all();
  }

  // Lists all runs, in their order.
  std::deque<RestoredRun> Wanted() const {
    std::deque<RestoredRun> wanted;
    for (uint32_t layer = options_.first_layer; layer < options_.end_layer; ++layer) {
      if (!session_->info().geometry.layers[layer].stored) continue;
      for (const TokenRange& tokens : runs_) wanted.push_back({layer, tokens, {}, {}});
    }
    return wanted;
  }

  // Waits for a free buffer, and takes up to `most`; none when the restore has failed or was
  // cancelled.
  std::vector<Buffer> TakeFree(size_t most) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !free_.empty() || !failed_.ok(); });
    std::vector<Buffer> taken;
    while (failed_.ok() && !free_.empty() && taken.size() < most) {
      taken.push_back(std::move(free_.back()));
      free_.pop_back();
    }
    return taken;
  }

  const std::shared_ptr<Session> session_;
  const RestoreOptions options_;
  size_t k_token_ = 0, v_token_ = 0;  // bytes of one token of the layers that have most
  std::vector<TokenRange> runs_;      // runs of tokens, the same in each layer
  uint32_t longest_ = 0;              // the longest run's tokens
  uint64_t total_bytes_ = 0, done_bytes_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Buffer> free_;
  std::deque<Ready> ready_;
  std::optional<Buffer> lent_;  // the buffer that the caller reads at the moment
  bool read_all_ = false;
  Status failed_;
  const OpenedHere opened_;
  std::thread reader_;
};

}  // namespace

Result<std::unique_ptr<Restore>> Restore::Begin(std::shared_ptr<Session> session,
                                                const RestoreOptions& options) {
  if (!session) return InvalidArgument("a restore needs a session");
  const SessionInfo& info = session->info();
  RestoreOptions all = options;
  if (all.tokens.end == 0) all.tokens.end = info.n_tokens;
  if (all.end_layer == 0) all.end_layer = info.geometry.n_layers;
  if (all.tokens.begin > all.tokens.end || all.tokens.end > info.n_tokens) {
    return InvalidArgument("tokens " + std::to_string(all.tokens.begin) + ".." +
                           std::to_string(all.tokens.end) + " are not a run of the prefix's " +
                           std::to_string(info.n_tokens));
  }
  if (all.first_layer > all.end_layer || all.end_layer > info.geometry.n_layers) {
    return InvalidArgument("layers " + std::to_string(all.first_layer) + ".." +
                           std::to_string(all.end_layer) + " are not layers of the model's " +
                           std::to_string(info.geometry.n_layers));
  }
  return std::unique_ptr<Restore>(std::make_unique<RestoreImpl>(std::move(session), all));
}

}  // namespace prefixd
