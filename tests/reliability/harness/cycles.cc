#include "tests/reliability/harness/cycles.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>

#include "tests/storage/store_fixture.h"

namespace prefixd::storage::reliability {
namespace {

struct Shared {
  std::atomic<uint64_t> next{0};
  std::atomic<bool> stop{false};
};

struct Unmap {
  void operator()(Shared* p) const { ::munmap(p, sizeof(Shared)); }
};

std::unique_ptr<Shared, Unmap> NewShared() {
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return std::unique_ptr<Shared, Unmap>(new (memory) Shared);
}

}  // namespace

uint64_t SeedOf(uint64_t seed, uint64_t number) { return Mix(seed ^ Mix(number)); }

void Totals::Add(const std::vector<Event>& events) {
  for (const Event& event : events) {
    if (event.kind == EventKind::kCount) counts[event.Text(1)] += event.words[0];
    if (event.kind == EventKind::kViolation) violations.push_back(event.Text());
  }
}

std::string Totals::Text(const std::map<std::string, uint64_t>& counts) {
  std::string text;
  size_t points = 0;
  for (const auto& [name, n] : counts) {
    if (name.starts_with(kAtPoint)) {
      ++points;
    } else {
      text += (text.empty() ? "" : ", ") + std::to_string(n) + " " + name;
    }
  }
  if (points > 0) text += ", kills at " + std::to_string(points) + " different points";
  return text;
}

Totals RunCycles(const CyclesPlan& plan, const Cycle& cycle) {
  const auto shared = NewShared();
  std::vector<std::unique_ptr<Journal>> reports;
  for (uint32_t w = 0; w < plan.workers; ++w) reports.push_back(std::make_unique<Journal>());
  Totals totals;
  for (uint64_t first = plan.first; first < plan.end && !shared->stop;) {
    const uint64_t end = std::min(plan.end, first + plan.batch);
    shared->next = first;
    std::vector<std::unique_ptr<Child>> workers;
    for (uint32_t w = 0; w < plan.workers; ++w) {
      workers.push_back(std::make_unique<Child>([&, w] {
        for (uint64_t n; !shared->stop && (n = shared->next++) < end;) {
          reports[w]->SetContext("seed " + std::to_string(plan.seed) + ", cycle " +
                                 std::to_string(n) + ": ");
          cycle(n, SeedOf(plan.seed, n), *reports[w]);
        }
        return 0;
      }));
    }
    for (auto& worker : workers) {
      while (!worker->WaitFor(std::chrono::milliseconds(50))) {
        if (plan.stop && plan.stop()) shared->stop = true;
      }
      const ChildEnd ended = worker->Wait();
      if (!ended.exited || ended.code != 0) {
        totals.violations.push_back("a worker of the test itself failed: " + ended.Describe());
      }
    }
    for (const auto& report : reports) totals.Add(report->Take());
    const uint64_t next = std::min<uint64_t>(end, shared->next);
    totals.cycles += next - first;
    first = next;
    if (plan.progress) plan.progress(first, totals);
    if (totals.violations.size() >= plan.max_violations) break;
    if (plan.stop && plan.stop()) break;
  }
  return totals;
}

bool Absorb(Journal& from, Truth& truth, Journal& report, const std::string& where) {
  bool at_point = false;
  for (const Event& event : from.Take()) {
    truth.Apply(event);
    at_point |= event.kind == EventKind::kPoint;
    if (event.kind == EventKind::kCount) report.Append(event);
    if (event.kind == EventKind::kViolation) report.Violation(where + ": " + event.Text());
    if (event.late) continue;
    if (event.kind == EventKind::kPutDone) report.Count(1, "puts acknowledged");
    if (event.kind == EventKind::kRemoveDone) report.Count(1, "removals acknowledged");
    if (event.kind == EventKind::kBlobDone) report.Count(1, "blobs acknowledged");
  }
  return at_point;
}

}  // namespace prefixd::storage::reliability
