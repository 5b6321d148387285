// Implements the C API's restore.
#include <algorithm>
#include <utility>

#include "client_lib/c/handles.h"

using namespace prefixd;        // NOLINT: the C API's functions stand in the global namespace
using namespace prefixd::capi;  // NOLINT

pfx_code pfx_restore_begin(pfx_session* session, const pfx_restore_options* options,
                           pfx_restore** restore) {
  return Guard([&]() -> Status {
    if (session == nullptr) return Null("session");
    if (restore == nullptr) return Null("restore");
    pfx_restore_options o{};
    if (options != nullptr) {
      PREFIXD_ASSIGN(o, ReadOptions(options, "options"));
    }
    if (o.order != PFX_TOKEN_MAJOR && o.order != PFX_HEAD_MAJOR) {
      return InvalidArgument("options.order is " + std::to_string(int(o.order)) +
                             "; it is PFX_TOKEN_MAJOR or PFX_HEAD_MAJOR");
    }
    RestoreOptions all;
    all.tokens = {o.begin, o.end};
    all.first_layer = o.first_layer;
    all.end_layer = o.end_layer;
    all.order = static_cast<KvOrder>(o.order);
    if (o.buffer_bytes != 0) all.buffer_bytes = o.buffer_bytes;
    if (o.progress != nullptr) all.progress = Progress(o.progress, o.user);
    PREFIXD_ASSIGN(auto begun, Restore::Begin(session->session, all));
    *restore = new pfx_restore{session->client, std::move(begun)};
    return {};
  });
}

pfx_code pfx_restore_next(pfx_restore* restore, pfx_restored_run* run) {
  return Guard([&]() -> Status {
    if (restore == nullptr) return Null("restore");
    PREFIXD_TRY(ReadOptions(run, "run"));  // checked before a run is taken
    PREFIXD_ASSIGN(const auto next, restore->restore->Next());
    pfx_restored_run out{};
    if (next) {
      out.layer = next->layer;
      out.begin = next->tokens.begin;
      out.end = next->tokens.end;
      out.k = next->k.data();
      out.k_bytes = next->k.size();
      out.v = next->v.data();
      out.v_bytes = next->v.size();
    }
    return WriteResult(out, run, "run");
  });
}

void pfx_restore_cancel(pfx_restore* restore) {
  if (restore != nullptr) restore->restore->Cancel();
}

void pfx_restore_free(pfx_restore* restore) { End(restore); }
