#include "runtime/session/step_batch.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "base/capture_errors.h"
#include "base/check.h"
#include "base/session_arguments.h"
#include "prefixd/store.h"
#include "runtime/session/session_impl.h"
#include "runtime/step/step.h"
#include "runtime/step/step_queue.h"

namespace prefixd {
namespace {

Result<OwnTokens::Growth> Grow(SessionImpl& session, const StepRequest& r) {
  const CallScope scope(session.Limits());
  PREFIXD_ASSIGN(const HeadRange heads, CheckOwnRows(session.info().geometry, r.layer, r.heads, 1,
                                                     r.k.size(), r.v.size()));
  return session.own().Grow(r.layer, heads, 1, r.k, r.v);
}

// Notes what the steps of whole layers in mode retrieve took; those of a batch share its time by
// their heads. Steps over many own tokens, too, are no measure of the prefix alone.
void NoteTimes(SessionServices& services, const StepQueue::Call& call,
               std::span<const size_t> of_task, std::span<const StepRequest> requests,
               double seconds) {
  for (size_t t = 0; t < call.tasks.size();) {
    const StepRequest& request = requests[of_task[t]];
    const GroupTask& first = call.tasks[t];
    bool ok = first.plan->policy.mode == StepMode::kRetrieve;
    size_t heads = 0;
    for (; t < call.tasks.size() && &requests[of_task[t]] == &request; ++t, ++heads) {
      ok = ok && call.tasks[t].status.ok() && call.tasks[t].own.size() <= OwnChunk::kRows;
    }
    const SessionInfo& info = request.session->info();
    if (!ok || heads != info.geometry.layer(request.layer).n_kv_heads) continue;
    services.rates.NoteStep(info.tenant, info.model, info.n_tokens,
                            seconds * double(heads) / double(call.tasks.size()));
  }
}

}  // namespace

void StepBatch(SessionServices& services, std::span<StepRequest> requests) {
  StepQueue::Call call;
  std::vector<size_t> of_task;  // [tasks] index of the request
  size_t n_tasks = 0;
  for (const StepRequest& r : requests) {
    if (!r.session) continue;
    const KvGeometry& geometry = r.session->info().geometry;
    if (r.layer >= geometry.n_layers) continue;
    const uint32_t all = geometry.layer(r.layer).n_kv_heads;
    n_tasks += r.heads.n > 0 ? std::min(r.heads.n, all) : all;
  }
  // What a step appends is there once all of its heads are done.
  std::vector<OwnTokens::Growth> growths(
      std::ranges::any_of(requests, &StepRequest::append) ? requests.size() : 0);
  call.tasks.reserve(n_tasks);
  of_task.reserve(n_tasks);
  for (size_t r = 0; r < requests.size(); ++r) {
    StepRequest& request = requests[r];
    if (request.info) *request.info = {};
    auto* session = dynamic_cast<SessionImpl*>(request.session);
    if (!session || session->services().get() != &services) {
      request.status = NotOfThisStore();
      continue;
    }
    auto plan = session->plan();
    const KvGeometry& geometry = session->info().geometry;
    const auto heads = plan.ok() ? CheckQueries(geometry, request.layer, request.heads, 1,
                                                request.q, request.y, request.lse)
                                 : Result<HeadRange>(plan.error());
    request.status = heads.ok() ? Status() : heads.error();
    if (request.status.ok() && !request.append) {
      request.status = session->CheckPrefixAlone(**plan);
    }
    if (!request.status.ok()) continue;
    // Before the step's own row is there, which is computed behind it in all layers but the first.
    const bool exact = (*plan)->policy.mode == StepMode::kFull;
    if (!exact) session->own().NoteApproximate(request.append);
    OwnTokens::Growth* growth = nullptr;
    if (request.append) {
      auto grown = Grow(*session, request);
      // Own tokens may have moved, been truncated or gone with the session since: the plan is to be
      // the one of the rows. From here on they cannot be truncated.
      plan = session->plan();
      if (grown.ok() && !plan.ok()) grown = plan.error();
      if (exact && plan.ok() && (*plan)->policy.mode != StepMode::kFull) {
        session->own().NoteApproximate(true);  // it has another policy since
      }
      if (grown.ok()) PREFIXD_CHECK((*plan)->moved >= grown->forgotten());
      request.status = grown.ok() ? Status() : grown.error();
      if (!grown.ok()) continue;
      growths[r] = *std::move(grown);
      growth = &growths[r];
    }
    if (call.tasks.empty()) call.tenant = session->info().tenant;  // a client speaks for one
    const LayerShape shape = geometry.layer(request.layer);
    const size_t group = shape.group_size();
    const size_t first_head = (*plan)->prefix->model()->heads.of(request.layer, heads->first);
    const std::vector<uint32_t> k = session->TakeTokens(**plan, request.layer, *heads);
    const CallLimits limits = session->Limits();
    for (uint32_t h = 0; h < heads->n; ++h) {
      GroupTask& task = call.tasks.emplace_back();
      task.plan = *plan;
      task.head = first_head + h;
      task.k = k[h];
      task.limits = limits;
      if (growth != nullptr) task.own = growth->rows(h);
      if (task.plan->ahead) task.ledger.prefetched_bytes += task.plan->ahead->Begin(task.head);
      const size_t first = h * group;
      task.q = request.q.subspan(first * shape.key_dim, group * shape.key_dim);
      task.y = request.y.subspan(first * shape.value_dim, group * shape.value_dim);
      task.lse = request.lse.subspan(first, group);
      if (task.plan->shared && Retrieves(task)) {
        // When Find fails, for lack of memory, the task searches by itself.
        static_cast<void>(CaptureErrors([&]() -> Status {
          task.shared = task.plan->shared->Find(task.head, task.q, &task.shares_last);
          return {};
        }));
      }
      of_task.push_back(r);
    }
  }
  if (call.tasks.empty()) return;
  const auto begun = std::chrono::steady_clock::now();
  services.steps.Run(call);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  NoteTimes(services, call, of_task, requests, took.count());
  for (size_t t = 0; t < call.tasks.size(); ++t) {
    GroupTask& task = call.tasks[t];
    StepRequest& request = requests[of_task[t]];
    auto* session = static_cast<SessionImpl*>(request.session);
    // The session is charged for what was read, also when the step failed.
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
  for (size_t t = 0; t < call.tasks.size(); ++t) {
    const GroupTask& task = call.tasks[t];
    const StepRequest& request = requests[of_task[t]];
    if (!request.append || !request.status.ok()) continue;
    static_cast<SessionImpl*>(request.session)
        ->NoteQueries(*task.plan, task.head, task.own.size(), task.q);
  }
  for (size_t r = 0; r < growths.size(); ++r) {
    if (!requests[r].status.ok() || !requests[r].append) continue;
    growths[r].Commit();
    auto* session = static_cast<SessionImpl*>(requests[r].session);
    session->NoteGrown(session->HeadOf(requests[r].layer, requests[r].heads.first));
  }
  services.stepped += std::count_if(requests.begin(), requests.end(),
                                    [](const StepRequest& r) { return r.status.ok(); });
}

}  // namespace prefixd
