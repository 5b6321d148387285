// Implements what computes attention over sessions in the C API.
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "client_lib/c/handles.h"

using namespace prefixd;        // NOLINT: the C API's functions stand in the global namespace
using namespace prefixd::capi;  // NOLINT

namespace {

// Reads one request of a batch of this client.
Result<StepRequest> ReadStep(const pfx_store& client, const pfx_step_request& r) {
  if (r.session == nullptr) return Null("its session");
  if (r.session->client != client.client) {
    return InvalidArgument("it is of a session of another client; step it with its own");
  }
  PREFIXD_TRY(CheckPointers({{r.q, r.q_count}, {r.y, r.y_count}, {r.lse, r.lse_count}}));
  if ((r.k == nullptr) != (r.v == nullptr)) {
    return InvalidArgument("it has a key row or a value row alone; a step that appends has both");
  }
  StepRequest step;
  step.session = r.session->session.get();
  step.layer = r.layer;
  step.q = {r.q, r.q_count};
  step.y = {r.y, r.y_count};
  step.lse = {r.lse, r.lse_count};
  step.heads = {r.first_head, r.n_heads};
  step.append = r.k != nullptr;
  step.k = Bytes(r.k, r.k != nullptr ? r.k_bytes : 0);
  step.v = Bytes(r.v, r.v != nullptr ? r.v_bytes : 0);
  return step;
}

}  // namespace

pfx_code pfx_step(pfx_session* session, uint32_t layer, const float* q, size_t q_count, float* y,
                  size_t y_count, float* lse, size_t lse_count) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_TRY(CheckPointers({{q, q_count}, {y, y_count}, {lse, lse_count}}));
    return session->session->Step(layer, {q, q_count}, {y, y_count}, {lse, lse_count}, nullptr);
  });
}

pfx_code pfx_step_append(pfx_session* session, uint32_t layer, uint32_t first_head,
                         uint32_t n_heads, const float* q, size_t q_count, const void* k,
                         size_t k_bytes, const void* v, size_t v_bytes, float* y, size_t y_count,
                         float* lse, size_t lse_count) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_TRY(
        CheckPointers({{q, q_count}, {k, k_bytes}, {v, v_bytes}, {y, y_count}, {lse, lse_count}}));
    return session->session->StepAppend(layer, {first_head, n_heads}, {q, q_count},
                                        Bytes(k, k_bytes), Bytes(v, v_bytes), {y, y_count},
                                        {lse, lse_count}, nullptr);
  });
}

pfx_code pfx_step_batch(pfx_store* client, pfx_step_request* requests, size_t n,
                        size_t request_size) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    if (requests == nullptr && n > 0) return Null("requests");
    if (request_size != sizeof(pfx_step_request)) {
      return InvalidArgument("request_size is " + std::to_string(request_size) +
                             "; this library's pfx_step_request has " +
                             std::to_string(sizeof(pfx_step_request)) + " bytes");
    }
    // Each request has its own code; those that cannot be run do not hold up the others.
    std::vector<StepRequest> batch;
    std::vector<size_t> of;  // [batch] the index of its request
    batch.reserve(n), of.reserve(n);
    std::vector<Status> status(n);
    for (size_t i = 0; i < n; ++i) {
      auto step = ReadStep(*client, requests[i]);
      if (step.ok()) {
        batch.push_back(*std::move(step));
        of.push_back(i);
      } else {
        status[i] = std::move(step).error();
      }
    }
    client->client->StepBatch(batch);
    for (size_t b = 0; b < batch.size(); ++b) status[of[b]] = std::move(batch[b].status);
    Status first;
    for (size_t i = n; i-- > 0;) {
      requests[i].code = PFX_OK;
      if (status[i].ok()) continue;
      Error error = std::move(status[i]).error();
      error.message = "request " + std::to_string(i) + ": " + error.message;
      requests[i].code = Fail(error);
      first = std::move(error);
    }
    return first;
  });
}

pfx_code pfx_attend_exact(pfx_session* session, uint32_t layer, uint32_t first_head,
                          uint32_t n_heads, uint32_t n, const float* q, size_t q_count, float* y,
                          size_t y_count, float* lse, size_t lse_count) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    PREFIXD_TRY(CheckPointers({{q, q_count}, {y, y_count}, {lse, lse_count}}));
    return session->session->AttendExact(layer, {first_head, n_heads}, n, {q, q_count},
                                         {y, y_count}, {lse, lse_count});
  });
}
