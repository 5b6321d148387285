#include "tests/reliability/workload.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "storage/store_dir.h"
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
  o.max_inflight_ops = 2;
  o.max_inflight_bytes = 1 << 20;
  return o;
}

ModelRecord WorkloadModel() { return TestModel("m", TestGeometry(/*layers=*/1, /*kv_heads=*/2)); }

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
  auto opened = PrefixStore::Open(options);
  if (!opened.ok()) return Refused("open", opened.error());
  store_ = std::move(*opened);
  if (Status put = store_->PutModel(model_); !put.ok()) return Refused("put model", put.error());
  Tell({EventKind::kModel, {}});
  if (first && !truth_.Spoiled().empty()) {
    Verify();
    for (const uint32_t number : truth_.Spoiled()) Tell({EventKind::kSpoilEnd, {number}});
  }
  return true;
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

bool Workload::Put() {
  if (truth_.Sure().size() >= plan_.max_prompts) return Remove();
  const uint32_t number = truth_.next_prompt();
  uint32_t tenant = 0;
  const Tokens tokens = FreshTokens(static_cast<uint32_t>(rng_() % 2), &tenant);
  Event begin{EventKind::kPutBegin, {number, tenant}};
  begin.words.insert(begin.words.end(), tokens.begin(), tokens.end());
  Tell(begin);
  auto writer = store_->BeginPut(model_.name, TenantName(tenant), tokens, "label");
  Status written = writer.ok() ? WriteAll(**writer, model_.geometry, tokens,
                                          static_cast<uint32_t>(1 + rng_() % 90), rng_() % 2 == 0)
                               : Status(writer.error());
  if (!written.ok()) {
    Tell({EventKind::kPutDropped, {number}});
    return Refused("put", written.error());
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
  auto writer = store_->BeginPut(model_.name, TenantName(tenant), tokens, "label");
  if (!writer.ok()) return Refused("put", writer.error());
  const TokenRange range = (*writer)->range();
  const uint32_t n = static_cast<uint32_t>(rng_() % (range.size() + 1));
  if (n == 0) return true;
  const auto states = States(tokens);
  Status written =
      (*writer)->WriteRows(0, range.begin, n, RowsOf(model_.geometry, states, 0, range.begin, n));
  if (!written.ok()) return Refused("write", written.error());
  return true;
}

bool Workload::PutBlob() {
  const auto number = SomeSure();
  if (!number) return Put();
  const auto name = static_cast<uint32_t>(rng_() % kBlobNames);
  const uint32_t version = truth_.next_version();
  const std::vector<uint32_t> what{*number, name, version};
  Tell({EventKind::kBlobBegin, what});
  Status put = store_->PutBlob(*truth_.at(*number).id, BlobName(name), BlobProducer(name),
                               BlobBytes(*number, name, version));
  Tell({put.ok() ? EventKind::kBlobDone : EventKind::kBlobFailed, what});
  if (!put.ok()) return Refused("put blob", put.error());
  return true;
}

bool Workload::GetBlob() {
  const auto number = SomeSure();
  if (!number) return Put();
  const Prompt& p = truth_.at(*number);
  bool right = true;
  for (const auto& [name, allowed] : p.blobs) {
    const auto got = store_->GetBlob(*p.id, BlobName(name), BlobProducer(name));
    if (!got.ok()) {
      const bool none = got.error().code == Code::kNotFound && allowed.contains(0);
      if (!none) right = Refused("get blob", got.error());
      continue;
    }
    const bool known = std::any_of(allowed.begin(), allowed.end(), [&, n = name](uint32_t version) {
      return version != 0 && *got == BlobBytes(*number, n, version);
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
  const auto difference = Compare(**prefix, p.tokens);
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
  if (!settled.ok()) return Refused("settle", settled.error());
  return true;
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
