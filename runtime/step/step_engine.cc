#include "runtime/step/step_engine.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/caught.h"

namespace prefixd {
namespace {

// What is searched together beyond this saves next to nothing more of reading the codes, and every
// task holds buffers of its own until all are done.
constexpr size_t kMostTogether = 64;

// Those that search, or read everything, take several times as long as others.
bool TakesLong(const GroupTask* task) {
  return task->plan->policy.mode == StepMode::kFull || (Retrieves(*task) && !task->shared);
}

// Tasks to be done by one thread: those of one key together, unless cores would be idle then. What
// takes long comes first: whoever began it last would be waited for.
std::vector<std::vector<GroupTask*>> Chunks(std::span<GroupTask* const> tasks, size_t cores) {
  std::map<GroupTask::Key, std::vector<GroupTask*>> by_key;
  for (GroupTask* task : tasks) by_key[task->key()].push_back(task);
  const size_t pieces = (cores + by_key.size() - 1) / by_key.size();  // of each key
  std::vector<std::vector<GroupTask*>> chunks;
  for (const auto& [key, alike] : by_key) {
    const size_t least = (alike.size() + kMostTogether - 1) / kMostTogether;
    const size_t n = std::min(std::max(pieces, least), alike.size());
    for (size_t i = 0; i < n; ++i) {
      chunks.emplace_back(alike.begin() + ptrdiff_t(alike.size() * i / n),
                          alike.begin() + ptrdiff_t(alike.size() * (i + 1) / n));
    }
  }
  std::ranges::stable_partition(chunks, [](const std::vector<GroupTask*>& chunk) {
    return std::ranges::any_of(chunk, TakesLong);
  });
  return chunks;
}

}  // namespace

StepEngine::StepEngine(std::unique_ptr<Compute> compute, ThreadPool& pool, ScratchPool& scratch,
                       uint64_t shared_rows_bytes)
    : compute_(std::move(compute)),
      pool_(pool),
      set_rows_(shared_rows_bytes),
      parts_{*compute_, scratch, set_rows_},
      queue_(pool.threads(),
             [this](std::span<GroupTask* const> tasks, const StepQueue::Note& task_done) {
               RunTasks(tasks, task_done);
             }) {}

void StepEngine::RunTasks(std::span<GroupTask* const> tasks, const StepQueue::Note& task_done) {
  const auto end = [&](GroupTask* task, const Status& error) {
    if (!error.ok()) task->status = error;
    task->done = true;
    task_done();
  };
  // Each task has its own status; what stops all of them is that of those which did not begin.
  const Status all = Caught([&]() -> Status {
    const auto chunks = Chunks(tasks, pool_.threads());
    return pool_.ParallelFor(chunks.size(), [&](size_t c) -> Status {
      const Status whole = Caught([&]() -> Status {
        StepGroups(parts_, chunks[c]);
        return {};
      });
      for (GroupTask* task : chunks[c]) end(task, whole);
      return {};
    });
  });
  for (GroupTask* task : tasks) {
    if (!task->done) end(task, all);
  }
}

}  // namespace prefixd
