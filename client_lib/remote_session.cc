// Implements a session over a connection.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "client_lib/remote_steps.h"
#include "client_lib/remote_store.h"

namespace prefixd {
namespace {

using wire::Field;
using wire::FromJson;
using wire::MessageType;

// Holds the rows that one call reads in place: their region, and the daemon's pins until
// destruction.
class RemoteHold {
 public:
  RemoteHold(std::shared_ptr<Connection> connection, uint64_t hold)
      : connection_(std::move(connection)), hold_(hold) {}
  ~RemoteHold() {
    // This fails only without a connection; the daemon has then released the rows itself.
    (void)connection_->Do({MessageType::kReleaseRows, {{"hold", hold_}}, {}, {}, nullptr});
  }
  RemoteHold(const RemoteHold&) = delete;
  RemoteHold& operator=(const RemoteHold&) = delete;

  std::shared_ptr<const SharedRegion> region;

 private:
  const std::shared_ptr<Connection> connection_;
  const uint64_t hold_;
};

class RemoteSession final : public Session {
 public:
  RemoteSession(std::shared_ptr<Connection> connection, uint64_t session, SessionInfo info,
                StepPolicy policy)
      : connection_(std::move(connection)),
        session_(session),
        info_(std::move(info)),
        policy_(std::move(policy)) {}
  ~RemoteSession() override {
    if (open_) (void)connection_->Do(Make(MessageType::kDetach));
  }

  const SessionInfo& info() const override { return info_; }
  const std::shared_ptr<Connection>& connection() const { return connection_; }
  uint64_t handle() const { return session_; }
  bool open() const { return open_; }

  StepPolicy policy() const override {
    std::lock_guard lock(mutex_);
    return policy_;
  }

  Status SetPolicy(const StepPolicy& policy) override {
    auto call = Make(MessageType::kSetPolicy);
    call.control["policy"] = wire::ToJson(policy);
    PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
    std::lock_guard lock(mutex_);
    policy_ = policy;
    return {};
  }

  Status Step(uint32_t layer, std::span<const float> q, std::span<float> y, std::span<float> lse,
              StepInfo* info) override {
    StepRequest request{this, layer, q, y, lse, info, {}};
    RemoteStepBatch({&request, 1});
    return std::move(request.status);
  }

  Status AttendExact(uint32_t layer, uint32_t n, std::span<const float> q, std::span<float> y,
                     std::span<float> lse) override {
    auto call = Make(MessageType::kAttendExact);
    call.control["layer"] = layer;
    call.control["n"] = n;
    call.in = {wire::BytesOf(q)};
    call.out = {wire::WritableBytesOf(y), wire::WritableBytesOf(lse)};
    PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
    return {};
  }

  Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                  std::span<std::byte> out) override {
    const size_t row = info_.geometry.row().bytes();
    if (out.size() != ids.size() * row) return WrongOutput(ids.size() * row, out.size());
    const size_t run = RowsPerMessage(row + sizeof(uint32_t));
    for (size_t done = 0; done < ids.size();) {
      const size_t m = std::min(run, ids.size() - done);
      auto call = Make(MessageType::kReadRows);
      call.control["layer"] = layer;
      call.control["kv_head"] = kv_head;
      call.in = {wire::BytesOf(ids.subspan(done, m))};
      call.out = {out.subspan(done * row, m * row)};
      PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
      done += m;
    }
    return {};
  }

  Result<RowsInPlace> ReadInPlace(uint32_t layer, uint32_t kv_head,
                                  std::span<const uint32_t> ids) override {
    if (!open_) return Detached();
    RowsInPlace out;
    auto holds = std::make_shared<std::vector<std::unique_ptr<RemoteHold>>>();
    const size_t run = RowsPerMessage(sizeof(uint32_t) + 2 * sizeof(uint64_t));
    for (size_t done = 0; done < ids.size();) {
      const size_t m = std::min(run, ids.size() - done);
      PREFIXD_TRY(InPlaceRun(layer, kv_head, ids.subspan(done, m), *holds, out));
      done += m;
    }
    out.hold = std::move(holds);
    return out;
  }

  Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range,
                   std::span<std::byte> out) override {
    const size_t row = info_.geometry.row().bytes();
    if (range.end < range.begin) return InvalidArgument("the token range ends before it begins");
    if (out.size() != range.size() * row) return WrongOutput(range.size() * row, out.size());
    const auto run = static_cast<uint32_t>(std::min<size_t>(RowsPerMessage(row), UINT32_MAX));
    for (uint32_t done = 0; done < range.size();) {
      const uint32_t m = std::min(run, range.size() - done);
      auto call = Make(MessageType::kReadRange);
      call.control["layer"] = layer;
      call.control["kv_head"] = kv_head;
      call.control["begin"] = range.begin + done;
      call.control["end"] = range.begin + done + m;
      call.out = {out.subspan(done * row, m * row)};
      PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
      done += m;
    }
    return {};
  }

  // A slice that is too large for one message is split. Where heads lie one after another it is
  // split by heads, so that the daemon reads whole runs, and otherwise by tokens.
  Status ReadLayer(const LayerSlice& slice, std::span<std::byte> k,
                   std::span<std::byte> v) override {
    const KvGeometry& g = info_.geometry;
    const size_t key = g.row().key_bytes(), value = g.row().value_bytes();
    if (slice.first_head >= g.n_kv_heads || slice.n_heads > g.n_kv_heads - slice.first_head) {
      return InvalidArgument("KV heads " + std::to_string(slice.first_head) + ".." +
                             std::to_string(uint64_t{slice.first_head} + slice.n_heads) +
                             " are not all among the model's " + std::to_string(g.n_kv_heads));
    }
    if (slice.tokens.end < slice.tokens.begin) {
      return InvalidArgument("the token range ends before it begins");
    }
    const uint32_t heads = slice.n_heads > 0 ? slice.n_heads : g.n_kv_heads - slice.first_head;
    const uint32_t n = slice.tokens.size();
    const size_t k_bytes = size_t{n} * heads * key, v_bytes = size_t{n} * heads * value;
    if (k.size() != k_bytes) return WrongOutput(k_bytes, k.size());
    if (v.size() != v_bytes) return WrongOutput(v_bytes, v.size());
    const size_t fit = RowsPerMessage(key + value);  // rows
    LayerSlice part = slice;
    part.n_heads = heads;
    if (slice.order == KvOrder::kHeadMajor && heads > 1 && fit < size_t{n} * heads) {
      const auto step = static_cast<uint32_t>(std::clamp<size_t>(n > 0 ? fit / n : 1, 1, heads));
      for (uint32_t h = 0; h < heads; h += part.n_heads) {
        part.first_head = slice.first_head + h;
        part.n_heads = std::min(step, heads - h);
        const size_t at = size_t{h} * n, rows = size_t{part.n_heads} * n;
        PREFIXD_TRY(
            ReadLayer(part, k.subspan(at * key, rows * key), v.subspan(at * value, rows * value)));
      }
      return {};
    }
    // A head-major slice of one head is token-major, too.
    const auto step = static_cast<uint32_t>(std::clamp<size_t>(fit / heads, 1, UINT32_MAX));
    for (uint32_t t = 0; t < n; t += part.tokens.size()) {
      part.tokens.begin = slice.tokens.begin + t;
      part.tokens.end = part.tokens.begin + std::min(step, n - t);
      const size_t at = size_t{t} * heads, rows = size_t{part.tokens.size()} * heads;
      auto call = Make(MessageType::kReadLayer);
      call.control["layer"] = part.layer;
      call.control["begin"] = part.tokens.begin;
      call.control["end"] = part.tokens.end;
      call.control["first_head"] = part.first_head;
      call.control["n_heads"] = part.n_heads;
      call.control["head_major"] = part.order == KvOrder::kHeadMajor;
      call.out = {k.subspan(at * key, rows * key), v.subspan(at * value, rows * value)};
      PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
    }
    return {};
  }

  Status ReadTokens(TokenRange range, std::span<uint32_t> out) override {
    if (range.end < range.begin) return InvalidArgument("the token range ends before it begins");
    if (out.size() != range.size()) return WrongOutput(range.size(), out.size(), "token ids");
    const auto run =
        static_cast<uint32_t>(std::min<size_t>(RowsPerMessage(sizeof(uint32_t)), UINT32_MAX));
    for (uint32_t done = 0; done < range.size();) {
      const uint32_t m = std::min(run, range.size() - done);
      auto call = Make(MessageType::kReadTokens);
      call.control["begin"] = range.begin + done;
      call.control["end"] = range.begin + done + m;
      call.out = {std::as_writable_bytes(out.subspan(done, m))};
      PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
      done += m;
    }
    return {};
  }

  Result<Selection> Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                           uint32_t k) override {
    auto call = Make(MessageType::kSelect);
    call.control["layer"] = layer;
    call.control["kv_head"] = kv_head;
    call.control["k"] = k;
    call.in = {wire::BytesOf(q)};
    PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
    PREFIXD_ASSIGN(Selection selection, FromJson<Selection>(reply.control, "selection"));
    selection.ids.resize(reply.payload.size() / sizeof(uint32_t));
    std::copy_n(reply.payload.begin(), selection.ids.size() * sizeof(uint32_t),
                std::as_writable_bytes(std::span(selection.ids)).begin());
    return selection;
  }

  Result<std::vector<std::byte>> SummaryBytes(uint32_t layer, uint32_t kv_head,
                                              const EstimatorVariant& variant) override {
    return Summary(variant.Name(), layer, kv_head);
  }

  SessionReport report() const override {
    if (open_) {
      auto reply = connection_->Do(Make(MessageType::kReport));
      if (reply.ok()) {
        auto report = FromJson<SessionReport>(reply->control, "report");
        if (report.ok()) {
          std::lock_guard lock(mutex_);
          last_ = *std::move(report);
          return last_;
        }
      }
    }
    std::lock_guard lock(mutex_);  // detached or unreachable: the last report
    SessionReport report = last_;
    report.info = info_;
    return report;
  }

  Result<SessionReport> Detach() override {
    if (!open_.exchange(false)) return Detached();
    PREFIXD_ASSIGN(auto reply, connection_->Do(Make(MessageType::kDetach)));
    PREFIXD_ASSIGN(SessionReport report, FromJson<SessionReport>(reply.control, "report"));
    std::lock_guard lock(mutex_);
    last_ = report;
    return report;
  }

  static Error Detached() {
    return {Code::kFailedPrecondition, "the session is detached; attach again"};
  }

 private:
  Status InPlaceRun(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                    std::vector<std::unique_ptr<RemoteHold>>& holds, RowsInPlace& out) {
    auto call = Make(MessageType::kReadInPlace);
    call.control["layer"] = layer;
    call.control["kv_head"] = kv_head;
    call.control["regions"] = connection_->TierRegionIds();
    std::vector<uint64_t> offsets(2 * ids.size());
    call.in = {wire::BytesOf(ids)};
    call.out = {std::as_writable_bytes(std::span(offsets))};
    PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
    PREFIXD_ASSIGN(const uint64_t hold, Field<uint64_t>(reply.control, "hold"));
    holds.push_back(std::make_unique<RemoteHold>(connection_, hold));
    PREFIXD_ASSIGN(const uint64_t id, Field<uint64_t>(reply.control, "region"));
    auto region = reply.region.empty() ? connection_->FindTierRegion(id)
                                       : connection_->AddTierRegion(id, std::move(reply.region));
    if (region == nullptr) {
      return Error{Code::kUnavailable,
                   "the daemon did not pass the memory that the rows lie in; try again"};
    }
    holds.back()->region = region;
    const std::span<const std::byte> bytes = region->bytes();
    const RowShape row = info_.geometry.row();
    const auto inside = [&](uint64_t offset, size_t n) {
      return n <= bytes.size() && offset <= bytes.size() - n;
    };
    for (size_t i = 0; i < ids.size(); ++i) {
      const uint64_t key = offsets[2 * i], value = offsets[2 * i + 1];
      if (!inside(key, row.key_bytes()) || !inside(value, row.value_bytes())) {
        return Error{Code::kUnavailable, "the daemon sent a malformed answer: rows outside of " +
                                             std::to_string(bytes.size()) + " bytes"};
      }
      out.rows.push_back({bytes.data() + key, bytes.data() + value});
    }
    out.region = {id, bytes, -1};
    return {};
  }

  Connection::Call Make(MessageType type) const {
    return {type, {{"session", session_}}, {}, {}, nullptr};
  }
  Result<Connection::Reply> Do(Connection::Call call) const {
    if (!open_) return Detached();
    return connection_->Do(std::move(call));
  }
  static Error WrongOutput(size_t want, size_t got, const char* what = "bytes") {
    return InvalidArgument("the output holds " + std::to_string(got) + " " + what +
                           "; what is asked for needs " + std::to_string(want));
  }
  size_t RowsPerMessage(size_t row_bytes) const {
    const uint64_t room =
        connection_->chunk_bytes() -
        std::min<uint64_t>(connection_->chunk_bytes() / 2, 4 * wire::kTensorAlignment);
    return std::max<size_t>(room / row_bytes, 1);
  }
  Result<std::vector<std::byte>> Summary(const std::string& kind, uint32_t layer,
                                         uint32_t kv_head) {
    auto call = Make(MessageType::kSummary);
    call.control["kind"] = kind;
    call.control["layer"] = layer;
    call.control["kv_head"] = kv_head;
    PREFIXD_ASSIGN(auto reply, Do(std::move(call)));
    return std::move(reply.payload);
  }

  const std::shared_ptr<Connection> connection_;
  const uint64_t session_;
  const SessionInfo info_;
  std::atomic<bool> open_ = true;
  mutable std::mutex mutex_;  // guards policy_ and last_
  StepPolicy policy_;
  mutable SessionReport last_;
};

}  // namespace

std::shared_ptr<Session> MakeRemoteSession(std::shared_ptr<Connection> connection, uint64_t session,
                                           SessionInfo info, StepPolicy policy) {
  return std::make_shared<RemoteSession>(std::move(connection), session, std::move(info),
                                         std::move(policy));
}

void RemoteStepBatch(std::span<StepRequest> requests) {
  std::vector<RemoteStep> steps;
  for (StepRequest& r : requests) {
    const auto* session = dynamic_cast<const RemoteSession*>(r.session);
    if (session == nullptr) {
      r.status = InvalidArgument("the session does not belong to a connected client");
    } else if (!session->open()) {
      r.status = RemoteSession::Detached();
    } else {
      steps.push_back({&r, session->connection().get(), session->handle()});
    }
  }
  SendSteps(std::move(steps));
}

}  // namespace prefixd
