// Streams a put over a connection, layer by layer, in runs of tokens that fit into a message.
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
    const uint32_t run = TokensPerMessage(k_token + v_token);
    // A write that ended early goes on with the message that did.
    for (uint32_t at = interrupted_.Resume(layer, own); at < own.end;) {
      const uint32_t m = std::min(run, own.end - at);
      const Status sent = Send(MessageType::kPutWrite, layer, at, m,
                               {k.subspan((at - first) * k_token, m * k_token),
                                v.subspan((at - first) * v_token, m * v_token)});
      interrupted_.Note(layer, own, sent.ok() ? at + m : at);
      PREFIXD_TRY(sent);
      written_ += m;
      at += m;
    }
    return {};
  }

  PutProgress progress() const override {
    return {written_, uint64_t{missing_.size()} * StoredLayers(geometry_)};
  }

  Status WriteQueries(uint32_t layer, uint32_t first, uint32_t n,
                      std::span<const float> q) override {
    PREFIXD_TRY(CheckRun(layer, first, n));
    const size_t token = geometry_.layer(layer).query_floats();
    PREFIXD_TRY(CheckPutSize("q", q.size_bytes(), n * token * sizeof(float)));
    const uint32_t run = TokensPerMessage(token * sizeof(float));
    for (uint32_t done = 0; done < n;) {
      const uint32_t m = std::min(run, n - done);
      PREFIXD_TRY(Send(MessageType::kPutQueries, layer, first + done, m,
                       {wire::BytesOf(q.subspan(done * token, m * token))}));
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
    (void)connection_->Do({MessageType::kPutAbort, {{"put", put_}}, {}, {}, nullptr, {}});
  }

 private:
  using Clock = std::chrono::steady_clock;

  Result<Connection::Reply> AskToCommit(const ProgressFn* progress) {
    return connection_->Do({MessageType::kPutCommit, {{"put", put_}}, {}, {}, progress, {}});
  }
  Status CheckOpen() const {
    if (open_) return {};
    return PutEnded();
  }
  Status CheckRun(uint32_t layer, uint32_t first, uint32_t n) const {
    PREFIXD_TRY(CheckOpen());
    return CheckPutRun(geometry_, prompt_tokens_, layer, first, n);
  }

  uint32_t TokensPerMessage(size_t token_bytes) const {
    // Shared memory may pad each tensor up to the alignment.
    const uint64_t room =
        connection_->chunk_bytes() -
        std::min<uint64_t>(connection_->chunk_bytes() / 2, 4 * wire::kTensorAlignment);
    return static_cast<uint32_t>(
        std::clamp<uint64_t>(room / std::max<size_t>(token_bytes, 1), 1, UINT32_MAX));
  }

  Status Send(MessageType type, uint32_t layer, uint32_t first, uint32_t n,
              std::vector<std::span<const std::byte>> in) {
    Json control = {{"put", put_}, {"layer", layer}, {"first", first}, {"n", n}};
    auto reply = connection_->Do({type, std::move(control), std::move(in), {}, nullptr, {}});
    if (!reply.ok()) return reply.error();
    return {};
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
