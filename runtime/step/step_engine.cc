#include "runtime/step/step_engine.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "base/capture_errors.h"

namespace prefixd {
namespace {

// Larger groups of searches save next to nothing more of reading the codes, and every task holds
// its own buffers until all are done.
constexpr size_t kMostTogether = 64;
// Nothing stops for other tenants within a group of searches, which saves little more than this.
constexpr size_t kMostTogetherShared = 2;

// Tasks that search, or read everything, take several times as long as others.
bool TakesLong(const GroupTask* task) {
  return task->n_queries > 0 || task->plan->policy.mode == StepMode::kFull ||
         (Retrieves(*task) && !task->shared);
}

// Splits tasks, sorted here by key, into what one thread does: those of one key together, unless
// cores would be idle then. Chunks that take long come first, so that no thread begins one last
// while the others wait for it.
std::vector<std::span<GroupTask* const>> Chunks(std::span<GroupTask*> tasks, size_t cores,
                                                size_t most) {
  std::ranges::stable_sort(tasks, {}, &GroupTask::key);
  size_t keys = 0;
  for (size_t i = 0; i < tasks.size(); ++i)
    keys += i == 0 || tasks[i]->key() != tasks[i - 1]->key();
  const size_t pieces = (cores + keys - 1) / keys;  // per key
  std::vector<std::span<GroupTask* const>> chunks;
  chunks.reserve(std::min(tasks.size(), keys * pieces));
  for (size_t begin = 0; begin < tasks.size();) {
    size_t end = begin + 1;
    while (end < tasks.size() && tasks[end]->key() == tasks[begin]->key()) ++end;
    const auto alike = tasks.subspan(begin, end - begin);
    const size_t least = (alike.size() + most - 1) / most;
    const size_t n = std::min(std::max(pieces, least), alike.size());
    for (size_t i = 0; i < n; ++i) {
      const size_t first = alike.size() * i / n;
      chunks.push_back(alike.subspan(first, alike.size() * (i + 1) / n - first));
    }
    begin = end;
  }
  std::ranges::stable_partition(chunks, [](std::span<GroupTask* const> chunk) {
    return std::ranges::any_of(chunk, TakesLong);
  });
  return chunks;
}

}  // namespace

StepEngine::StepEngine(std::unique_ptr<Compute> compute, ThreadPool& pool, ScratchPool& scratch,
                       uint64_t gathered_rows_bytes, const std::shared_ptr<MemoryBudget>& memory)
    : compute_(std::move(compute)),
      pool_(pool),
      gathered_rows_(gathered_rows_bytes, memory),
      parts_{*compute_, scratch, gathered_rows_},
      queue_(pool.threads(), [this](std::span<GroupTask*> tasks, StepQueue::Service& service) {
        RunTasks(tasks, service);
      }) {}

void StepEngine::RunTasks(std::span<GroupTask*> tasks, StepQueue::Service& service) {
  // Tasks have limits of their own: those of the thread that leads them concern its own alone.
  const CarriedScope none(nullptr);
  // Each task has its own status; an error that stops all is the status of tasks that have not
  // ended.
  const auto end = [](std::span<GroupTask* const> some, const Status& error) {
    for (GroupTask* task : some) {
      if (error.ok() || task->done) continue;
      task->status = error;
      task->done = true;
    }
    return static_cast<size_t>(std::ranges::count_if(some, &GroupTask::done));
  };
  const Status all = CaptureErrors([&]() -> Status {
    const auto chunks =
        Chunks(tasks, pool_.threads(), service.contended() ? kMostTogetherShared : kMostTogether);
    return pool_.ParallelFor(chunks.size(), [&](size_t c) -> Status {
      if (service.stopped()) return {};
      StepQueue::Stint stint(service);
      const Status whole = CaptureErrors([&]() -> Status {
        StepGroups(parts_, chunks[c], stint);
        return {};
      });
      stint.End(end(chunks[c], whole));
      return {};
    });
  });
  if (all.ok()) return;
  const auto ended_before = static_cast<size_t>(std::ranges::count_if(tasks, &GroupTask::done));
  service.Charge({}, end(tasks, all) - ended_before);
}

}  // namespace prefixd
