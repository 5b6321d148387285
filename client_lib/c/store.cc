// Implements the C API's clients, models and stored prefixes.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <utility>

#include "client_lib/c/handles.h"
#include "prefixd/merge.h"
#include "prefixd/version.h"
#include "protocol/json_text.h"

namespace prefixd::capi {
namespace {

struct LastFailure {
  std::string message;
  uint32_t retry_after_ms = 0;
};

LastFailure& LastError() {
  thread_local LastFailure last;
  return last;
}

constexpr pfx_code kCodes[] = {PFX_INVALID_ARGUMENT,
                               PFX_NOT_FOUND,
                               PFX_ALREADY_EXISTS,
                               PFX_FAILED_PRECONDITION,
                               PFX_INFEASIBLE,
                               PFX_RESOURCE_EXHAUSTED,
                               PFX_CORRUPT,
                               PFX_UNAVAILABLE,
                               PFX_IO,
                               PFX_CANCELLED,
                               PFX_DEADLINE_EXCEEDED,
                               PFX_INTERNAL};
static_assert(kCodes[size_t(Code::kInternal)] == PFX_INTERNAL);
static_assert(kCodes[size_t(Code::kCorrupt)] == PFX_CORRUPT);

pfx_match_result ResultOf(const PrefixMatch& match) {
  pfx_match_result out{};
  CopyText(match.prefix, out.prefix);
  out.n_tokens = match.n_tokens;
  out.stored_tokens = match.stored_tokens;
  out.exact_tokens = match.exact_tokens;
  out.estimate = EstimateOf(match.estimate);
  out.compressed = match.compressed ? 1 : 0;
  return out;
}

Result<MatchSpec> SpecOf(const pfx_match_options* options) {
  PREFIXD_ASSIGN(const auto o, ReadOptions(options, "options"));
  if (o.tokens == nullptr && o.n_tokens > 0) return Null("tokens");
  MatchSpec spec;
  spec.model = Text(o.model);
  spec.tenant = Text(o.tenant);
  spec.tokens.assign(o.tokens, o.tokens + o.n_tokens);
  spec.accept_approximate = o.accept_approximate != 0;
  spec.lineage = Text(o.lineage);
  spec.engine = {o.prefill_tokens_per_second, o.cached_tokens, o.answer_tokens};
  spec.accept_compressed = o.accept_compressed != 0;
  return spec;
}

Result<ListSpec> ListOf(const char* json) {
  if (json == nullptr) return ListSpec{};
  return wire::FromText<ListSpec>(json, "list");
}

Result<RuntimeOptions> OpenOptions(const pfx_open_options& o) {
  wire::Json given = wire::Json::object();
  if (o.options_json) {
    PREFIXD_ASSIGN(given, wire::ParseObject(o.options_json, "options_json"));
  }
  if (o.dir) given["dir"] = o.dir;
  if (!given.contains("dir")) return InvalidArgument("a store needs a directory (dir)");
  return wire::FromText<RuntimeOptions>(given.dump(), "options");
}

}  // namespace

pfx_code Fail(const Error& error) {
  LastError().retry_after_ms = error.retry_after_ms;
  try {
    LastError().message = error.message;
  } catch (const std::bad_alloc&) {  // the caller still gets the code
  }
  return kCodes[static_cast<size_t>(error.code)];
}

Status ReturnText(const std::string& text, char** out) {
  if (out == nullptr) return {};
  auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) return Error{Code::kResourceExhausted, "out of memory"};
  std::memcpy(copy, text.c_str(), text.size() + 1);
  *out = copy;
  return {};
}

ProgressFn Progress(pfx_progress progress, void* user) {
  if (progress == nullptr) return [](uint64_t, uint64_t, std::string_view) { return true; };
  return [progress, user](uint64_t done, uint64_t total, std::string_view unit) {
    return progress(user, done, total, std::string(unit).c_str()) == 0;
  };
}

}  // namespace prefixd::capi

using namespace prefixd;        // NOLINT: the C API's functions stand in the global namespace
using namespace prefixd::capi;  // NOLINT

const char* pfx_version(void) { return PREFIXD_VERSION; }

const char* pfx_code_name(pfx_code code) {
  if (code == PFX_OK) return "ok";
  for (size_t i = 0; i < std::size(kCodes); ++i) {
    if (kCodes[i] == code) return CodeName(static_cast<Code>(i)).data();
  }
  return "unknown";
}

const char* pfx_last_error(void) { return LastError().message.c_str(); }
uint32_t pfx_last_retry_after_ms(void) { return LastError().retry_after_ms; }

void pfx_free(void* memory) { std::free(memory); }

pfx_code pfx_open(const pfx_open_options* options, pfx_store** client) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto given, ReadOptions(options, "options"));
    PREFIXD_ASSIGN(const RuntimeOptions runtime, OpenOptions(given));
    PREFIXD_ASSIGN(auto opened, Open(runtime));
    *client = new pfx_store{std::move(opened)};
    return {};
  });
}

pfx_code pfx_connect(const pfx_connect_options* options, pfx_store** client) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto given, ReadOptions(options, "options"));
    ConnectOptions connect;
    connect.tenant = Text(given.tenant);
    connect.token = Text(given.token);
    if (given.connect_timeout_ms) connect.connect_timeout_ms = given.connect_timeout_ms;
    if (given.call_timeout_ms) {
      const bool forever = given.call_timeout_ms == std::numeric_limits<uint32_t>::max();
      connect.call_timeout_ms = forever ? 0 : given.call_timeout_ms;
    }
    connect.shared_memory = given.no_shared_memory == 0;
    connect.admin = given.admin != 0;
    if (given.reconnect_ms) {
      const bool never = given.reconnect_ms == std::numeric_limits<uint32_t>::max();
      connect.reconnect_ms = never ? 0 : given.reconnect_ms;
    }
    connect.spin_us = given.spin_us;
    connect.tls_ca = Text(given.tls_ca);
    connect.tls_certificate = Text(given.tls_certificate);
    connect.tls_key = Text(given.tls_key);
    PREFIXD_ASSIGN(auto connected, Connect(Text(given.address), connect));
    *client = new pfx_store{std::move(connected)};
    return {};
  });
}

void pfx_store_close(pfx_store* client) { End(client); }

pfx_code pfx_stats(pfx_store* client, char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const RuntimeStats stats, client->client->Stats());
    return ReturnText(wire::ToText(stats), json);
  });
}

pfx_code pfx_register_model(pfx_store* client, const char* model_json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto spec, wire::FromText<ModelSpec>(Text(model_json), "model"));
    return client->client->RegisterModel(spec);
  });
}

pfx_code pfx_model(pfx_store* client, const char* name, char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto model, client->client->Model(Text(name)));
    return ReturnText(wire::ToText(model), json);
  });
}

pfx_code pfx_list_models(pfx_store* client, const char* list_json, char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto spec, ListOf(list_json));
    PREFIXD_ASSIGN(const auto page, client->client->ListModels(spec));
    return ReturnText(wire::ToText(page), json);
  });
}

pfx_code pfx_remove_model(pfx_store* client, const char* name) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    return client->client->RemoveModel(Text(name));
  });
}

pfx_code pfx_match(pfx_store* client, const pfx_match_options* options, pfx_match_result* result) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const MatchSpec spec, SpecOf(options));
    PREFIXD_ASSIGN(const PrefixMatch match, client->client->Match(spec));
    return WriteResult(ResultOf(match), result, "result");
  });
}

pfx_code pfx_match_begin(pfx_store* client, const pfx_match_options* options, uint64_t deadline_ms,
                         pfx_pending_match** match) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    if (match == nullptr) return Null("match");
    PREFIXD_ASSIGN(const MatchSpec spec, SpecOf(options));
    auto handle = std::make_unique<pfx_pending_match>();
    PREFIXD_ASSIGN(
        handle->match,
        client->client->MatchAsync(spec, std::chrono::milliseconds(std::min(
                                             deadline_ms, uint64_t{kMaxMatchDeadline.count()}))));
    *match = handle.release();
    return {};
  });
}

int pfx_match_ready(const pfx_pending_match* match) {
  return match != nullptr && match->match->ready() ? 1 : 0;
}

pfx_code pfx_match_end(pfx_pending_match* match, pfx_match_result* result) {
  return Guard([&]() -> Status {
    if (match == nullptr) return Null("match");
    const std::unique_ptr<pfx_pending_match> ended(match);
    if (result == nullptr) return {};
    PREFIXD_ASSIGN(const PrefixMatch found, ended->match->Get());
    return WriteResult(ResultOf(found), result, "result");
  });
}

pfx_code pfx_explain(pfx_store* client, const pfx_match_options* options, const char* identity_json,
                     char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    ExplainSpec spec;
    if (identity_json != nullptr) {
      const std::string wrapped = R"({"identity": )" + std::string(identity_json) + "}";
      PREFIXD_ASSIGN(spec, wire::FromText<ExplainSpec>(wrapped, "explain"));
    }
    PREFIXD_ASSIGN(spec.match, SpecOf(options));
    PREFIXD_ASSIGN(const auto explanation, client->client->Explain(spec));
    return ReturnText(wire::ToText(explanation), json);
  });
}

pfx_code pfx_list_prefixes(pfx_store* client, const char* list_json, char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto spec, ListOf(list_json));
    PREFIXD_ASSIGN(const auto page, client->client->ListPrefixes(spec));
    return ReturnText(wire::ToText(page), json);
  });
}

pfx_code pfx_prefix(pfx_store* client, const char* prefix, char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto detail, client->client->Prefix(Text(prefix)));
    return ReturnText(wire::ToText(detail), json);
  });
}

pfx_code pfx_remove(pfx_store* client, const char* prefix) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    return client->client->Remove(Text(prefix));
  });
}

pfx_code pfx_set_lifetime(pfx_store* client, const char* prefix, const char* lifetime_json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto lifetime, wire::FromText<Lifetime>(Text(lifetime_json), "lifetime"));
    return client->client->SetLifetime(Text(prefix), lifetime);
  });
}

pfx_code pfx_wait_ready(pfx_store* client, const char* prefix, pfx_progress progress, void* user) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    return client->client->WaitReady(Text(prefix), Progress(progress, user));
  });
}

pfx_code pfx_rewrite(pfx_store* client, const char* prefix, const char* kind, pfx_progress progress,
                     void* user, char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto how, RewriteKindFromName(Text(kind)));
    PREFIXD_ASSIGN(const auto result,
                   client->client->Rewrite(Text(prefix), how, Progress(progress, user)));
    return ReturnText(wire::ToText(result), json);
  });
}

pfx_code pfx_compress(pfx_store* client, const char* prefix, const char* spec_json,
                      pfx_progress progress, void* user, char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    CompressSpec spec;
    if (spec_json != nullptr) {
      PREFIXD_ASSIGN(spec, wire::FromText<CompressSpec>(spec_json, "compress"));
    }
    PREFIXD_ASSIGN(const auto report,
                   client->client->Compress(Text(prefix), spec, Progress(progress, user)));
    return ReturnText(wire::ToText(report), json);
  });
}

pfx_code pfx_verify(pfx_store* client, const char* prefix, pfx_progress progress, void* user,
                    char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto summary,
                   client->client->Verify(Text(prefix), Progress(progress, user)));
    return ReturnText(wire::ToText(summary), json);
  });
}

pfx_code pfx_verify_tenant(pfx_store* client, const char* tenant, pfx_progress progress, void* user,
                           char** json) {
  return Guard([&]() -> Status {
    if (client == nullptr) return Null("client");
    PREFIXD_ASSIGN(const auto summary,
                   client->client->VerifyTenant(Text(tenant), Progress(progress, user)));
    return ReturnText(wire::ToText(summary), json);
  });
}

void pfx_merge_states(float* y_a, float* lse_a, const float* y_b, const float* lse_b, size_t n,
                      size_t value_dim) {
  for (size_t i = 0; i < n; ++i) {
    MergeStates({y_a + i * value_dim, value_dim}, lse_a + i, {y_b + i * value_dim, value_dim},
                lse_b[i]);
  }
}
