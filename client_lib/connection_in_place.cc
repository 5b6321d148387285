// Copies rows from the host tier's memory, which the daemon pins meanwhile.
#include <algorithm>
#include <utility>

#include "client_lib/connection.h"
#include "protocol/row_copies.h"

namespace prefixd {

std::vector<uint64_t> Connection::TierRegionIds() const {
  std::lock_guard lock(tier_mutex_);
  std::vector<uint64_t> ids;
  for (const auto& [id, region] : tier_regions_) ids.push_back(id);
  return ids;
}

Result<std::shared_ptr<const SharedRegion>> Connection::TierRegionOf(Reply& reply) {
  PREFIXD_ASSIGN(const uint64_t id, wire::Field<uint64_t>(reply.control, "region"));
  std::lock_guard lock(tier_mutex_);
  if (!tier_regions_.contains(id)) {
    if (reply.region.empty()) {
      return Error{Code::kUnavailable,
                   "the daemon did not pass the memory that the rows lie in; try again"};
    }
    std::erase_if(tier_regions_, [](const auto& entry) { return entry.second.use_count() == 1; });
    tier_regions_[id] = std::make_shared<const SharedRegion>(std::move(reply.region));
  }
  return tier_regions_[id];
}

Status Connection::CopyInPlace(Flight& flight, Reply* reply) {
  PREFIXD_ASSIGN(const uint64_t hold, wire::Field<uint64_t>(reply->control, "hold"));
  copied_.push_back(hold);
  PREFIXD_ASSIGN(const auto region, TierRegionOf(*reply));
  PREFIXD_ASSIGN(const wire::DecodedCopies decoded,
                 wire::DecodeCopies(reply->payload, region->bytes(),
                                    {.k = flight.call.out[0], .v = flight.call.out[1]}));
  CopyRows(decoded.copies, *flight.call.in_place);
  // The daemon lets go of the rows when they are released, or once it has closed the connection:
  // while that is open, nobody has changed them.
  if (!socket_.ended()) return {};
  EndAs(End::kLost);
  return Error{Code::kUnavailable, "the daemon closed the connection while rows were copied"};
}

void Connection::ReleaseCopied() {
  if (copied_.empty() || !broken_.empty()) return;
  Flight release{
      .call = {wire::MessageType::kReleaseRows, {{"release", copied_}}, {}, {}, nullptr, {}},
      .id = next_id_++,
      .deadline = Socket::Clock::now() + kGrace};
  copied_.clear();
  if (Status sent = SendRequest(release); !sent.ok()) (void)Break(sent.error(), release.deadline);
}

}  // namespace prefixd
