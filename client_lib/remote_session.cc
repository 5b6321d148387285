// Implements a session over a link: it attaches again where the daemon was away meanwhile.
#include <algorithm>
#include <array>
#include <atomic>
#include <memory_resource>
#include <mutex>
#include <utility>
#include <vector>

#include "base/session_arguments.h"
#include "client_lib/remote_hold.h"
#include "client_lib/remote_steps.h"
#include "client_lib/remote_store.h"
#include "client_lib/session_place.h"

namespace prefixd {
namespace {

using wire::Field;
using wire::FromJson;
using wire::MessageType;

class RemoteSession final : public Session {
 public:
  RemoteSession(std::shared_ptr<Link> link, Attached attached, uint32_t call_timeout_ms)
      : info_(std::move(attached.info)),
        call_timeout_ms_(call_timeout_ms),
        place_(std::move(link), std::move(attached.place)),
        policy_(std::move(attached.policy)) {}
  ~RemoteSession() override {
    const Place at = place_.last();
    if (open_) (void)at.connection->Do(SessionCall(MessageType::kDetach, at));
  }

  const SessionInfo& info() const override { return info_; }
  const Link& link() const { return place_.link(); }
  // kFailedPrecondition after Detach.
  Result<Place> Find() const {
    PREFIXD_TRY(CheckOpen());
    if (Place at = place_.last(); at.connection->alive()) return at;
    return place_.Find(info_, policy(), call_timeout_ms_);
  }

  void Cancel() override { canceller_.Cancel(); }
  // The limits of a call that begins now.
  CallLimits Limits() const { return CallLimits::Of(call_timeout_ms_, &canceller_); }

  StepPolicy policy() const override {
    std::lock_guard lock(mutex_);
    return policy_;
  }

  Status SetPolicy(const StepPolicy& policy) override {
    const CallScope scope(Limits());
    PREFIXD_ASSIGN(auto reply, Do(MessageType::kSetPolicy, {{"policy", wire::ToJson(policy)}}));
    std::lock_guard lock(mutex_);
    policy_ = policy;
    return {};
  }

  Status Step(uint32_t layer, HeadRange heads, std::span<const float> q, std::span<float> y,
              std::span<float> lse, StepInfo* info) override {
    StepRequest request{this, layer, q, y, lse, info, {}, heads};
    RemoteStepBatch(link(), {&request, 1});
    return std::move(request.status);
  }

  Status AttendExact(uint32_t layer, HeadRange heads, uint32_t n, std::span<const float> q,
                     std::span<float> y, std::span<float> lse) override {
    const CallScope scope(Limits());
    PREFIXD_TRY(CheckOpen());
    const KvGeometry& g = info_.geometry;
    PREFIXD_ASSIGN(heads, CheckQueries(g, layer, heads, n, q, y, lse));
    const LayerShape shape = g.layer(layer);
    const size_t per_query = size_t{heads.n} * shape.group_size();
    const size_t q_token = per_query * shape.key_dim, y_token = per_query * shape.value_dim;
    const auto run = static_cast<uint32_t>(
        std::min<size_t>(PerMessage((q_token + y_token + per_query) * sizeof(float)), UINT32_MAX));
    for (uint32_t done = 0; done < n;) {
      const uint32_t m = std::min(run, n - done);
      PREFIXD_ASSIGN(
          auto reply,
          Do(MessageType::kAttendExact,
             {{"layer", layer}, {"first_head", heads.first}, {"n_heads", heads.n}, {"n", m}},
             {wire::BytesOf(q.subspan(done * q_token, m * q_token))},
             {wire::WritableBytesOf(y.subspan(done * y_token, m * y_token)),
              wire::WritableBytesOf(lse.subspan(done * per_query, m * per_query))}));
      done += m;
    }
    return {};
  }

  Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                  std::span<std::byte> out) override {
    const CallScope scope(Limits());
    PREFIXD_TRY(CheckOpen());
    PREFIXD_TRY(CheckHead(info_.geometry, layer, kv_head));
    const size_t row = info_.geometry.row(layer).bytes();
    PREFIXD_TRY(CheckSize("out", out.size(), ids.size() * row));
    PREFIXD_TRY(CheckIds(ids, info_.n_tokens));
    const size_t run = PerMessage(row + sizeof(uint32_t));
    for (size_t done = 0; done < ids.size();) {
      const size_t m = std::min(run, ids.size() - done);
      PREFIXD_ASSIGN(auto reply,
                     Do(MessageType::kReadRows, {{"layer", layer}, {"kv_head", kv_head}},
                        {wire::BytesOf(ids.subspan(done, m))}, {out.subspan(done * row, m * row)}));
      done += m;
    }
    return {};
  }

  Result<RowsInPlace> ReadInPlace(uint32_t layer, uint32_t kv_head,
                                  std::span<const uint32_t> ids) override {
    const CallScope scope(Limits());
    PREFIXD_TRY(CheckOpen());
    PREFIXD_TRY(CheckHead(info_.geometry, layer, kv_head));
    PREFIXD_TRY(CheckIds(ids, info_.n_tokens));
    RowsInPlace out;
    auto holds = std::make_shared<std::vector<std::unique_ptr<RemoteHold>>>();
    const size_t run = PerMessage(sizeof(uint32_t) + 2 * sizeof(uint64_t));
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
    const CallScope scope(Limits());
    PREFIXD_TRY(CheckOpen());
    PREFIXD_TRY(CheckHead(info_.geometry, layer, kv_head));
    PREFIXD_TRY(CheckRange(range, info_.n_tokens));
    const size_t row = info_.geometry.row(layer).bytes();
    PREFIXD_TRY(CheckSize("out", out.size(), range.size() * row));
    const auto run = static_cast<uint32_t>(std::min<size_t>(PerMessage(row), UINT32_MAX));
    for (uint32_t done = 0; done < range.size();) {
      const uint32_t m = std::min(run, range.size() - done);
      PREFIXD_ASSIGN(auto reply, Do(MessageType::kReadRange,
                                    {{"layer", layer},
                                     {"kv_head", kv_head},
                                     {"begin", range.begin + done},
                                     {"end", range.begin + done + m}},
                                    {}, {out.subspan(done * row, m * row)}));
      done += m;
    }
    return {};
  }

  // A slice that is too large for one message is split. Where heads lie one after another it is
  // split by heads, so that the daemon reads whole runs, and otherwise by tokens.
  Status ReadLayer(const LayerSlice& slice, std::span<std::byte> k,
                   std::span<std::byte> v) override {
    const CallScope scope(Limits());
    PREFIXD_TRY(CheckOpen());
    PREFIXD_ASSIGN(const HeadRange range, CheckSlice(info_, slice, k.size(), v.size()));
    const RowShape row = info_.geometry.row(slice.layer);
    const size_t key = row.key_bytes(), value = row.value_bytes();
    const uint32_t heads = range.n, n = slice.tokens.size();
    const size_t fit = PerMessage(key + value);  // rows
    LayerSlice part = slice;
    part.heads = range;
    if (slice.order == KvOrder::kHeadMajor && heads > 1 && fit < size_t{n} * heads) {
      const auto step = static_cast<uint32_t>(std::clamp<size_t>(n > 0 ? fit / n : 1, 1, heads));
      for (uint32_t h = 0; h < heads; h += part.heads.n) {
        part.heads = {range.first + h, std::min(step, heads - h)};
        const size_t at = size_t{h} * n, rows = size_t{part.heads.n} * n;
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
      PREFIXD_ASSIGN(
          auto reply,
          Do(MessageType::kReadLayer,
             {{"layer", part.layer},
              {"begin", part.tokens.begin},
              {"end", part.tokens.end},
              {"first_head", part.heads.first},
              {"n_heads", part.heads.n},
              {"head_major", part.order == KvOrder::kHeadMajor}},
             {}, {k.subspan(at * key, rows * key), v.subspan(at * value, rows * value)}));
    }
    return {};
  }

  Status ReadTokens(TokenRange range, std::span<uint32_t> out) override {
    const CallScope scope(Limits());
    PREFIXD_TRY(CheckOpen());
    PREFIXD_TRY(CheckRange(range, info_.n_tokens));
    PREFIXD_TRY(CheckSize("out", out.size(), range.size()));
    const auto run =
        static_cast<uint32_t>(std::min<size_t>(PerMessage(sizeof(uint32_t)), UINT32_MAX));
    for (uint32_t done = 0; done < range.size();) {
      const uint32_t m = std::min(run, range.size() - done);
      PREFIXD_ASSIGN(auto reply,
                     Do(MessageType::kReadTokens,
                        {{"begin", range.begin + done}, {"end", range.begin + done + m}}, {},
                        {std::as_writable_bytes(out.subspan(done, m))}));
      done += m;
    }
    return {};
  }

  Result<Selection> Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                           uint32_t k) override {
    const CallScope scope(Limits());
    PREFIXD_ASSIGN(auto reply,
                   Do(MessageType::kSelect, {{"layer", layer}, {"kv_head", kv_head}, {"k", k}},
                      {wire::BytesOf(q)}));
    PREFIXD_ASSIGN(Selection selection, FromJson<Selection>(reply.control, "selection"));
    selection.ids.resize(reply.payload.size() / sizeof(uint32_t));
    std::copy_n(reply.payload.begin(), selection.ids.size() * sizeof(uint32_t),
                std::as_writable_bytes(std::span(selection.ids)).begin());
    return selection;
  }

  Result<std::vector<std::byte>> SummaryBytes(uint32_t layer, uint32_t kv_head,
                                              const EstimatorVariant& variant) override {
    const CallScope scope(Limits());
    PREFIXD_ASSIGN(auto reply,
                   Do(MessageType::kSummary,
                      {{"kind", variant.Name()}, {"layer", layer}, {"kv_head", kv_head}}));
    return std::move(reply.payload);
  }

  SessionReport report() const override {
    if (open_) {
      const Place at = place_.last();
      auto reply = at.connection->Do(SessionCall(MessageType::kReport, at));
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
    if (!open_.exchange(false)) return SessionDetached(info_.id);
    const Place at = place_.last();
    PREFIXD_ASSIGN(auto reply, at.connection->Do(SessionCall(MessageType::kDetach, at)));
    PREFIXD_ASSIGN(SessionReport report, FromJson<SessionReport>(reply.control, "report"));
    std::lock_guard lock(mutex_);
    last_ = report;
    return report;
  }

 private:
  Status InPlaceRun(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                    std::vector<std::unique_ptr<RemoteHold>>& holds, RowsInPlace& out) {
    std::vector<uint64_t> offsets(2 * ids.size());
    std::shared_ptr<Connection> connection;  // that the rows are held over
    PREFIXD_ASSIGN(auto reply, Over([&](const Place& at) {
                     connection = at.connection;
                     auto call = SessionCall(MessageType::kReadInPlace, at);
                     call.control["layer"] = layer;
                     call.control["kv_head"] = kv_head;
                     call.control["regions"] = connection->TierRegionIds();
                     call.in = {wire::BytesOf(ids)};
                     call.out = {std::as_writable_bytes(std::span(offsets))};
                     return connection->Do(std::move(call));
                   }));
    PREFIXD_ASSIGN(const uint64_t hold, Field<uint64_t>(reply.control, "hold"));
    holds.push_back(std::make_unique<RemoteHold>(connection, hold));
    PREFIXD_ASSIGN(const uint64_t id, Field<uint64_t>(reply.control, "region"));
    auto region = reply.region.empty() ? connection->FindTierRegion(id)
                                       : connection->AddTierRegion(id, std::move(reply.region));
    if (region == nullptr) {
      return Error{Code::kUnavailable,
                   "the daemon did not pass the memory that the rows lie in; try again"};
    }
    holds.back()->region = region;
    const std::span<const std::byte> bytes = region->bytes();
    const RowShape row = info_.geometry.row(layer);
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

  Status CheckOpen() const { return open_ ? Status() : SessionDetached(info_.id); }
  // Runs `call(place)`, and again when the daemon went away meanwhile, as Link::Run does: no call
  // of a session changes what is stored, so that each may run twice.
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
  Result<Connection::Reply> Do(MessageType type, wire::Json control,
                               std::vector<std::span<const std::byte>> in = {},
                               std::vector<std::span<std::byte>> out = {}) const {
    return Over([&](const Place& at) {
      control["session"] = at.session;
      return at.connection->Do({type, control, in, out, nullptr, {}});
    });
  }
  // How many items of so many bytes each go into a message.
  size_t PerMessage(size_t item_bytes) const {
    const uint64_t chunk = place_.last().connection->chunk_bytes();
    const uint64_t room = chunk - std::min<uint64_t>(chunk / 2, 4 * wire::kTensorAlignment);
    return std::max<size_t>(room / item_bytes, 1);
  }

  const SessionInfo info_;
  const uint32_t call_timeout_ms_;
  CallCanceller canceller_;
  mutable SessionPlace place_;
  std::atomic<bool> open_ = true;
  mutable std::mutex mutex_;  // guards policy_ and last_
  StepPolicy policy_;
  mutable SessionReport last_;
};

}  // namespace

Result<std::shared_ptr<Session>> AttachRemote(std::shared_ptr<Link> link, const AttachSpec& spec) {
  const CallScope scope(CallLimits::Of(spec.call_timeout_ms, nullptr));
  auto attached = link->Run([&](auto connection) { return AttachOver(connection, spec); });
  if (!attached.ok()) return attached.error();
  return std::shared_ptr<Session>(
      std::make_shared<RemoteSession>(std::move(link), *std::move(attached), spec.call_timeout_ms));
}

void RemoteStepBatch(const Link& link, std::span<StepRequest> requests) {
  // The lists of a batch of the usual size need no memory but this.
  std::array<std::byte, 16384> room;
  std::pmr::monotonic_buffer_resource memory(room.data(), room.size());
  std::pmr::vector<RemoteStep> pending(&memory);
  std::pmr::vector<RemoteStep> steps(&memory);
  std::pmr::vector<Place> places(&memory);  // keeps the connections alive
  pending.reserve(requests.size());
  steps.reserve(requests.size());
  places.reserve(requests.size());
  for (StepRequest& r : requests) {
    const auto* session = dynamic_cast<const RemoteSession*>(r.session);
    if (session == nullptr || &session->link() != &link) {
      r.status = NotOfThisStore();
    } else {
      pending.push_back({&r, nullptr, 0, session->Limits(), &session->info().geometry});
    }
  }
  // Each cancellation may make another try necessary.
  const size_t most_tries = Link::kMostTries + pending.size();
  int lost = 0;
  for (size_t tries = 1; !pending.empty(); ++tries) {
    steps.clear();
    places.clear();
    for (RemoteStep step : pending) {
      StepRequest& r = *step.request;
      r.status = step.limits.Check();
      if (!r.status.ok()) continue;
      const CallScope scope(step.limits);
      auto at = static_cast<const RemoteSession*>(r.session)->Find();
      r.status = at.ok() ? Status() : at.error();
      if (!at.ok()) continue;
      step.connection = at->connection.get();
      step.session = at->session;
      steps.push_back(step);
      places.push_back(*std::move(at));
    }
    SendSteps(steps);
    // Steps that the loss of the daemon interrupted are sent again, and those that were cancelled
    // because another one of their message was.
    pending.clear();
    bool away = false;
    for (const RemoteStep& step : steps) {
      const Status& status = step.request->status;
      if (status.ok() || tries >= most_tries) continue;
      const bool gone = link.MayRepeat(*step.connection, status.error());
      const bool beside = status.error().code == Code::kCancelled && step.limits.Check().ok();
      if ((gone && lost + 1 < Link::kMostTries) || beside) pending.push_back(step);
      away = away || gone;
    }
    if (away) ++lost;
  }
}

}  // namespace prefixd
