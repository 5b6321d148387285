// Streams a put over a connection, layer by layer, in runs of tokens of which several are on their
// way at once: the daemon writes the last while the next is copied.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/call_scope.h"
#include "base/interrupted_writes.h"
#include "base/session_arguments.h"
#include "client_lib/remote_store.h"

namespace prefixd {
namespace {

using wire::Json;
using wire::MessageType;

class RemotePut final : public PutStream {
 public:
  RemotePut(std::shared_ptr<Connection> connection, uint64_t put, uint32_t prompt_tokens,
            TokenRange missing, const KvGeometry& geometry, std::chrono::milliseconds wait)
      : connection_(std::move(connection)),
        put_(put),
        prompt_tokens_(prompt_tokens),
        missing_(missing),
        geometry_(geometry),
        wait_(wait) {}
  ~RemotePut() override { Abort(); }

  TokenRange missing() const override { return missing_; }

  Status Write(uint32_t layer, uint32_t first, uint32_t n, std::span<const std::byte> k,
               std::span<const std::byte> v) override {
    PREFIXD_TRY(CheckRun(layer, first, n));
    const LayerShape shape = geometry_.layer(layer);
    const size_t k_token = shape.n_kv_heads * shape.row().key_bytes();
    const size_t v_token = shape.n_kv_heads * shape.row().value_bytes();
    PREFIXD_TRY(CheckPutSize("k", k.size(), n * k_token));
    PREFIXD_TRY(CheckPutSize("v", v.size(), n * v_token));
    // Tokens that are stored already are not sent.
    const TokenRange own{std::max(first, missing_.begin), std::min(first + n, missing_.end)};
    if (own.begin >= own.end) return {};
    // Messages end where pages do, as far as rows of usual sizes go.
    constexpr uint32_t kBlock = 64;
    uint32_t run = TokensIn(connection_->SeriesBytes(size_t{own.size()} * (k_token + v_token)),
                            k_token + v_token);
    if (run > kBlock) run -= run % kBlock;
    // A write that ended early goes on with the message that did.
    const uint32_t begin = interrupted_.Resume(layer, own);
    std::vector<Connection::Call> pieces;
    for (uint32_t at = begin; at < own.end; at += std::min(run, own.end - at)) {
      const uint32_t m = std::min(run, own.end - at);
      pieces.push_back(CallOf(MessageType::kPutWrite, layer, at, m,
                              {k.subspan((at - first) * k_token, m * k_token),
                               v.subspan((at - first) * v_token, m * v_token)}));
      pieces.back().control["piece"] = pieces.size() - 1;
    }
    uint32_t next = begin;
    const auto written = [&](size_t) {
      const uint32_t m = std::min(run, own.end - next);
      next += m;
      written_ += m;
      interrupted_.Note(layer, own, next);
      return true;
    };
    return connection_->DoSeries(std::move(pieces), written);
  }

  PutProgress progress() const override {
    return {written_, uint64_t{missing_.size()} * StoredLayers(geometry_)};
  }

  Status WriteQueries(uint32_t layer, uint32_t first, uint32_t n,
                      std::span<const float> q) override {
    PREFIXD_TRY(CheckRun(layer, first, n));
    const size_t token = geometry_.layer(layer).query_floats();
    PREFIXD_TRY(CheckPutSize("q", q.size_bytes(), n * token * sizeof(float)));
    // Shared memory may pad the tensor up to the alignment.
    const uint64_t chunk = connection_->chunk_bytes();
    const uint32_t run = TokensIn(chunk - std::min<uint64_t>(chunk / 2, wire::kTensorAlignment),
                                  token * sizeof(float));
    for (uint32_t done = 0; done < n;) {
      const uint32_t m = std::min(run, n - done);
      auto reply = connection_->Do(CallOf(MessageType::kPutQueries, layer, first + done, m,
                                          {wire::BytesOf(q.subspan(done * token, m * token))}));
      if (!reply.ok()) return reply.error();
      done += m;
    }
    return {};
  }

  Result<PutResult> Commit() override {
    PREFIXD_TRY(CheckOpen());
    // Commit waits as long as the disk takes and fails only when the daemon is gone.
    static const ProgressFn keep_waiting = [](uint64_t, uint64_t, std::string_view) {
      return true;
    };
    // The daemon does not wait for the other parts of the put: it says when to ask again, and a
    // waiting client holds no thread of it.
    const auto until = Clock::now() + wait_;
    auto reply = AskToCommit(&keep_waiting);
    while (!reply.ok() && reply.error().code == Code::kFailedPrecondition &&
           reply.error().retry_after_ms > 0 && Clock::now() < until) {
      const std::chrono::milliseconds pause(reply.error().retry_after_ms);
      std::this_thread::sleep_for(std::min<Clock::duration>(pause, until - Clock::now()));
      reply = AskToCommit(&keep_waiting);
    }
    // Where rows are missing, or the call ended before the commit began, the put can go on;
    // otherwise the daemon has committed or aborted it.
    open_ = !reply.ok() &&
            (reply.error().code == Code::kFailedPrecondition || EndedEarly(reply.error()));
    if (!reply.ok()) return reply.error();
    return wire::FromJson<PutResult>(reply->control, "commit");
  }

  void Abort() override {
    if (!open_) return;
    open_ = false;
    // The result is ignored: a broken connection aborts its puts by itself.
    connection_->EndAtDaemon({MessageType::kPutAbort, {{"put", put_}}, {}, {}, nullptr, {}});
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Takes as long as it needs, where the calling thread has no deadline.
  Result<Connection::Reply> AskToCommit(const ProgressFn* progress) {
    Connection::Call call{MessageType::kPutCommit, {{"put", put_}}, {}, {}, progress, {}};
    call.gives_up = true;
    return connection_->Do(std::move(call));
  }
  Status CheckOpen() const {
    if (open_) return {};
    return PutEnded();
  }
  Status CheckRun(uint32_t layer, uint32_t first, uint32_t n) const {
    PREFIXD_TRY(CheckOpen());
    return CheckPutRun(geometry_, prompt_tokens_, layer, first, n);
  }

  static uint32_t TokensIn(uint64_t bytes, size_t token_bytes) {
    return static_cast<uint32_t>(
        std::clamp<uint64_t>(bytes / std::max<size_t>(token_bytes, 1), 1, UINT32_MAX));
  }

  Connection::Call CallOf(MessageType type, uint32_t layer, uint32_t first, uint32_t n,
                          std::vector<std::span<const std::byte>> in) const {
    Json control = {{"put", put_}, {"layer", layer}, {"first", first}, {"n", n}};
    return {type, std::move(control), std::move(in), {}, nullptr, {}};
  }

  const std::shared_ptr<Connection> connection_;
  const uint64_t put_;
  const uint32_t prompt_tokens_;
  const TokenRange missing_;
  const KvGeometry geometry_;  // of the put's heads alone
  const std::chrono::milliseconds wait_;
  bool open_ = true;
  InterruptedWrites interrupted_;
  uint64_t written_ = 0;  // tokens times layers
};

}  // namespace

std::unique_ptr<PutStream> MakeRemotePut(std::shared_ptr<Connection> connection, uint64_t put,
                                         uint32_t prompt_tokens, TokenRange missing,
                                         const KvGeometry& geometry,
                                         std::chrono::milliseconds wait) {
  return std::make_unique<RemotePut>(std::move(connection), put, prompt_tokens, missing, geometry,
                                     wait);
}

}  // namespace prefixd
