#include "tests/reliability/workload.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "storage/store_dir.h"
#include "tests/storage/finite_rows.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage::reliability {
namespace {

struct Operation {
  const char* name;
  uint32_t weight;
  bool (Workload::*run)();
};

constexpr Operation kOperations[] = {
    {"put", 30, &Workload::Put},           {"put_blob", 15, &Workload::PutBlob},
    {"remove", 12, &Workload::Remove},     {"read", 10, &Workload::Read},
    {"match", 8, &Workload::Match},        {"get_blob", 8, &Workload::GetBlob},
    {"abort_put", 5, &Workload::AbortPut}, {"verify", 2, &Workload::Verify},
    {"reopen", 2, &Workload::Reopen},      {"settle", 6, &Workload::Settle},
    {"merge", 8, &Workload::Merge},        {"retain", 6, &Workload::Retain},
    {"expire", 2, &Workload::Expire},      {"maintain", 2, &Workload::Maintain},
};
constexpr uint32_t kSpoilPercent = 6;
constexpr uint32_t kBlobNames = 2;

}  // namespace

StoreOptions WorkloadOptions(const std::filesystem::path& dir) {
  StoreOptions o;
  o.dir = dir;
  o.io = IoBackend::kThreads;
  o.host_tier_bytes = 0;  // every read goes to the disk
  o.min_free_bytes = 0;
  o.ballast_bytes = 64 << 10;
  o.max_inflight_ops = 2;
  o.max_inflight_bytes = 1 << 20;
  return o;
}

// Rows of 128 bytes, encoded 72: a segment has a few pages a run, so that reads of few rows have
// gaps to bridge.
ModelRecord WorkloadModel() {
  return TestModel("m", TestGeometry(/*layers=*/1, /*kv_heads=*/2, /*dim=*/32));
}

RowEncoding EncodingOf(uint32_t prompt) {
  return prompt % 3 == 1 ? RowEncoding::kInt8 : RowEncoding::kAsGiven;
}

Result<std::string> Compare(const StoredPrefix& prefix, uint32_t number, const Prompt& prompt) {
  const auto parts = prefix.parts();
  // Its last token is no other prompt's.
  if (parts.empty() || parts.back().encoding != EncodingOf(number)) {
    return std::string("rows are not encoded as asked for");
  }
  return storage::Compare(prefix, prompt.tokens,
                          FiniteRows(WorkloadModel().geometry.row(), prompt.tokens, parts));
}

void RepairSpoiled(const std::filesystem::path& dir, const Truth& truth) {
  for (const uint32_t number : truth.Spoiled()) {
    const SpoiledByte& spoiled = *truth.at(number).spoiled;
    const int fd = ::open(SegmentPath(dir, spoiled.id.bytes).c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) continue;
    (void)!::pwrite(fd, &spoiled.right, 1, spoiled.offset);
    ::close(fd);
  }
}

Workload::Workload(WorkloadPlan plan, Truth& truth, Journal& journal)
    : plan_(std::move(plan)),
      truth_(truth),
      journal_(journal),
      rng_(plan_.seed),
      model_(WorkloadModel()) {}

Workload::~Workload() = default;

void Workload::Tell(Event event) {
  truth_.Apply(event);
  journal_.Append(event);
}

bool Workload::Refused(const char* what, const Error& error) {
  if (!plan_.errors_are_fine) journal_.Violation(std::string(what) + ": " + error.ToString());
  return false;
}

bool Workload::Open() {
  const bool first = !std::exchange(opened_, true);
  if (first) RepairSpoiled(plan_.dir, truth_);
  StoreOptions options = WorkloadOptions(plan_.dir);
  options.io = plan_.io;
  options.quota_bytes = plan_.quota_bytes();
  auto opened = PrefixStore::Open(options);
  if (!opened.ok()) return Refused("open", opened.error());
  store_ = std::move(*opened);
  if (Status put = store_->PutModel(model_); !put.ok()) return Refused("put model", put.error());
  Tell({EventKind::kModel, {}});
  if (first) LookAround();
  if (first && !truth_.Spoiled().empty()) {
    Verify();
    for (const uint32_t number : truth_.Spoiled()) Tell({EventKind::kSpoilEnd, {number}});
  }
  return true;
}

// What the one before this left in doubt and a look decides: whether two segments became one, and
// what an eviction took.
void Workload::LookAround() {
  std::vector<uint32_t> gone;
  std::vector<Event> merges;
  for (const auto& [number, p] : truth_.prompts()) {
    if (p.presence != Presence::kSure || (!p.evictable && !p.merging)) continue;
    const auto info = store_->GetPrefix(*p.id);
    if (!info.ok() || !info->listed) {
      if (p.evictable && !p.removing) gone.push_back(number);
      continue;
    }
    Event merge{EventKind::kMergeRefused, {number}};
    if (info->chain.back() != *p.segment) {
      merge = {EventKind::kMergeDone, IdWords(info->chain.back())};
      merge.words.push_back(number);
    }
    if (p.merging) merges.push_back(merge);
  }
  for (Event& event : merges) Tell(std::move(event));
  for (const uint32_t number : gone) Tell({EventKind::kEvicted, {number}});
  Tell({EventKind::kRoomEnd, {}});
}

void Workload::Close() { store_.reset(); }

void Workload::Run() {
  uint32_t total = 0;
  for (const Operation& op : kOperations) total += op.weight;
  for (uint64_t i = 0; i < plan_.operations && store_; ++i) {
    if (plan_.spoil && rng_() % 100 < kSpoilPercent) {
      Spoil();
      continue;
    }
    uint64_t dice = rng_() % total;
    const Operation* op = kOperations;
    while (dice >= op->weight) dice -= op++->weight;
    (this->*op->run)();
  }
}

std::optional<uint32_t> Workload::SomeSure() {
  const std::vector<uint32_t> sure = truth_.Sure();
  if (sure.empty()) return std::nullopt;
  return sure[rng_() % sure.size()];
}

// Often the beginning of something stored, then tokens that nothing else has.
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
  // After an error, what went is known when the store is opened again.
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
  Status written = writer.ok()
                       ? WriteAll(**writer, model_.geometry,
                                  FiniteRows(model_.geometry.row(), tokens), chunk, layer_major)
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
  Tell({EventKind::kPutDropped, {number}});  // there is no commit that could succeed
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
                                        RowsOf(g, FiniteRows(g.row(), tokens), 0, range.begin, n));
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

void Workload::CheckRead(uint32_t number, bool damaged) {
  const Prompt& p = truth_.at(number);
  const auto prefix = store_->OpenPrefix(*p.id, 0);
  if (!prefix.ok()) {
    if (!damaged) Refused("open prefix", prefix.error());
    return;
  }
  const auto difference = Compare(**prefix, number, p);
  if (!difference.ok()) {
    if (!damaged) Refused("read", difference.error());
  } else if (!difference->empty()) {
    journal_.Violation("wrong bytes were served: " + *difference);
  }
}

bool Workload::Read() {
  const auto number = SomeSure();
  if (!number) return Put();
  CheckRead(*number, false);
  return true;
}

bool Workload::Match() {
  const auto number = SomeSure();
  if (!number) return Put();
  const Prompt& p = truth_.at(*number);
  const auto match = store_->LongestMatch(model_.name, TenantName(p.tenant), p.tokens);
  if (!match.ok()) return Refused("match", match.error());
  if (match->n_tokens == p.tokens.size()) return true;
  return Refused("match", Error{Code::kInternal, "an acknowledged prompt is not found whole"});
}

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

bool Workload::Settle() {
  const auto number = SomeSure();
  if (!number) return Put();
  SettleOptions options;
  options.chunk_tokens = 64;
  options.order = [row = model_.geometry.row().bytes()](
                      uint32_t, uint32_t, uint32_t,
                      std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
    std::vector<uint32_t> order(rows.size() / row);
    std::iota(order.rbegin(), order.rend(), 0);
    return order;
  };
  Status settled = store_->Settle(*truth_.at(*number).id, options);
  if (!settled.ok()) return OutOfRoom(settled.error()) || Refused("settle", settled.error());
  return true;
}

// A segment is joined with the one it continues; the prompts that end in either keep their names.
bool Workload::Merge() {
  const auto number = SomeSure();
  if (!number) return Put();
  const auto info = store_->GetPrefix(*truth_.at(*number).id);
  if (!info.ok()) return Refused("merge", info.error());
  if (info->chain.size() < 2) return true;
  const SegmentId leaf = info->chain.back();
  std::vector<uint32_t> prompts = truth_.In(leaf);
  const auto others = truth_.In(info->chain[info->chain.size() - 2]);
  prompts.insert(prompts.end(), others.begin(), others.end());
  Tell({EventKind::kMergeBegin, prompts});
  const auto merged = store_->Merge(leaf, /*max_tokens=*/4096);
  if (merged.ok()) {
    Event done{EventKind::kMergeDone, IdWords(*merged)};
    done.words.insert(done.words.end(), prompts.begin(), prompts.end());
    Tell(done);
    journal_.Count(1, "merges");
    return true;
  }
  if (merged.error().code == Code::kFailedPrecondition || OutOfRoom(merged.error())) {
    Tell({EventKind::kMergeRefused, prompts});
    return true;
  }
  return Refused("merge", merged.error());
}

// Pins, unpins, or gives a time far away.
bool Workload::Retain() {
  const auto number = SomeSure();
  if (!number) return Put();
  const Prompt& p = truth_.at(*number);
  Kept kept = *p.kept.begin();
  RetentionChange change;
  if (rng_() % 2 == 0) {
    change.pinned = kept.pinned = rng_() % 3 == 0;
  } else {
    change.expires_unix_ms = kept.expires_unix_ms =
        rng_() % 3 == 0 ? 0 : (1ll << 52) + static_cast<int64_t>(rng_() % 1000);
  }
  // Where one of two is in doubt, so is what a change of the other makes of it.
  if (p.kept.size() > 1) {
    change = {kept.pinned, kept.expires_unix_ms};
  }
  Event event{EventKind::kRetainBegin, {*number, kept.pinned ? 1u : 0u}};
  event.AddWide(kept.expires_unix_ms);
  Tell(event);
  Status set = store_->SetRetention(*p.id, change);
  if (!set.ok()) return Refused("retain", set.error());
  event.kind = EventKind::kRetainDone;
  Tell(event);
  return true;
}

// Its time is over: as good as removed, pinned or not.
bool Workload::Expire() {
  const auto number = SomeSure();
  if (!number) return true;
  Tell({EventKind::kRemoveBegin, {*number}});
  RetentionChange change;
  change.expires_unix_ms = 1;
  Status set = store_->SetRetention(*truth_.at(*number).id, change);
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

bool Workload::Verify() {
  const auto report = store_->Verify(nullptr, nullptr);
  if (!report.ok()) return Refused("verify", report.error());
  for (const std::string& damage : report->damaged) {
    Refused("verify", Error{Code::kCorrupt, damage});
  }
  return true;
}

bool Workload::Reopen() {
  Close();
  return Open();
}

// One byte of a segment goes bad: it is read, verified, quarantined; then it is right again.
bool Workload::Spoil() {
  const auto number = SomeSure();
  if (!number) return Put();
  const SegmentId id = *truth_.at(*number).id;
  const auto info = store_->GetPrefix(id);
  if (!info.ok()) return Refused("spoil", info.error());
  const auto path = SegmentPath(plan_.dir, info->file);
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  if (error) return Refused("spoil", Error{Code::kIo, error.message()});
  const auto offset = static_cast<uint32_t>(rng_() % bytes);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  uint8_t right = 0;
  if (fd < 0 || ::pread(fd, &right, 1, offset) != 1) return false;
  Event begin{EventKind::kSpoilBegin, {*number}};
  const auto words = IdWords({info->file});
  begin.words.insert(begin.words.end(), words.begin(), words.end());
  begin.words.push_back(offset);
  begin.words.push_back(right);
  Tell(begin);
  const auto wrong = static_cast<uint8_t>(right ^ (1 + rng_() % 255));
  (void)!::pwrite(fd, &wrong, 1, offset);
  if (rng_() % 2 == 0) (void)store_->Verify(&id, nullptr);
  if (rng_() % 4 == 0) {
    Close();
    if (!Open()) return false;
  }
  CheckRead(*number, true);
  (void)!::pwrite(fd, &right, 1, offset);
  ::close(fd);
  const auto report = store_->Verify(nullptr, nullptr);
  if (!report.ok()) return Refused("verify", report.error());
  Tell({EventKind::kSpoilEnd, {*number}});
  CheckRead(*number, false);
  return true;
}

}  // namespace prefixd::storage::reliability
