// Answers where rows lie in the host tier, instead of with the rows, and holds them meanwhile.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "daemon/calls/request_handler.h"
#include "protocol/row_copies.h"

namespace prefixd::daemon {

using wire::Field;
using wire::Json;

namespace {

constexpr uint64_t kHeldBytes = 512;  // of rows held in place, beside the pages

// Puts the descriptor of the region that the rows lie in with the reply, unless the client has it.
Status PassRegion(const RowsInPlace::Region& region, const std::shared_ptr<const void>& hold,
                  const std::vector<uint64_t>& mapped, Response* response) {
  if (std::ranges::find(mapped, region.id) != mapped.end()) return {};
  if (region.fd < 0) {
    return Error{Code::kFailedPrecondition,
                 "the host tier's memory cannot be passed on (the daemon runs without /proc); "
                 "use ReadRows"};
  }
  response->fd = region.fd;
  response->held = hold;
  return {};
}

}  // namespace

Json RequestHandler::Hold(const RowsInPlace::Region& region, std::shared_ptr<const void> hold,
                          MemoryCharge memory) {
  std::lock_guard lock(held_mutex_);
  const uint64_t handle = next_hold_++;
  held_rows_.emplace(handle, HeldRows{std::move(hold), std::move(memory)});
  return {{"hold", handle}, {"region", region.id}, {"region_bytes", region.bytes.size()}};
}

// The rows stay pinned until they are released or the connection ends. The request lists the
// regions that the client has mapped; the reply carries the descriptor of any other region.
Result<Json> RequestHandler::ReadInPlace(const Request& request, Response* response) {
  if (!peer_.local) {
    return Error{Code::kFailedPrecondition,
                 "rows can be read in place over a Unix socket only; use ReadRows"};
  }
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(const auto kv_head, Field<uint32_t>(request.control, "kv_head"));
  PREFIXD_ASSIGN(const auto mapped, Field<std::vector<uint64_t>>(request.control, "regions"));
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(const auto ids, in.Elements<uint32_t>(0));
  if (ids.empty()) return InvalidArgument("there are no rows to hold: the list of ids is empty");
  PREFIXD_ASSIGN(Outputs out, ReadOutputs(request));
  PREFIXD_ASSIGN(const auto places, out.Bytes(0));
  const size_t want = ids.size() * 2 * sizeof(uint64_t);
  if (places.size() != want) {
    return InvalidArgument("the places of " + std::to_string(ids.size()) + " rows take " +
                           std::to_string(want) + " bytes, not " + std::to_string(places.size()));
  }
  PREFIXD_ASSIGN(MemoryCharge memory, limits_.account.Take(MemoryKind::kMessages, kHeldBytes));
  PREFIXD_ASSIGN(RowsInPlace rows, session->ReadInPlace(layer, kv_head, ids));
  PREFIXD_TRY(PassRegion(rows.region, rows.hold, mapped, response));
  const std::byte* const base = rows.region.bytes.data();
  for (size_t i = 0; i < rows.rows.size(); ++i) {
    const std::array<uint64_t, 2> place = {static_cast<uint64_t>(rows.rows[i].key - base),
                                           static_cast<uint64_t>(rows.rows[i].value - base)};
    PREFIXD_CHECK(std::ranges::max(place) < rows.region.bytes.size(), place[0], place[1],
                  rows.region.bytes.size());
    std::memcpy(places.data() + i * sizeof(place), place.data(), sizeof(place));
  }
  HandOver(request, std::move(out), response);
  return Hold(rows.region, std::move(rows.hold), std::move(memory));
}

// Rows that are copied anyway may as well be copied by the client: once, and on its own core.
Result<std::optional<Json>> RequestHandler::LayerInPlaceFor(const Request& request,
                                                            Session& session, const LayerRead& read,
                                                            Response* response) {
  if (!peer_.local || !request.shared || !request.control.contains("regions")) {
    return std::optional<Json>();
  }
  PREFIXD_ASSIGN(const auto mapped, Field<std::vector<uint64_t>>(request.control, "regions"));
  // Found rows count as read, so all that may be missing is taken before. Copies take less than a
  // third of what they copy, but for rows of a few bytes.
  auto memory = limits_.account.Take(MemoryKind::kMessages, kHeldBytes);
  auto payload = TakeForMessage(limits_.account, (read.k.size() + read.v.size()) / 3);
  if (!memory.ok() || !payload.ok()) return std::optional<Json>();
  auto found = session.FindLayerInPlace(read);
  if (!found.ok()) return std::optional<Json>();  // what it refuses, reading refuses too, or does
  if (found->copies.empty() || !PassRegion(found->region, found->hold, mapped, response).ok()) {
    return std::optional<Json>();
  }
  response->memory = *std::move(payload);
  response->payload =
      wire::EncodeCopies(found->copies, found->region.bytes, {.k = read.k, .v = read.v});
  return std::optional(Hold(found->region, std::move(found->hold), *std::move(memory)));
}

Status RequestHandler::ReleaseNamed(const Json& control) {
  PREFIXD_ASSIGN(const auto holds, Field<std::vector<uint64_t>>(control, "release"));
  Status status;
  std::vector<HeldRows> released;  // which go without the lock
  std::lock_guard lock(held_mutex_);
  for (const uint64_t hold : holds) {
    const auto it = held_rows_.find(hold);
    if (it == held_rows_.end()) {
      status =
          Error{Code::kNotFound, "no held rows " + std::to_string(hold) + " on this connection"};
      continue;
    }
    released.push_back(std::move(it->second));
    held_rows_.erase(it);
  }
  return status;
}

Result<Json> RequestHandler::ReleaseRows(const Request& request) {
  PREFIXD_TRY(ReleaseNamed(request.control));
  return Json::object();
}

}  // namespace prefixd::daemon
