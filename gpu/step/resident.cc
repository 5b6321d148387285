#include "gpu/step/resident.h"

#include <utility>

#include "gpu/step/pack_summary.h"

namespace prefixd::gpu {
namespace {

using internal::HostImage;
using internal::ResidentGroup;

// An OwnedGroup is a group's kept part with the memory that holds it.
struct OwnedGroup : ResidentGroup {
  DeviceBuffer memory;
};

}  // namespace

ResidentSummaries::Key ResidentSummaries::KeyOf(const GroupStepInput& in, const void* owner) {
  const bool recomputed = in.features.data == nullptr;
  return {owner,
          in.moment,
          in.phi,
          in.phi_q.data(),
          in.phi_k,
          in.clusters,
          in.sinks.data,
          in.tail.data,
          2 * static_cast<int>(internal::Effective(in)) + (recomputed ? 1 : 0)};
}

void ResidentSummaries::Drop(std::map<Key, Entry>::iterator entry) {
  bytes_ -= entry->second.bytes;
  order_.erase(entry->second.used);
  entries_.erase(entry);
}

void ResidentSummaries::MakeRoom(size_t bytes) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto next = std::next(it);
    if (it->second.owner.expired()) Drop(it);
    it = next;
  }
  while (!order_.empty() && bytes_ + bytes > limit_) Drop(entries_.find(order_.back()));
}

Result<std::shared_ptr<const ResidentGroup>> ResidentSummaries::Find(
    const GroupStepInput& in, const std::shared_ptr<const void>& owner, Stream stream) {
  std::shared_ptr<const ResidentGroup> none;
  if (!owner) return none;
  const Key key = KeyOf(in, owner.get());
  std::lock_guard lock(mutex_);
  if (const auto found = entries_.find(key); found != entries_.end()) {
    // An entry of a former owner at the same address does not belong to this one.
    if (found->second.owner.lock() == owner) {
      order_.splice(order_.begin(), order_, found->second.used);
      return found->second.group;
    }
    Drop(found);
  }
  auto group = std::make_shared<OwnedGroup>();
  HostImage measure(nullptr, nullptr);
  internal::PackResident(in, measure);
  if (measure.bytes() > limit_) return none;
  MakeRoom(measure.bytes());
  Result<DeviceBuffer> memory = DeviceBuffer::Allocate(measure.bytes());
  if (!memory.ok()) {
    if (memory.error().code == Code::kResourceExhausted) return none;
    return memory.error();
  }
  group->memory = std::move(memory).value();
  PREFIXD_ASSIGN(PinnedBuffer staging, PinnedBuffer::Allocate(measure.bytes()));
  HostImage image(staging.data(), group->memory.data());
  static_cast<ResidentGroup&>(*group) = internal::PackResident(in, image);
  PREFIXD_TRY(CopyToDevice(group->memory.data(), staging.data(), image.bytes(), stream));
  PREFIXD_TRY(Synchronize(stream));
  order_.push_front(key);
  entries_[key] = {owner, group, measure.bytes(), order_.begin()};
  bytes_ += measure.bytes();
  return std::shared_ptr<const ResidentGroup>(group);
}

size_t ResidentSummaries::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace prefixd::gpu
