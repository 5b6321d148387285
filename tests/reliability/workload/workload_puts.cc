// Implements the user's puts: prompts, blobs, aborted puts; and the room for them.
#include "tests/reliability/workload/workload.h"

#include <algorithm>
#include <utility>

#include "tests/storage/read/finite_rows.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage::reliability {

// Tokens often begin like a stored prompt, then continue with ones that nothing else has.
Tokens Workload::FreshTokens(uint32_t tenant, uint32_t* parent_tenant) {
  Tokens tokens;
  *parent_tenant = tenant;
  if (const auto from = SomeSure(); from && rng_() % 5 < 3) {
    const Prompt& p = truth_.at(*from);
    *parent_tenant = p.tenant;
    tokens = p.tokens;
    tokens.resize(rng_() % 2 ? tokens.size() : rng_() % tokens.size());
  }
  tokens.push_back(1'000'000 + truth_.next_prompt());
  for (uint64_t n = rng_() % 120; n > 0; --n) tokens.push_back(static_cast<uint32_t>(rng_() % 9));
  return tokens;
}

bool Workload::OutOfRoom(const Error& error) const {
  return plan_.quota_bytes() > 0 && error.code == Code::kResourceExhausted;
}

bool Workload::Has(const Prompt& p) const {
  const auto info = store_->GetPrefix(*p.id);
  return info.ok() && info->listed;
}

bool Workload::MakingRoom(const std::function<bool()>& act) {
  if (plan_.quota_bytes() == 0) return act();
  const uint64_t evictions = store_->stats().evictions;
  Tell({EventKind::kRoomBegin, {}});
  const bool done = act();
  std::vector<uint32_t> gone;
  for (const auto& [number, p] : truth_.prompts()) {
    if (p.evictable && p.presence == Presence::kSure && !p.removing && !Has(p)) {
      gone.push_back(number);
    }
  }
  if (!gone.empty() && store_->stats().evictions == evictions) {
    journal_.Violation("a prompt is gone although nothing was evicted");
  }
  for (const uint32_t number : gone) Tell({EventKind::kEvicted, {number}});
  journal_.Count(static_cast<uint32_t>(gone.size()), "prompts evicted");
  // After an error, the next opening of the store shows which prefixes were evicted.
  if (done || !plan_.errors_are_fine) Tell({EventKind::kRoomEnd, {}});
  return done;
}

bool Workload::Put() {
  if (truth_.Sure().size() >= plan_.max_prompts) return Remove();
  return MakingRoom([this] { return PutFresh(); });
}

bool Workload::PutFresh() {
  const uint32_t number = truth_.next_prompt();
  uint32_t tenant = 0;
  const Tokens tokens = FreshTokens(static_cast<uint32_t>(rng_() % 2), &tenant);
  Event begin{EventKind::kPutBegin, {number, tenant}};
  begin.words.insert(begin.words.end(), tokens.begin(), tokens.end());
  Tell(begin);
  auto writer = store_->BeginPut(model_.name, TenantName(tenant), tokens, "label",
                                 {.encoding = EncodingOf(number)});
  const auto chunk = static_cast<uint32_t>(1 + rng_() % 90);
  const bool layer_major = rng_() % 2 == 0;
  // As the parts of a put do, some heads after the others.
  const auto split = static_cast<uint32_t>(rng_() % model_.geometry.n_kv_heads);
  Status written =
      writer.ok() ? WriteAll(**writer, model_.geometry, FiniteRows(model_.geometry.row(0), tokens),
                             chunk, layer_major, split)
                  : Status(writer.error());
  if (!written.ok()) {
    Tell({EventKind::kPutDropped, {number}});
    return OutOfRoom(written.error()) || Refused("put", written.error());
  }
  const auto id = (*writer)->Commit();
  if (!id.ok()) {
    Tell({EventKind::kPutFailed, {number}});
    return Refused("commit", id.error());
  }
  Event done{EventKind::kPutDone, {number}};
  const auto words = IdWords(*id);
  done.words.insert(done.words.end(), words.begin(), words.end());
  Tell(done);
  return true;
}

bool Workload::AbortPut() {
  uint32_t tenant = 0;
  const uint32_t number = truth_.next_prompt();
  const Tokens tokens = FreshTokens(static_cast<uint32_t>(rng_() % 2), &tenant);
  Event begin{EventKind::kPutBegin, {number, tenant}};
  begin.words.insert(begin.words.end(), tokens.begin(), tokens.end());
  Tell(begin);
  Tell({EventKind::kPutDropped, {number}});  // no commit could succeed
  Result<std::unique_ptr<SegmentWriter>> writer = Error{Code::kInternal, ""};
  MakingRoom([&] {
    writer = store_->BeginPut(model_.name, TenantName(tenant), tokens, "label",
                              {.encoding = EncodingOf(number)});
    return writer.ok();
  });
  if (!writer.ok()) return OutOfRoom(writer.error()) || Refused("put", writer.error());
  const TokenRange range = (*writer)->range();
  const uint32_t n = static_cast<uint32_t>(rng_() % (range.size() + 1));
  if (n == 0) return true;
  const KvGeometry& g = model_.geometry;
  Status written = (*writer)->WriteRows(0, range.begin, n,
                                        RowsOf(g, FiniteRows(g.row(0), tokens), 0, range.begin, n));
  if (!written.ok()) return Refused("write", written.error());
  return true;
}

bool Workload::PutBlob() {
  const auto number = SomeSure();
  if (!number) return Put();
  return MakingRoom([this, number] { return PutBlobOf(*number); });
}

bool Workload::PutBlobOf(uint32_t number) {
  const auto name = static_cast<uint32_t>(rng_() % kBlobNames);
  const uint32_t version = truth_.next_version();
  const std::vector<uint32_t> what{number, name, version};
  Tell({EventKind::kBlobBegin, what});
  Status put = store_->PutBlob(*truth_.at(number).segment, BlobName(name), BlobProducer(name),
                               BlobBytes(name, version));
  Tell({put.ok() ? EventKind::kBlobDone : EventKind::kBlobFailed, what});
  if (!put.ok()) return OutOfRoom(put.error()) || Refused("put blob", put.error());
  return true;
}

bool Workload::GetBlob() {
  const auto number = SomeSure();
  if (!number) return Put();
  const Prompt& p = truth_.at(*number);
  bool right = true;
  for (const auto& [name, allowed] : truth_.BlobsOf(*p.segment)) {
    const auto got = store_->GetBlob(*p.segment, BlobName(name), BlobProducer(name));
    if (!got.ok()) {
      const bool none = got.error().code == Code::kNotFound && allowed.contains(0);
      if (!none) right = Refused("get blob", got.error());
      continue;
    }
    const bool known = std::any_of(allowed.begin(), allowed.end(), [&, n = name](uint32_t version) {
      return version != 0 && *got == BlobBytes(n, version);
    });
    if (!known) journal_.Violation("a blob has wrong bytes");
  }
  return right;
}

}  // namespace prefixd::storage::reliability
