// Implements the user's changes of stored prefixes: removing, reclustering, compacting, lifetimes.
#include "tests/reliability/workload/workload.h"

namespace prefixd::storage::reliability {

bool Workload::Remove() {
  const auto number = SomeSure();
  if (!number) return true;
  Tell({EventKind::kRemoveBegin, {*number}});
  Status removed = store_->Remove(*truth_.at(*number).id);
  if (removed.ok()) {
    Tell({EventKind::kRemoveDone, {*number}});
    return true;
  }
  const bool refused = removed.error().code == Code::kFailedPrecondition;
  Tell({refused ? EventKind::kRemoveRefused : EventKind::kRemoveFailed, {*number}});
  return refused || Refused("remove", removed.error());
}

bool Workload::Recluster() {
  const auto number = SomeSure();
  if (!number) return Put();
  const Prompt& p = truth_.at(*number);
  Status reclustered = store_->Recluster(*p.id, WorkloadSettling());
  if (reclustered.ok()) return true;
  const bool compressed =
      p.compressed.contains(true) && reclustered.error().code == Code::kFailedPrecondition;
  return compressed || OutOfRoom(reclustered.error()) || Refused("recluster", reclustered.error());
}

std::optional<uint32_t> Workload::SomeContinuing() {
  std::vector<uint32_t> some;
  for (const uint32_t number : truth_.Sure()) {
    const Prompt& p = truth_.at(number);
    const auto info = store_->GetPrefix(*p.id);
    // While an earlier compaction is in doubt, so are the segments that exist.
    if (info.ok() && info->chain.size() > 1 && p.compacting == 0) some.push_back(number);
  }
  if (some.empty()) return std::nullopt;
  return some[rng_() % some.size()];
}

// Makes blobs of some names, with fresh versions, and appends their number, names and versions to
// the event.
std::vector<NewBlob> Workload::SomeBlobs(Event* as) {
  std::vector<NewBlob> blobs;
  as->words.push_back(0);
  for (uint32_t name = 0; name < kBlobNames; ++name) {
    if (rng_() % 3 == 0) continue;
    const uint32_t version = truth_.next_version() + as->words[0]++;
    as->words.push_back(name);
    as->words.push_back(version);
    blobs.push_back({BlobName(name), BlobProducer(name), BlobBytes(name, version)});
  }
  return blobs;
}

// Joins a segment with the one it continues, sometimes with blobs of its own; the prompts that end
// in either keep their names.
bool Workload::Compact() {
  const auto number = SomeContinuing();
  if (!number) return true;
  const auto info = store_->GetPrefix(*truth_.at(*number).id);
  if (!info.ok()) return Refused("compact", info.error());
  const SegmentId leaf = info->chain.back();
  std::vector<uint32_t> prompts = truth_.In(leaf);
  const auto others = truth_.In(info->chain[info->chain.size() - 2]);
  prompts.insert(prompts.end(), others.begin(), others.end());
  Event begin{EventKind::kCompactBegin, {}};
  const std::vector<NewBlob> blobs = SomeBlobs(&begin);
  begin.words.insert(begin.words.end(), prompts.begin(), prompts.end());
  Tell(begin);
  const auto compacted = store_->Compact(leaf, /*max_tokens=*/4096, blobs);
  if (compacted.ok()) {
    Event done{EventKind::kCompactDone, IdWords(*compacted)};
    done.words.insert(done.words.end(), begin.words.begin(), begin.words.end());
    Tell(done);
    journal_.Count(1, "compacts");
    journal_.Count(static_cast<uint32_t>(blobs.size()), "blobs that came with a compaction");
    return true;
  }
  if (compacted.error().code == Code::kFailedPrecondition || OutOfRoom(compacted.error())) {
    Tell({EventKind::kCompactRefused, prompts});
    return true;
  }
  return Refused("compact", compacted.error());
}

// Gives up half of the rows of a segment that nothing else needs.
bool Workload::Compress() {
  const auto number = SomeSure();
  if (!number) return Put();
  const Prompt& p = truth_.at(*number);
  const auto info = store_->GetPrefix(*p.id);
  if (!info.ok()) return Refused("compress", info.error());
  const auto segment = store_->GetPrefix(info->chain.back());
  if (!segment.ok()) return Refused("compress", segment.error());
  const TokenRange own = OwnTokens(*segment);
  // While an earlier compaction is in doubt, so is the segment.
  if (own.size() < 2 || p.compressed.contains(true) || p.compacting > 0) return true;
  Tell({EventKind::kCompressBegin, {*number}});
  Status compressed = store_->Compress(
      segment->id, {.kept_rows = static_cast<uint32_t>(KeptRows(own, 0).size()),
                    .kept = [own](uint32_t, uint32_t head) -> Result<std::vector<uint32_t>> {
                      return KeptRows(own, head);
                    }});
  if (compressed.ok()) {
    Tell({EventKind::kCompressDone, {*number}});
    journal_.Count(1, "compresses");
    return true;
  }
  if (compressed.error().code == Code::kFailedPrecondition || OutOfRoom(compressed.error())) {
    Tell({EventKind::kCompressRefused, {*number}});
    return true;
  }
  return Refused("compress", compressed.error());
}

// Pins, unpins, or sets an expiry far away.
bool Workload::Retain() {
  const auto number = SomeSure();
  if (!number) return Put();
  const Prompt& p = truth_.at(*number);
  Kept kept = *p.kept.begin();
  LifetimeChange change;
  if (rng_() % 2 == 0) {
    change.pinned = kept.pinned = rng_() % 3 == 0;
  } else {
    change.expires_unix_ms = kept.expires_unix_ms =
        rng_() % 3 == 0 ? 0 : (1ll << 52) + static_cast<int64_t>(rng_() % 1000);
  }
  // While pin or expiry is in doubt, a change of the other alone has an uncertain result, so both
  // are set.
  if (p.kept.size() > 1) {
    change = {kept.pinned, kept.expires_unix_ms};
  }
  Event event{EventKind::kLifetimeBegin, {*number, kept.pinned ? 1u : 0u}};
  event.AddWide(kept.expires_unix_ms);
  Tell(event);
  Status set = store_->SetLifetime(*p.id, change);
  if (!set.ok()) return Refused("retain", set.error());
  event.kind = EventKind::kLifetimeDone;
  Tell(event);
  return true;
}

// Sets an expiry in the past: the prefix is as good as removed, pinned or not.
bool Workload::Expire() {
  const auto number = SomeSure();
  if (!number) return true;
  Tell({EventKind::kRemoveBegin, {*number}});
  LifetimeChange change;
  change.expires_unix_ms = 1;
  Status set = store_->SetLifetime(*truth_.at(*number).id, change);
  Tell({set.ok() ? EventKind::kRemoveDone : EventKind::kRemoveFailed, {*number}});
  if (!set.ok()) return Refused("expire", set.error());
  return true;
}

bool Workload::Maintain() {
  return MakingRoom([this] {
    Status done = store_->Maintain();
    return done.ok() || Refused("maintain", done.error());
  });
}

}  // namespace prefixd::storage::reliability
