// A session over a link: it attaches again where the daemon was away meanwhile. Internal to
// client_lib.
//
// Thread-safety: that of Session. One mutex guards policy, last report and partial appends, and is
// held for no call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "base/session_arguments.h"
#include "client_lib/connection.h"
#include "client_lib/link.h"
#include "client_lib/partial_appends.h"
#include "client_lib/remote_hold.h"
#include "client_lib/session_place.h"
#include "prefixd/session.h"

namespace prefixd {

class RemoteSession final : public Session {
 public:
  RemoteSession(std::shared_ptr<Link> link, Attached attached, uint32_t call_timeout_ms)
      : info_(std::move(attached.info)),
        call_timeout_ms_(call_timeout_ms),
        place_(std::move(link), std::move(attached.place)),
        policy_(std::move(attached.policy)) {}
  ~RemoteSession() override;

  const SessionInfo& info() const override { return info_; }
  const Link& link() const { return place_.link(); }
  // kFailedPrecondition after Detach.
  Result<Place> Find() const;

  void Cancel() override { canceller_.Cancel(); }
  // The limits of a call that begins now.
  CallLimits Limits() const { return CallLimits::Of(call_timeout_ms_, &canceller_); }

  StepPolicy policy() const override {
    std::lock_guard lock(mutex_);
    return policy_;
  }
  Status SetPolicy(const StepPolicy& policy) override;

  Status Step(uint32_t layer, HeadRange heads, std::span<const float> q, std::span<float> y,
              std::span<float> lse, StepInfo* info) override;

  // These are defined in remote_session_own.cc.
  Status AttendExact(uint32_t layer, HeadRange heads, uint32_t n, uint32_t own_after,
                     std::span<const float> q, std::span<float> y, std::span<float> lse) override;
  Status Append(uint32_t layer, HeadRange heads, uint32_t n, std::span<const std::byte> k,
                std::span<const std::byte> v) override;
  Status StepAppend(uint32_t layer, HeadRange heads, std::span<const float> q,
                    std::span<const std::byte> k, std::span<const std::byte> v, std::span<float> y,
                    std::span<float> lse, StepInfo* info) override;
  Status Truncate(uint32_t n) override;
  Result<std::shared_ptr<Session>> Fork() override;
  Result<PutResult> Persist(std::span<const uint32_t> tokens, const PersistSpec& spec) override;
  Result<std::shared_ptr<Session>> ForkPersisted(uint32_t window) override;
  // A step over this connection appended an own token to these heads.
  void KeptAt(const Connection& connection, uint32_t layer, HeadRange heads) {
    place_.KeepOwn(connection);
    std::lock_guard lock(mutex_);
    partial_.Note(layer, heads, 1, 1);
  }

  // These are defined in remote_session_reads.cc.
  Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                  std::span<std::byte> out) override;
  Result<RowsInPlace> ReadInPlace(uint32_t layer, uint32_t kv_head,
                                  std::span<const uint32_t> ids) override;
  Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range,
                   std::span<std::byte> out) override;
  Status ReadLayers(std::span<const LayerRead> reads,
                    const std::function<bool(size_t)>& done) override;
  Status ReadTokens(TokenRange range, std::span<uint32_t> out) override;

  Result<Selection> Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                           uint32_t k) override;
  Result<std::vector<std::byte>> SummaryBytes(uint32_t layer, uint32_t kv_head,
                                              const EstimatorVariant& variant) override;
  Result<SessionReport> report() const override;
  Result<SessionReport> Detach() override;

 private:
  // What one message reads of a slice, from its row `first_row` on.
  struct Piece {
    LayerSlice slice;
    size_t first_row = 0;
  };
  std::vector<Piece> PiecesOf(const LayerSlice& slice) const;
  void AddCalls(const LayerRead& read, HeadRange heads, const Place& at, CopyMode mode,
                std::vector<Connection::Call>& calls) const;
  Status InPlaceRun(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                    std::vector<std::unique_ptr<RemoteHold>>& holds, RowsInPlace& out);

  Status CheckOpen() const {
    PREFIXD_TRY(link().CheckProcess());  // before a lock that the parent may have held
    return open_ ? Status() : SessionDetached(info_.id);
  }
  // Asks for another session that goes on from this one.
  Result<std::shared_ptr<RemoteSession>> Another(wire::MessageType type, wire::Json control,
                                                 wire::Json* reply);
  // Runs `call(place)`, and again when the daemon went away meanwhile, as Link::Run does: no call
  // of a session changes what is stored, but Persist, which stores nothing twice; and its own
  // tokens end with a connection, so that each may run twice.
  template <typename Call>
  Result<Connection::Reply> Over(const Call& call) const {
    for (int tries = 1;; ++tries) {
      PREFIXD_ASSIGN(const Place at, Find());
      Result<Connection::Reply> reply = call(at);
      if (reply.ok() || tries == Link::kMostTries ||
          !link().MayRepeat(*at.connection, reply.error())) {
        return reply;
      }
    }
  }
  Result<Connection::Reply> Do(wire::MessageType type, wire::Json control,
                               std::vector<std::span<const std::byte>> in = {},
                               std::vector<std::span<std::byte>> out = {}) const;
  SessionReport LastReport() const;
  // How many items of so many bytes each go into a message.
  size_t PerMessage(size_t item_bytes) const;

  const SessionInfo info_;
  const uint32_t call_timeout_ms_;
  CallCanceller canceller_;
  mutable SessionPlace place_;
  std::atomic<bool> open_ = true;
  mutable std::mutex mutex_;  // guards what follows
  StepPolicy policy_;
  mutable SessionReport last_;
  PartialAppends partial_;
};

}  // namespace prefixd
