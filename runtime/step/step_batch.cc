#include "runtime/step/step_batch.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/caught.h"
#include "prefixd/store.h"
#include "runtime/session/session_impl.h"
#include "runtime/step/step.h"
#include "runtime/step/step_queue.h"

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

void RunTasks(Core& core, std::span<GroupTask* const> tasks, const StepQueue::Note& task_done) {
  const auto end = [&](GroupTask* task, const Status& error) {
    if (!error.ok()) task->status = error;
    task->done = true;
    task_done();
  };
  // Each task has its own status; what stops all of them is that of those which did not begin.
  const Status all = Caught([&]() -> Status {
    const auto chunks = Chunks(tasks, core.pool.threads());
    return core.pool.ParallelFor(chunks.size(), [&](size_t c) -> Status {
      const Status whole = Caught([&]() -> Status {
        StepGroups(core, chunks[c]);
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

void StepBatch(std::span<StepRequest> requests) {
  StepQueue::Call call;
  std::vector<size_t> of_task;  // its request
  Core* core = nullptr;
  for (size_t r = 0; r < requests.size(); ++r) {
    StepRequest& request = requests[r];
    if (request.info) *request.info = {};
    auto* session = dynamic_cast<SessionImpl*>(request.session);
    if (!session) {
      request.status = InvalidArgument("a batch takes sessions attached to this process's store");
      continue;
    }
    auto plan = session->plan();
    request.status =
        plan.ok() ? session->CheckQueries(request.layer, 1, request.q, request.y, request.lse)
                  : Status(plan.error());
    if (!request.status.ok()) continue;
    if (core && core != session->core().get()) {
      request.status = InvalidArgument("all sessions of a batch must belong to one store");
      continue;
    }
    core = session->core().get();
    const KvGeometry& geometry = session->info().geometry;
    const size_t group = geometry.group_size();
    const std::vector<uint32_t> k = session->TakeTokens(**plan, request.layer);
    for (uint32_t h = 0; h < geometry.n_kv_heads; ++h) {
      GroupTask& task = call.tasks.emplace_back();
      task.plan = *plan;
      task.head = size_t{request.layer} * geometry.n_kv_heads + h;
      task.k = k[h];
      if (task.plan->ahead) task.ledger.ahead_bytes += task.plan->ahead->Begin(task.head);
      const size_t first = h * group;
      task.q = request.q.subspan(first * geometry.key_dim, group * geometry.key_dim);
      task.y = request.y.subspan(first * geometry.value_dim, group * geometry.value_dim);
      task.lse = request.lse.subspan(first, group);
      if (task.plan->shared && Retrieves(task)) {
        // One that cannot be looked for is searched for.
        static_cast<void>(Caught([&]() -> Status {
          task.shared = task.plan->shared->Find(task.head, task.q, &task.shares_last);
          return {};
        }));
      }
      of_task.push_back(r);
    }
  }
  if (call.tasks.empty()) return;
  core->step_queue.Run(call);
  for (size_t t = 0; t < call.tasks.size(); ++t) {
    GroupTask& task = call.tasks[t];
    StepRequest& request = requests[of_task[t]];
    auto* session = static_cast<SessionImpl*>(request.session);
    // What was read was read, also when it failed.
    session->Charge(task.head, task.ledger);
    if (task.plan->ahead) task.plan->ahead->Want(task.head, std::move(task.retrieved));
    if (task.status.ok()) session->NoteMissing(*task.plan, task.head, task.k, task.rho_z);
    if (!task.status.ok() && request.status.ok()) request.status = std::move(task.status);
    if (!request.info) continue;
    StepInfo& info = *request.info;
    info.ledger += task.ledger;
    info.rho_z.insert(info.rho_z.end(), task.rho_z.begin(), task.rho_z.end());
    info.missing.insert(info.missing.end(), task.missing.begin(), task.missing.end());
    if (task.plan->policy.mode != StepMode::kRetrieve) continue;
    info.k = std::max(info.k, task.k);
    info.k_per_head.push_back(task.k);
  }
  core->steps += std::count_if(requests.begin(), requests.end(),
                               [](const StepRequest& r) { return r.status.ok(); });
}

}  // namespace prefixd
