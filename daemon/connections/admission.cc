#include "daemon/connections/admission.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

#include "prefixd/version.h"
#include "protocol/step_frame.h"

namespace prefixd::daemon {
namespace {

constexpr uint64_t kLeastRegionBytes = 1 << 20;
constexpr uint32_t kRingSlots = 16;

// Clients come as often as they like, so such lines are few, too.
void Warn(ServerContext& context, const std::string& what) {
  if (const auto more = context.refusals.Line()) spdlog::warn("{}{}", what, *more);
}

Error NoRoom(const std::string& tenant) {
  return {Code::kResourceExhausted, "the memory budget, or the part of tenant '" + tenant +
                                        "' in what is for shared memory, has no room for it"};
}

// A client without a ring sends its steps as messages.
void MakeRing(ServerContext& context, Admission& a) {
  const uint64_t bytes = context.config.ring_mib << 20;
  if (bytes == 0) return;
  const RingShape shape{kRingSlots, bytes / kRingSlots};
  if (!context.regions.TryTake(a.peer.tenant, shape.bytes(), &a.ring_memory)) {
    return Warn(context, "no ring for a client: " + NoRoom(a.peer.tenant).message);
  }
  auto ring = StepRing::Create(shape);
  if (!ring.ok()) {
    a.ring_memory.Release();
    Warn(context, "no ring for a client: " + ring.error().message);
    return;
  }
  a.ring = *std::move(ring);
  a.reply.ring_slots = shape.slots;
  a.reply.ring_slot_bytes = shape.slot_bytes;
}

// Nobody where the system does not say who: such a peer has no rights of its own.
std::optional<uid_t> UserOf(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return std::nullopt;
  return peer.uid;
}

}  // namespace

Result<Admission> Admit(ServerContext& context, const wire::Hello& hello, bool local, int socket,
                        uint64_t id) {
  Admission a;
  const auto user = local ? UserOf(socket) : std::nullopt;
  PREFIXD_ASSIGN(a.credential, context.access.Admit(hello, user));
  const Grant& grant = a.credential.grant;
  if (context.memory) a.account = context.memory->Of(grant.tenant);
  a.peer = {.tenant = grant.tenant,
            .admin = grant.admin,
            .trusted = a.credential.own,
            .local = local,
            .read = grant.read,
            .write = grant.write};
  PREFIXD_TRY(context.limits.Greet(id, a.peer.tenant, a.peer.admin));
  a.reply.server = std::string("prefixd ") + PREFIXD_VERSION;
  a.reply.pid = static_cast<uint32_t>(::getpid());
  a.reply.max_payload_bytes = context.config.max_frame_mib << 20;
  a.reply.max_calls = static_cast<uint32_t>(context.config.max_calls);
  a.reply.admin = a.peer.admin;
  // The ring first: it is small, and steps are most of what clients ask for.
  if (local && hello.ring == wire::kStepFrameVersion) MakeRing(context, a);
  if (local && hello.shared_memory && context.config.shared_memory_mib > 0) {
    // A client may touch all of it at any time. Where memory is short it gets less, or none: its
    // messages then go through the socket.
    uint64_t bytes = context.config.shared_memory_mib << 20;
    while (bytes >= kLeastRegionBytes &&
           !context.regions.TryTake(a.peer.tenant, bytes, &a.memory)) {
      bytes /= 2;
    }
    auto region = bytes >= kLeastRegionBytes ? SharedRegion::Create(bytes)
                                             : Result<SharedRegion>(NoRoom(a.peer.tenant));
    if (region.ok()) {
      a.region = *std::move(region);
      a.reply.region_bytes = a.region.bytes().size();
    } else {
      a.memory.Release();
      Warn(context, "no shared memory for a client: " + region.error().message);
    }
  }
  return a;
}

}  // namespace prefixd::daemon
