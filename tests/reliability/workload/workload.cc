#include "tests/reliability/workload/workload.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "tests/storage/read/finite_rows.h"
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
    {"reopen", 2, &Workload::Reopen},      {"recluster", 6, &Workload::Recluster},
    {"compact", 8, &Workload::Compact},    {"retain", 6, &Workload::Retain},
    {"expire", 2, &Workload::Expire},      {"maintain", 2, &Workload::Maintain},
    {"compress", 4, &Workload::Compress},
};
constexpr uint32_t kSpoilPercent = 6;

// As Compare of a prefix of whose last segment KeptRows are left.
Result<std::string> CompareKept(const StoredPrefix& prefix, const Tokens& tokens,
                                const RowFn& fill) {
  const KvGeometry& g = prefix.model().geometry;
  if (!std::ranges::equal(prefix.tokens(), tokens)) return std::string("token ids differ");
  const TokenRange own = OwnTokens(prefix.info());
  for (uint32_t l = 0; l < g.n_layers; ++l) {
    const size_t row = g.row(l).bytes();
    for (uint32_t h = 0; h < g.layer(l).n_kv_heads; ++h) {
      const std::vector<uint32_t> kept = KeptRows(own, h);
      PREFIXD_ASSIGN(const auto got_kept, prefix.KeptTokens(l, h));
      if (got_kept != kept) return std::string("other rows were kept than said");
      std::vector<uint32_t> ids(own.begin);
      std::iota(ids.begin(), ids.end(), 0);
      ids.insert(ids.end(), kept.begin(), kept.end());
      std::vector<std::byte> rows(ids.size() * row), expected(row);
      PREFIXD_TRY(prefix.ReadRows(l, h, ids, rows, nullptr));
      for (size_t i = 0; i < ids.size(); ++i) {
        fill(ids[i], l, h, expected);
        if (std::memcmp(expected.data(), rows.data() + i * row, row) != 0) {
          return "kept rows: row of token " + std::to_string(ids[i]);
        }
      }
      rows.resize(own.size() * row);
      const auto all = prefix.ReadRange(l, h, own, std::span(rows), nullptr);
      if (all.ok() || all.error().code != Code::kFailedPrecondition) {
        return std::string("rows that are gone are not refused");
      }
    }
  }
  return std::string();
}

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
  // With a key file everything holds for an encrypted store (docs/reliability.md).
  if (const char* keys = std::getenv("PREFIXD_TEST_KEY_FILE")) o.encryption_key_file = keys;
  return o;
}

// Rows have 128 bytes, encoded 72: a segment has a few pages a run, so that reads of few rows have
// gaps to bridge.
ModelRecord WorkloadModel() {
  return TestModel("m", TestGeometry(/*layers=*/1, /*kv_heads=*/2, /*dim=*/32));
}

ReclusterOptions WorkloadSettling() {
  ReclusterOptions options;
  options.chunk_tokens = 64;
  options.order = [row = WorkloadModel().geometry.row(0).bytes()](
                      uint32_t, uint32_t, uint32_t,
                      std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
    std::vector<uint32_t> order(rows.size() / row);
    std::iota(order.rbegin(), order.rend(), 0);
    return order;
  };
  return options;
}

RowEncoding EncodingOf(uint32_t prompt) {
  return prompt % 3 == 1 ? RowEncoding::kInt8 : RowEncoding::kAsGiven;
}

TokenRange OwnTokens(const PrefixInfo& segment) {
  return {segment.n_tokens - segment.own_tokens, segment.n_tokens};
}

std::vector<uint32_t> KeptRows(TokenRange own, uint32_t kv_head) {
  std::vector<uint32_t> kept((own.size() + 1) / 2);
  for (uint32_t i = 0; i < kept.size(); ++i) {
    kept[i] = kv_head % 2 == 0 ? own.begin + 2 * i : own.end - uint32_t(kept.size()) + i;
  }
  return kept;
}

Result<std::string> Compare(const StoredPrefix& prefix, uint32_t number, const Prompt& prompt) {
  const auto parts = prefix.parts();
  // The last part is the prompt's own: no other prompt shares its last token.
  if (parts.empty() || parts.back().encoding != EncodingOf(number)) {
    return std::string("rows are not encoded as asked for");
  }
  if (!prompt.compressed.contains(prefix.compressed())) {
    return std::string(prefix.compressed() ? "rows are gone" : "rows are back that were given up");
  }
  const auto rows = FiniteRows(WorkloadModel().geometry.row(0), prompt.tokens, parts);
  return prefix.compressed() ? CompareKept(prefix, prompt.tokens, rows)
                             : storage::Compare(prefix, prompt.tokens, rows);
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
  if (!first && !plan_.errors_are_fine && store_->stats().recovered_orphans != 0) {
    journal_.Violation("a clean close left files to be recovered");
  }
  if (Status put = store_->PutModel(model_); !put.ok()) return Refused("put model", put.error());
  Tell({EventKind::kModel, {}});
  if (first) LookAround();
  if (first && !truth_.Spoiled().empty()) {
    Verify();
    for (const uint32_t number : truth_.Spoiled()) Tell({EventKind::kSpoilEnd, {number}});
  }
  return true;
}

// Looks up what earlier operations left in doubt: whether two segments became one, and which
// prefixes an eviction took.
void Workload::LookAround() {
  std::vector<uint32_t> gone;
  std::vector<Event> compacts;
  for (const auto& [number, p] : truth_.prompts()) {
    if (p.presence != Presence::kSure || (!p.evictable && p.compacting == 0)) continue;
    const auto info = store_->GetPrefix(*p.id);
    if (!info.ok() || !info->listed) {
      if (p.evictable && !p.removing) gone.push_back(number);
      continue;
    }
    Event compact{EventKind::kCompactRefused, {number}};
    if (info->chain.back() != *p.segment) {
      compact = {EventKind::kCompacted, IdWords(info->chain.back())};
      compact.words.push_back(number);
    }
    if (p.compacting > 0) compacts.push_back(compact);
  }
  for (Event& event : compacts) Tell(std::move(event));
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
    if (plan_.merge_percent > 0 && rng_() % 100 < plan_.merge_percent) {
      Compact();
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
  for (const bool accept : {false, true}) {
    const auto match =
        store_->LongestMatch(model_.name, TenantName(p.tenant), p.tokens, {.compressed = accept});
    if (!match.ok()) return Refused("match", match.error());
    // A later prompt may begin with a compressed one and hold all of its rows.
    if (match->compressed && !accept) {
      return Refused("match", Error{Code::kInternal, "a compressed prompt is found unasked"});
    }
    if (match->n_tokens == p.tokens.size() || (!accept && p.compressed.contains(true))) continue;
    return Refused("match", Error{Code::kInternal, "an acknowledged prompt is not found whole"});
  }
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

}  // namespace prefixd::storage::reliability
