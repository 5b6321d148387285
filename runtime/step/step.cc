#include "runtime/step/step.h"

#include <deque>
#include <optional>
#include <utility>

#include "runtime/step/exact_pass.h"
#include "runtime/step/merge_own.h"
#include "runtime/step/retrieve.h"
#include "runtime/step/retrieving_step.h"

namespace prefixd {

bool Retrieves(const GroupTask& task) {
  if (task.plan->policy.mode != StepMode::kRetrieve) return false;
  return (task.k > 0 || task.plan->heads[task.head].estimator.kind == EstimatorKind::kScan) &&
         task.plan->prefix->partition().mid.size() > 0;
}

uint32_t GroupTask::group() const {
  const PreparedPrefix& prefix = *plan->prefix;
  return prefix.model()->spec.geometry.group_size(prefix.layer_of(head));
}

namespace {

// Sets the status of a task that has attended over the prefix, and lets it attend over its own
// tokens. One that its call ended early counts for no step, and its session is charged with what it
// read all the same.
void End(const StepParts& parts, GroupTask& task, Status status) {
  if (status.ok() && task.own.size() > task.plan->moved) {
    const uint32_t n = task.n_queries == 0 ? 1 : task.n_queries / task.group();
    status = MergeOwn(parts.scratch, *task.plan, task.head, task.own, n, task.own_after, task.q,
                      task.y, task.lse, task.ledger);
  }
  if (task.n_queries == 0 && (status.ok() || !EndedEarly(status.error()))) task.ledger.steps += 1;
  task.status = std::move(status);
  task.done = true;
}

void Exact(const StepParts& parts, GroupTask& task, StepTurn& turn) {
  const auto ended = RunExactPass(parts, task, turn);
  if (!ended.ok()) return End(parts, task, ended.error());
  if (*ended) End(parts, task, {});
}

// The usual case, which needs no lists.
void StepAlone(const StepParts& parts, GroupTask& task, StepTurn& turn) {
  const CarriedScope scope(&task.limits);
  if (Status goes_on = CheckCall(); !goes_on.ok()) return End(parts, task, std::move(goes_on));
  if (IsExact(task)) return Exact(parts, task, turn);
  RetrievingStep step(parts, task);
  auto search = step.Search();
  if (search) SearchGroups(task.head, {&*search, 1}, step.scratch().search);
  End(parts, task, step.Finish(search ? std::move(search->found) : Result<Selection>(Selection{})));
}

}  // namespace

void StepGroups(const StepParts& parts, std::span<GroupTask* const> tasks, StepTurn& turn) {
  if (tasks.size() == 1) return StepAlone(parts, *tasks.front(), turn);
  std::deque<RetrievingStep> steps;
  std::vector<GroupTask*> of_step;
  std::vector<GroupSearch> searches;
  std::vector<size_t> of_search;  // [searches] index into steps
  for (GroupTask* task : tasks) {
    const CarriedScope scope(&task->limits);
    if (Status goes_on = CheckCall(); !goes_on.ok()) {
      End(parts, *task, std::move(goes_on));
      continue;
    }
    if (IsExact(*task)) {
      Exact(parts, *task, turn);
      if (!turn.GoesOn()) return;
      continue;
    }
    of_step.push_back(task);
    auto search = steps.emplace_back(parts, *task).Search();
    if (!search) continue;
    of_search.push_back(steps.size() - 1);
    searches.push_back(*std::move(search));
  }
  // Nobody's limits end a search that others need: each task ends behind it.
  if (!searches.empty()) {
    SearchGroups(tasks.front()->head, searches, steps[of_search.front()].scratch().search);
  }
  for (size_t s = 0, next = 0; s < steps.size(); ++s) {
    Result<Selection> found = Selection{};
    if (next < of_search.size() && of_search[next] == s) found = std::move(searches[next++].found);
    const CarriedScope scope(&of_step[s]->limits);
    Status goes_on = CheckCall();
    End(parts, *of_step[s], goes_on.ok() ? steps[s].Finish(std::move(found)) : std::move(goes_on));
  }
}

}  // namespace prefixd
