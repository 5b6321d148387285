// Reads rows and tokens of a session, in messages of a bounded size.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/rows/stream_copy.h"
#include "base/session_arguments.h"
#include "client_lib/remote_session.h"

namespace prefixd {

using wire::Field;
using wire::MessageType;

Status RemoteSession::ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                               std::span<std::byte> out) {
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

Result<RowsInPlace> RemoteSession::ReadInPlace(uint32_t layer, uint32_t kv_head,
                                               std::span<const uint32_t> ids) {
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

Status RemoteSession::ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range,
                                std::span<std::byte> out) {
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

// Splits a slice into pieces of which several are on their way at once. Where heads lie one after
// another it is split by heads, so that the daemon reads whole runs, and otherwise by tokens; part
// of a chunk of reclustered rows would cost the pages of all of it.
std::vector<RemoteSession::Piece> RemoteSession::PiecesOf(const LayerSlice& slice) const {
  const size_t row = info_.geometry.row(slice.layer).bytes();
  const Connection& connection = *place_.last().connection;
  const size_t most = std::max<size_t>(connection.chunk_bytes() / row, 1);  // rows
  const uint32_t heads = slice.heads.n, n = slice.tokens.size();
  const size_t fit = std::max<size_t>(connection.SeriesBytes(row * heads * n) / row, 1);
  std::vector<Piece> pieces;
  LayerSlice part = slice;
  if (slice.order == KvOrder::kHeadMajor && heads > 1 && fit < size_t{n} * heads) {
    const auto step = static_cast<uint32_t>(std::clamp<size_t>(fit / n, 1, heads));
    for (uint32_t h = 0; h < heads; h += part.heads.n) {
      part.heads = {slice.heads.first + h, std::min(step, heads - h)};
      for (Piece& piece : PiecesOf(part)) {
        piece.first_row += size_t{h} * n;
        pieces.push_back(std::move(piece));
      }
    }
    return pieces;
  }
  if (slice.order == KvOrder::kHeadMajor && heads > 1) return {{slice, 0}};
  // A head-major slice of one head is token-major, too.
  const auto tokens_of = [&](size_t rows) {
    return static_cast<uint32_t>(std::clamp<size_t>(rows / heads, 1, n));
  };
  for (uint32_t at = slice.tokens.begin; at < slice.tokens.end; at = part.tokens.end) {
    const uint32_t left = slice.tokens.end - at;
    const uint32_t last = at + std::min(left, tokens_of(fit)) - 1;
    const uint32_t end = std::max(last + 1, RunEnd(info_.parts, last, 1));
    part.tokens = {at, std::min(end, at + std::min(left, tokens_of(most)))};
    pieces.push_back({part, size_t{at - slice.tokens.begin} * heads});
  }
  return pieces;
}

Status RemoteSession::ReadLayers(std::span<const LayerRead> reads,
                                 const std::function<bool(size_t)>& done) {
  PREFIXD_TRY(CheckOpen());
  std::vector<HeadRange> heads;
  for (const LayerRead& read : reads) {
    PREFIXD_ASSIGN(const HeadRange range,
                   CheckSlice(info_, read.slice, read.k.size(), read.v.size()));
    heads.push_back(range);
  }
  size_t ended = 0;  // reads that have their rows
  // Other calls of the connection have their turn between two series.
  uint64_t bytes = 0;
  for (const LayerRead& read : reads) bytes += read.k.size() + read.v.size();
  const CopyMode mode = bytes >= kStreamBytes ? CopyMode::kStream : CopyMode::kCached;
  for (size_t begin = 0, end = 0; begin < reads.size(); begin = end) {
    const CallScope scope(Limits());
    end = SeriesEnd(reads, begin);
    const auto read = Over([&](const Place& at) -> Result<Connection::Reply> {
      std::vector<Connection::Call> calls;
      std::vector<size_t> ends;  // [calls], how many reads have their rows behind each
      for (size_t i = ended; i < end; ++i) {
        if (heads[i].n > 0 && reads[i].slice.tokens.size() > 0) {
          AddCalls(reads[i], heads[i], at, mode, calls);
        }
        ends.resize(calls.size(), i);
        if (!ends.empty()) ends.back() = i + 1;
      }
      const auto reached = [&](size_t n) {
        while (ended < n) {
          if (done != nullptr && !done(ended)) return false;
          ++ended;
        }
        return true;
      };
      if (!calls.empty()) {
        PREFIXD_TRY(
            at.connection->DoSeries(std::move(calls), [&](size_t i) { return reached(ends[i]); }));
      }
      if (!reached(end)) return Error{Code::kCancelled, "the rest was not wanted any more"};
      return Connection::Reply{};
    });
    if (!read.ok()) return read.error();
  }
  return {};
}

void RemoteSession::AddCalls(const LayerRead& read, HeadRange heads, const Place& at, CopyMode mode,
                             std::vector<Connection::Call>& calls) const {
  const RowShape row = info_.geometry.row(read.slice.layer);
  const size_t key = row.key_bytes(), value = row.value_bytes();
  LayerSlice whole = read.slice;
  whole.heads = heads;
  for (const auto& [part, first] : PiecesOf(whole)) {
    const size_t rows = size_t{part.tokens.size()} * part.heads.n;
    auto call = SessionCall(MessageType::kReadLayer, at);
    call.control["layer"] = part.layer;
    call.control["begin"] = part.tokens.begin;
    call.control["end"] = part.tokens.end;
    call.control["first_head"] = part.heads.first;
    call.control["n_heads"] = part.heads.n;
    call.control["head_major"] = part.order == KvOrder::kHeadMajor;
    call.out = {read.k.subspan(first * key, rows * key),
                read.v.subspan(first * value, rows * value)};
    // Parts of lines go faster through shared memory, from where they are copied in one piece.
    const auto lines = [](std::span<std::byte> out, size_t bytes) {
      return (reinterpret_cast<uintptr_t>(out.data()) | bytes) % kStreamLine == 0;
    };
    if (mode == CopyMode::kCached || (lines(call.out[0], key) && lines(call.out[1], value))) {
      call.in_place = mode;
    }
    calls.push_back(std::move(call));
  }
}

Status RemoteSession::ReadTokens(TokenRange range, std::span<uint32_t> out) {
  const CallScope scope(Limits());
  PREFIXD_TRY(CheckOpen());
  PREFIXD_TRY(CheckRange(range, info_.n_tokens));
  PREFIXD_TRY(CheckSize("out", out.size(), range.size()));
  const auto run =
      static_cast<uint32_t>(std::min<size_t>(PerMessage(sizeof(uint32_t)), UINT32_MAX));
  for (uint32_t done = 0; done < range.size();) {
    const uint32_t m = std::min(run, range.size() - done);
    PREFIXD_ASSIGN(auto reply, Do(MessageType::kReadTokens,
                                  {{"begin", range.begin + done}, {"end", range.begin + done + m}},
                                  {}, {std::as_writable_bytes(out.subspan(done, m))}));
    done += m;
  }
  return {};
}

Status RemoteSession::InPlaceRun(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                                 std::vector<std::unique_ptr<RemoteHold>>& holds,
                                 RowsInPlace& out) {
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
  PREFIXD_ASSIGN(const auto region, connection->TierRegionOf(reply));
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

}  // namespace prefixd
