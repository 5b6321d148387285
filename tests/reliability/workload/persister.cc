#include "tests/reliability/workload/persister.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "tests/reliability/workload/workload.h"

namespace prefixd::storage::reliability {
namespace {

// Ends without a word after a while: the disk may be slow.
void AwaitMoves(Session& session) {
  for (int i = 0; i < 500; ++i) {
    const auto report = session.report();
    if (report.ok() && report->own_tokens <= report->own_moved + kMinOwnMemoryTokens) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

SharedProgress::SharedProgress()
    : progress_(new (::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Progress) {}
SharedProgress::~SharedProgress() { ::munmap(progress_, sizeof(Progress)); }

void SharedProgress::Report(Journal& report) const {
  const uint32_t stored = progress_->acknowledged;
  report.Count(stored - std::min(stored, Persister::kPrompt), "own tokens stored");
  report.Count(progress_->moves, "moves of own tokens out of memory");
}

testing::SyntheticPrompt Persister::Story(uint64_t seed) {
  return testing::MakePrompt(testing::SmallGeometry(2, 4, 2, 16), kTokens, seed);
}

Persister::Persister(const std::filesystem::path& dir, const testing::SyntheticPrompt& all,
                     SharedProgress& progress, Journal& report)
    : all_(all), progress_(progress), report_(report) {
  options_.dir = dir;
  options_.encryption_key_file = WorkloadOptions(dir).encryption_key_file;
  options_.host_tier_bytes = 1 << 20;
  options_.min_free_bytes = 0;
  options_.threads = 1;
  options_.compute = "cpu";
  options_.build_codes = options_.build_ivf = false;
  options_.phi_features = "none";
  spec_.name = "m";
  spec_.geometry = all.geometry;
  spec_.identity = {{"weights", "w"}};
}

bool Persister::Wrong(const std::string& what) {
  if (!progress_->cut) report_.Violation("persist: " + what);
  return false;
}

void Persister::Must(const Status& status) {
  if (!status.ok()) Wrong(status.error().ToString());
}

std::vector<uint32_t> Persister::Ids(uint32_t begin, uint32_t end) const {
  return {all_.tokens.begin() + begin, all_.tokens.begin() + end};
}

std::shared_ptr<Session> Persister::Attach(uint32_t own_memory_tokens) {
  auto session = store_->Attach({.model = spec_.name,
                                 .tokens = all_.tokens,
                                 .policy = {.mode = StepMode::kFull},
                                 .accept_approximate = true,
                                 .own_memory_tokens = own_memory_tokens});
  if (!session.ok()) Wrong("attach: " + session.error().ToString());
  return session.ok() ? *std::move(session) : nullptr;
}

bool Persister::Open() {
  auto store = LocalStore::Open(options_);
  if (!store.ok()) return Wrong("it does not open: " + store.error().ToString());
  store_ = *std::move(store);
  if (Status put = store_->RegisterModel(spec_); !put.ok()) return Wrong(put.error().message);
  if (progress_->acknowledged > 0) return true;
  auto put = store_->BeginPut({.model = spec_.name, .tokens = Ids(0, kPrompt)});
  if (!put.ok()) return Wrong(put.error().message);
  for (uint32_t l = 0; l < all_.geometry.n_layers; ++l) {
    const Status written =
        (*put)->Write(l, 0, kPrompt, all_.K(l, 0, kPrompt), all_.V(l, 0, kPrompt));
    if (!written.ok()) return Wrong(written.error().message);
  }
  if (const auto done = (*put)->Commit(); !done.ok()) return Wrong(done.error().message);
  if (!progress_->cut) progress_->acknowledged = progress_->begun = kPrompt;
  return true;
}

// Persists the own tokens from `base` up to `upto`. False: the session can do no more.
bool Persister::Persist(Session& session, uint32_t base, uint32_t upto) {
  progress_->begun = std::max(progress_->begun.load(), upto);
  const auto done = session.Persist(Ids(base, upto));
  if (!done.ok()) return Wrong("persist: " + done.error().ToString());
  if (progress_->cut) return false;
  progress_->acknowledged = std::max(progress_->acknowledged.load(), upto);
  if (done->exact_tokens != std::min(upto, progress_->derived_from.load())) {
    Wrong("a persist marks other rows as exact than those before an approximate step");
  }
  return true;
}

void Persister::StepApproximately(Session& session, uint32_t at, const StepPolicy& back) {
  Must(session.SetPolicy({.mode = StepMode::kAnchors}));
  const LayerShape shape = all_.geometry.layer(0);
  std::vector<float> y(size_t{shape.n_q_heads} * shape.value_dim), lse(shape.n_q_heads);
  progress_->derived_from = at;
  Must(session.Step(0, all_.Q(0, 0, 1), y, lse, nullptr));
  Must(session.SetPolicy(back));
}

bool Persister::Run(uint64_t seed, const std::function<void()>& armed) {
  std::mt19937_64 rng(seed);
  // Some sessions move own tokens to the store by themselves, and go on over them for longer.
  const bool moves = rng() % 2 == 0;
  auto session = Attach(moves ? kMinOwnMemoryTokens : 0);
  if (!session) return false;
  uint32_t at = session->info().n_tokens, base = at;  // behind the last appended token; the first
  if (at <= progress_->derived_from) progress_->derived_from = Progress::kNever;
  uint64_t moved = 0;  // counted already
  const uint64_t armed_round = moves ? 3 + rng() % 20 : 1;
  const auto full = session->policy();
  for (uint64_t round = 0; at < kTokens; ++round) {
    const auto n =
        static_cast<uint32_t>(std::min<uint64_t>(1 + rng() % (moves ? 250 : 90), kTokens - at));
    for (uint32_t l = 0; l < all_.geometry.n_layers; ++l) {
      Must(session->Append(l, n, all_.K(l, at, n), all_.V(l, at, n)));
    }
    at += n;
    if (round == armed_round) armed();
    if (progress_->cut) return true;
    if (moves && rng() % 4 == 0) AwaitMoves(*session);
    if (moves && rng() % 3 != 0 && at < kTokens) continue;
    // More than there are behind a small part: those wait for a later persist.
    const uint32_t upto = at - static_cast<uint32_t>(rng() % 3 == 0 ? rng() % n : 0);
    if (upto == base) continue;
    if (!Persist(*session, base, upto)) return false;
    if (const auto stats = store_->Stats(); moves && stats.ok()) {
      progress_->moves += stats->own_moves - std::exchange(moved, stats->own_moves);
    }
    if (rng() % (moves ? 20 : 3) == 0) {
      const auto window = static_cast<uint32_t>(rng() % 40);
      auto next = session->ForkPersisted(window);
      if (!next.ok()) return Wrong("fork: " + next.error().ToString());
      session = *std::move(next);
      base = session->info().n_tokens;
    }
    if (!moves && rng() % 8 == 0 && progress_->derived_from == Progress::kNever) {
      StepApproximately(*session, at, full);
    }
  }
  return true;
}

uint32_t Persister::Matched(bool accept) {
  const auto match =
      store_->Match({.model = spec_.name, .tokens = all_.tokens, .accept_approximate = accept});
  if (!match.ok()) Wrong("match: " + match.error().ToString());
  return match.ok() ? match->n_tokens : 0;
}

void Persister::Check() {
  const uint32_t sure = progress_->acknowledged, begun = progress_->begun;
  const uint32_t derived_from = progress_->derived_from;
  const uint32_t found = Matched(true), exact = Matched(false);
  if (found != sure && found != begun && found != std::min(begun, derived_from)) {
    Wrong(std::to_string(found) + " tokens are stored; " + std::to_string(sure) +
          " were acknowledged and " + std::to_string(begun) + " begun");
  }
  if (found < sure) Wrong("an acknowledged persist is lost");
  if (exact != std::min(found, derived_from)) {
    Wrong(std::to_string(exact) + " of " + std::to_string(found) +
          " tokens are exact; the first derived one is " + std::to_string(derived_from));
  }
  CheckRows();
  CheckNothingElse();
  const auto verified = store_->Verify("", nullptr);
  if (!verified.ok()) Wrong("verify: " + verified.error().ToString());
  if (verified.ok() && !verified->damaged.empty()) Wrong("verify: " + verified->damaged[0]);
  progress_->acknowledged = found;
  progress_->begun = found;
}

// All segments are of prefixes that somebody put or persisted.
void Persister::CheckNothingElse() {
  uint64_t segments = 0, named = 0;
  for (int i = 0; i < 200; ++i) {  // compaction may be at work
    std::set<std::string> ids;
    const auto page = store_->ListPrefixes({});
    for (const PrefixSummary& prefix : page.ok() ? page->prefixes : std::vector<PrefixSummary>()) {
      const auto detail = store_->Prefix(prefix.id);
      if (detail.ok()) ids.insert(detail->chain.begin(), detail->chain.end());
    }
    const auto stats = store_->Stats();
    segments = stats.ok() ? stats->prefixes : 0;
    named = ids.size();
    if (segments == named) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  Wrong(std::to_string(segments) + " segments are stored, and prefixes have " +
        std::to_string(named) + ": own tokens of a session that ended in a crash are left");
}

void Persister::CheckRows() {
  const auto session = Attach();
  if (!session) return;
  const uint32_t n = session->info().n_tokens;
  for (uint32_t l = 0; l < all_.geometry.n_layers; ++l) {
    const auto k = all_.K(l, 0, n), v = all_.V(l, 0, n);
    std::vector<std::byte> got_k(k.size()), got_v(v.size());
    const Status read = session->ReadLayer({.layer = l, .tokens = {0, n}}, got_k, got_v);
    if (!read.ok()) {
      Wrong("read: " + read.error().ToString());
    } else if (!std::ranges::equal(got_k, k) || !std::ranges::equal(got_v, v)) {
      Wrong("wrong bytes were served");
    }
  }
}

}  // namespace prefixd::storage::reliability
