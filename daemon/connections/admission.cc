#include "daemon/connections/admission.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "prefixd/version.h"

namespace prefixd::daemon {
namespace {

constexpr size_t kMaxTenantBytes = 256;
constexpr uint64_t kLeastRegionBytes = 1 << 20;
constexpr uint32_t kRingSlots = 16;

// The time depends on the lengths alone, so that it tells nothing about the contents.
bool SameToken(std::string_view a, std::string_view b) {
  unsigned difference = a.size() != b.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

// Regions together take a quarter of the memory at most: clients that only hold one must not keep
// calls from theirs.
bool TakeRegion(const ServerContext& context, const Admission& a, uint64_t bytes,
                MemoryCharge* charge) {
  if (!context.memory) return true;
  const uint64_t used = context.memory->used(MemoryKind::kRegions);
  if (used + bytes > context.memory->capacity() / 4) return false;
  auto taken = a.account.TryTake(MemoryKind::kRegions, bytes);
  if (!taken) return false;
  *charge = *std::move(taken);
  return true;
}

// A client without a ring sends its steps as messages.
void MakeRing(const ServerContext& context, Admission& a) {
  const uint64_t bytes = context.config.ring_mib << 20;
  if (bytes == 0) return;
  const RingShape shape{kRingSlots, bytes / kRingSlots};
  if (!TakeRegion(context, a, shape.bytes(), &a.ring_memory)) return;
  auto ring = StepRing::Create(shape);
  if (!ring.ok()) {
    a.ring_memory.Release();
    spdlog::warn("no ring for a client: {}", ring.error().message);
    return;
  }
  a.ring = *std::move(ring);
  a.reply.ring_slots = shape.slots;
  a.reply.ring_slot_bytes = shape.slot_bytes;
}

bool SameUser(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         (peer.uid == ::geteuid() || peer.uid == 0);
}

}  // namespace

Result<Admission> Admit(ServerContext& context, const wire::Hello& hello, bool local, int socket,
                        uint64_t id) {
  if (!local && !context.token.empty() && !SameToken(hello.token, context.token)) {
    return Error{Code::kFailedPrecondition,
                 "the daemon asks TCP clients for a token; this one is missing or wrong"};
  }
  if (hello.tenant.size() > kMaxTenantBytes) {
    return InvalidArgument("the tenant's name is longer than 256 bytes");
  }
  Admission a;
  a.peer.tenant = hello.tenant;
  if (context.memory) a.account = context.memory->Of(hello.tenant);
  a.peer.local = local;
  a.peer.trusted = local && SameUser(socket);
  a.peer.admin = hello.admin;
  if (hello.admin && !a.peer.trusted) {
    return Error{Code::kFailedPrecondition,
                 "access to all tenants is for the daemon's own user over its Unix socket"};
  }
  PREFIXD_TRY(context.limits.Greet(id, hello.tenant, a.peer.admin));
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
    while (bytes >= kLeastRegionBytes && !TakeRegion(context, a, bytes, &a.memory)) bytes /= 2;
    auto region = bytes >= kLeastRegionBytes
                      ? SharedRegion::Create(bytes)
                      : Result<SharedRegion>(Error{Code::kResourceExhausted,
                                                   "the memory budget has no room for it"});
    if (region.ok()) {
      a.region = *std::move(region);
      a.reply.region_bytes = a.region.bytes().size();
    } else {
      a.memory.Release();
      spdlog::warn("no shared memory for a client: {}", region.error().message);
    }
  }
  return a;
}

}  // namespace prefixd::daemon
