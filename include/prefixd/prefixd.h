/* Offers prefixd/client.h as a C interface, for any language that can call C.
 *
 *   pfx_store *client;
 *   pfx_connect_options connect = PFX_CONNECT_OPTIONS_INIT;
 *   connect.address = "unix:/run/prefixd/prefixd.sock";
 *   if (pfx_connect(&connect, &client) != PFX_OK) fputs(pfx_last_error(), stderr);
 *
 *   pfx_attach_options attach = PFX_ATTACH_OPTIONS_INIT;
 *   attach.model = "llama", attach.tokens = prompt, attach.n_tokens = n;
 *   pfx_attach(client, &attach, &session);
 *   for each layer: pfx_step(session, layer, q, n_q, y, n_y, lse, n_lse);
 *                   pfx_merge_states(y_own, lse_own, y, lse, n_q_heads, value_dim);
 *
 * Errors. Every call that can fail returns a pfx_code, PFX_OK (0) on success. After a failure
 * pfx_last_error() returns a sentence with the remedy; it belongs to the calling thread and lasts
 * until that thread's next failing call. Outputs are written on success only, unless stated
 * otherwise. Nothing throws.
 *
 * Ownership. Handles are opaque. The caller who got a handle ends it: pfx_store_close,
 * pfx_put_free, pfx_session_free, pfx_restore_free; NULL is ignored. Sessions and puts keep what
 * they need of their client alive, so the order does not matter. A child that fork() has made of
 * the process cannot use the handles that it inherits (PFX_FAILED_PRECONDITION): it opens its own.
 * Strings returned through `char **`
 * are freed with pfx_free. Everything passed in is borrowed for the call.
 *
 * Threads. A client may be used by any number of threads; so may a session (different layers or
 * batches at once). One put or restore is used by one thread at a time (pfx_restore_cancel: any).
 * Ending a handle while another thread still uses it is an error of the caller.
 *
 * Options. Structs begin with struct_size and are initialised with the macro of their name, which
 * fills it in; members that an older caller's struct lacks take their default. Zero and NULL mean
 * "the default" everywhere. JSON strings hold one object with the field names of the wire (unknown
 * fields are refused); JSON results equal those of `prefixctl --json`.
 *
 * Mathematics. Partial attention states are (y, lse): y is normalised, lse is the natural-log
 * sum of exponentials of the scaled scores (FlashInfer's is base 2: multiply it by ln 2 first).
 * Docs: attach-your-engine.md.
 */
#ifndef PREFIXD_H_
#define PREFIXD_H_

#include <stddef.h>
#include <stdint.h>

#include "prefixd/version.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define PFX_API __attribute__((visibility("default")))
#else
#define PFX_API
#endif

/* Codes keep their numbers; new ones may be added. */
typedef enum pfx_code {
  PFX_OK = 0,
  PFX_INVALID_ARGUMENT = 1,    /* the request itself is wrong; the same call will fail again */
  PFX_NOT_FOUND = 2,           /* no such model, prefix, session, file */
  PFX_ALREADY_EXISTS = 3,      /* exists already, with other contents */
  PFX_FAILED_PRECONDITION = 4, /* the order or state is wrong (store locked, session detached) */
  PFX_INFEASIBLE = 5,          /* the read budget cannot pay for anchors and estimator */
  PFX_RESOURCE_EXHAUSTED = 6,  /* disk full, quota, too many sessions, no memory */
  PFX_CORRUPT = 7,             /* stored bytes do not verify; they were not returned */
  PFX_UNAVAILABLE = 8,         /* daemon or tier not reachable now; trying again may work */
  PFX_IO = 9,                  /* the operating system refused a read or write */
  PFX_CANCELLED = 10,          /* aborted by the caller or by shutdown */
  PFX_INTERNAL = 11,           /* a broken invariant: a bug in prefixd */
  PFX_DEADLINE_EXCEEDED = 12   /* no answer within the time that the caller gave */
} pfx_code;

typedef struct pfx_store pfx_store;
typedef struct pfx_put pfx_put;
typedef struct pfx_session pfx_session;
typedef struct pfx_restore pfx_restore;
typedef struct pfx_pending_match pfx_pending_match;

PFX_API const char* pfx_version(void);            /* "0.2.0", static */
PFX_API const char* pfx_code_name(pfx_code code); /* "not_found", static */
PFX_API const char* pfx_last_error(void);         /* "" before the first failure */
/* Of the same failure: when the call is worth trying again (PFX_RESOURCE_EXHAUSTED, where memory
 * was short for a while). 0: something else must change first. */
PFX_API uint32_t pfx_last_retry_after_ms(void);
PFX_API void pfx_free(void* memory); /* frees memory from this library; ignores NULL */

/* Long calls report their progress with this: return 0 to go on, anything else to cancel
 * (PFX_CANCELLED). Called on the calling thread. `unit` lasts for the call. */
typedef int (*pfx_progress)(void* user, uint64_t done, uint64_t total, const char* unit);

/* ---- clients ------------------------------------------------------------------------------- */

/* Options of a store in this process; opening it locks the directory. */
typedef struct pfx_open_options {
  size_t struct_size;
  const char* dir;          /* created when missing */
  const char* options_json; /* the store's options, e.g. {"threads": 4, "evict": "never"}; docs:
                               reference.md, column "embedded" */
} pfx_open_options;
#define PFX_OPEN_OPTIONS_INIT \
  { sizeof(pfx_open_options), NULL, NULL }

/* Options of a connection to a running daemon. */
typedef struct pfx_connect_options {
  size_t struct_size;
  const char* address;         /* "unix:/path", a plain path, "tcp:host:port" or "tls:host:port" */
  const char* tenant;          /* default for calls that name none */
  const char* token;           /* where the daemon requires one (auth.tokens) */
  uint32_t connect_timeout_ms; /* default 5 s */
  /* Default 120 s; UINT32_MAX: none. The daemon ends a call that takes longer
   * (PFX_DEADLINE_EXCEEDED), and the connection stays. */
  uint32_t call_timeout_ms;
  int no_shared_memory; /* sends tensors through the socket in any case */
  int admin; /* serves every tenant; for the daemon's own user and tokens with the right admin */
  /* How long calls wait for a daemon that went away; sessions then attach again by themselves.
   * Default 5 s; UINT32_MAX: not at all. */
  uint32_t reconnect_ms;
  /* How long a step's thread polls for its answer before it sleeps, and asks the daemon to poll
   * for the next step. Default 0: not at all. */
  uint32_t spin_us;
  /* For "tls:" addresses, PEM files: who may have signed the daemon's certificate (NULL: the file
   * PREFIXD_TLS_CA of the environment, else who the system trusts), and this client's own, for a
   * daemon that asks who it is. */
  const char* tls_ca;
  const char* tls_certificate;
  const char* tls_key;
} pfx_connect_options;
#define PFX_CONNECT_OPTIONS_INIT \
  { sizeof(pfx_connect_options), NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL }

/* Both write a handle into `client`, to be ended with pfx_store_close. PFX_FAILED_PRECONDITION:
 * another process has the directory open. */
PFX_API pfx_code pfx_open(const pfx_open_options* options, pfx_store** client);
/* PFX_UNAVAILABLE: no daemon answers there, within connect_timeout_ms. */
PFX_API pfx_code pfx_connect(const pfx_connect_options* options, pfx_store** client);
/* Frees the handle. Sessions, puts and restores of it go on, and the store ends with the last of
 * them. Ignores NULL. */
PFX_API void pfx_store_close(pfx_store* client);
/* {"runtime": {...}, ...}: docs/reference.md has every statistic. Free `*json` with pfx_free. */
PFX_API pfx_code pfx_stats(pfx_store* client, char** json);

/* ---- models -------------------------------------------------------------------------------- */

/* {"name": "llama", "identity": [["weights", "blake2b:..."], ["rope", "default theta=10000"]],
 *  "geometry": {"n_layers": 2, "n_q_heads": 4, "n_kv_heads": 2, "key_dim": 64, "value_dim": 64,
 *               "dtype": "bf16",
 *               "layers": [{"scale": 0.125, "softcap": 0, "sliding_window": 0}, ...]},
 *  "feature_maps": ["/path/phi-8192.safetensors"]}
 * A layer may name its own "n_q_heads", "n_kv_heads", "key_dim" and "value_dim" (absent or 0: the
 * model's), and with "stored": false it has no rows here.
 * Identity and geometry make the fingerprint: prefixes only match under an equal fingerprint, so
 * put everything into it that changes keys or values. Idempotent for an equal description;
 * PFX_ALREADY_EXISTS when the name is taken by another model. */
PFX_API pfx_code pfx_register_model(pfx_store* client, const char* model_json);
/* A model as it was registered; PFX_NOT_FOUND. Free `*json` with pfx_free. */
PFX_API pfx_code pfx_model(pfx_store* client, const char* name, char** json);
/* One page: {"models": [...], "next": "..."}, by name. `list_json`: {"after": "...", "limit": n},
 * or NULL for the first page; "after" is the "next" of the page before, which is "" behind the
 * last. */
PFX_API pfx_code pfx_list_models(pfx_store* client, const char* list_json, char** json);
/* PFX_FAILED_PRECONDITION while segments of it are stored. Over a connection it is for the
 * daemon's own user and for admins. */
PFX_API pfx_code pfx_remove_model(pfx_store* client, const char* name);

/* ---- storing a prompt ---------------------------------------------------------------------- */

typedef struct pfx_put_options {
  size_t struct_size;
  const char* model;
  const char* tenant;
  const uint32_t* tokens; /* the whole prompt, from position 0 */
  size_t n_tokens;
  const char* label;    /* shown to people */
  int pinned;           /* never evicted */
  uint64_t ttl_seconds; /* from the commit on; 0: for ever */
  const char* encoding; /* encoding of stored rows, e.g. "int8"; default: the store's */
  /* While another put stores the same tokens: waits so long for its end; then PFX_UNAVAILABLE if
   * `alone`, and otherwise the tokens are stored a second time unless the other commits first. */
  uint32_t wait_ms;
  int alone;
  /* Not 0: the rows are derived. A step below mode full went before them in the engine, or they
   * were computed over derived tokens (pfx_session_shape, exact_tokens). Derived rows serve those
   * alone who ask for them; a put that continues derived rows is derived, whatever it says. */
  int derived;
  /* Derived rows that the put continues: all (not 0), or those of a lineage. */
  int accept_approximate;
  const char* lineage;
  /* KV heads [first_head, first_head + n_heads); n_heads 0: to the last. Fewer than all make the
   * put a part: puts, of any processes, that are equal but for their heads and their waiting store
   * one prefix together. It becomes visible when the last part commits; when a part ends without
   * that, the others fail with PFX_UNAVAILABLE. */
  uint32_t first_head, n_heads;
  /* Not 0: rows of tokens from prefill_from on stream in while the engine computes them, so that
   * their times say how fast it prefills (pfx_estimate). Rows out of a buffer say nothing of it. */
  int streams_prefill;
  uint32_t prefill_from;
} pfx_put_options;
#define PFX_PUT_OPTIONS_INIT \
  { sizeof(pfx_put_options), NULL, NULL, NULL, 0, NULL, 0, 0, NULL, 0, 0, 0, 0, NULL, 0, 0, 0, 0 }

typedef struct pfx_put_result {
  size_t struct_size;
  char prefix[40];        /* id of the stored prompt, zero-terminated */
  uint32_t n_tokens;      /* length of the prompt */
  uint32_t stored_tokens; /* newly stored by this put */
  uint64_t bytes;         /* bytes written to disk for rows */
  double seconds;         /* from pfx_begin_put until durable */
  uint32_t exact_tokens;  /* tokens before the first derived one */
  char lineage[40];       /* names the derived rows, for who continues them; "": all are exact */
} pfx_put_result;
#define PFX_PUT_RESULT_INIT \
  { sizeof(pfx_put_result), "", 0, 0, 0, 0, 0, "" }

/* Begins a put, to be ended with pfx_put_commit or pfx_put_abort. PFX_NOT_FOUND: no such model;
 * PFX_RESOURCE_EXHAUSTED: no room, for these rows or for one more put. */
PFX_API pfx_code pfx_begin_put(pfx_store* client, const pfx_put_options* options, pfx_put** put);
/* Tokens [begin, end) that are not stored yet: only these need rows; others are skipped. */
PFX_API pfx_code pfx_put_missing(const pfx_put* put, uint32_t* begin, uint32_t* end);
/* Writes keys and values of tokens [first, first + n) of one layer, in any order and chunking, so
 * that a put overlaps with the prefill. k: [n][n_kv_heads][key_dim] and v:
 * [n][n_kv_heads][value_dim] in the model's dtype; keys after RoPE and QK-norm. NaN and Inf are
 * refused. A part passes the rows and queries of its own heads alone. */
PFX_API pfx_code pfx_put_write(pfx_put* put, uint32_t layer, uint32_t first, uint32_t n,
                               const void* k, size_t k_bytes, const void* v, size_t v_bytes);
/* Optional: passes the prefill's own queries [n][n_q_heads][key_dim], q_count floats in all. A
 * sample of them is kept to choose and measure estimators per head. */
PFX_API pfx_code pfx_put_write_queries(pfx_put* put, uint32_t layer, uint32_t first, uint32_t n,
                                       const float* q, size_t q_count);
/* Makes the put durable and visible before it returns; summaries and indexes follow in the
 * background (pfx_wait_ready). `result` may be NULL. PFX_FAILED_PRECONDITION: rows are missing, and
 * the put can go on. Otherwise the put is used up, also after a failure. A part waits for the
 * others, up to wait_ms; then PFX_FAILED_PRECONDITION names the heads that lack, and it may commit
 * again. */
PFX_API pfx_code pfx_put_commit(pfx_put* put, pfx_put_result* result);
/* Aborts a put that was not committed: nothing becomes visible, nothing leaks. */
PFX_API void pfx_put_free(pfx_put* put);

/* ---- stored prefixes ------------------------------------------------------------------------ */

/* How well a time of pfx_estimate is known. */
typedef enum pfx_source {
  PFX_SOURCE_UNKNOWN = 0,
  PFX_SOURCE_MEASURED = 1, /* by the store's process, lately */
  PFX_SOURCE_EARLIER = 2,  /* by the process that had the store open before */
  PFX_SOURCE_GIVEN = 3,    /* by the engine */
  PFX_SOURCE_LEARNT = 4    /* from puts that streamed a prefill */
} pfx_source;
typedef enum pfx_advice {
  PFX_ADVICE_UNKNOWN = 0, /* there is nothing to compare: use what is stored */
  PFX_ADVICE_RESTORE = 1,
  PFX_ADVICE_ATTACH = 2, /* and retrieve */
  PFX_ADVICE_RECOMPUTE = 3
} pfx_advice;
/* How long the ways to a matched prompt's keys and values take on this machine. Seconds are 0 where
 * their source is PFX_SOURCE_UNKNOWN. prefixd/estimate.h says what each counts. */
typedef struct pfx_estimate {
  uint32_t tokens;       /* estimated: matching tokens behind cached_tokens */
  uint64_t memory_bytes; /* of their rows, in the host tier */
  uint64_t disk_bytes;   /* and not */
  double restore_seconds;
  double retrieve_seconds; /* for each generated token */
  double recompute_seconds;
  double prefill_tokens_per_second; /* 0: unknown */
  pfx_source restore_source, retrieve_source, recompute_source;
  pfx_advice advice; /* the fastest way */
} pfx_estimate;
#define PFX_ESTIMATE_INIT                                                            \
  {                                                                                  \
    0, 0, 0, 0, 0, 0, 0, PFX_SOURCE_UNKNOWN, PFX_SOURCE_UNKNOWN, PFX_SOURCE_UNKNOWN, \
        PFX_ADVICE_UNKNOWN                                                           \
  }

typedef struct pfx_match_options {
  size_t struct_size;
  const char* model;
  const char* tenant;
  const uint32_t* tokens;
  size_t n_tokens;
  /* Derived rows that may match: all (not 0), or those of the session that the engine continues, by
   * the lineage that its first derived put returned. By default the match ends before them. */
  int accept_approximate;
  const char* lineage;
  /* For the estimate: the engine's prefill rate (0: not given), the prompt's first tokens that it
   * has already, and the tokens that it expects to generate over an attached prefix (0: unknown).
   */
  double prefill_tokens_per_second;
  uint32_t cached_tokens, answer_tokens;
  /* Takes compressed prefixes, too (pfx_compress): they serve steps under a policy, and can neither
   * be restored nor continued. */
  int accept_compressed;
} pfx_match_options;
#define PFX_MATCH_OPTIONS_INIT \
  { sizeof(pfx_match_options), NULL, NULL, NULL, 0, 0, NULL, 0, 0, 0, 0 }

typedef struct pfx_match_result {
  size_t struct_size;
  char prefix[40];        /* id, zero-terminated; "" when nothing matches */
  uint32_t n_tokens;      /* matching tokens */
  uint32_t stored_tokens; /* length of that prefix */
  uint32_t exact_tokens;  /* matching tokens before the first derived one */
  pfx_estimate estimate;
  int compressed; /* not 0: of some of the tokens no rows are stored */
} pfx_match_result;
#define PFX_MATCH_RESULT_INIT \
  { sizeof(pfx_match_result), "", 0, 0, 0, PFX_ESTIMATE_INIT, 0 }

/* Finds the longest stored prefix of the tokens; an empty match is no error. */
PFX_API pfx_code pfx_match(pfx_store* client, const pfx_match_options* options,
                           pfx_match_result* result);
/* The same for callers that must not wait, such as schedulers: pfx_match_begin returns at once,
 * however slow disk or daemon are, and copies the tokens. The answer comes within deadline_ms, or
 * is PFX_DEADLINE_EXCEEDED. */
PFX_API pfx_code pfx_match_begin(pfx_store* client, const pfx_match_options* options,
                                 uint64_t deadline_ms, pfx_pending_match** match);
/* 1 when pfx_match_end would not wait: the answer is there, or the deadline has passed. */
PFX_API int pfx_match_ready(const pfx_pending_match* match);
/* Waits for the answer, up to the deadline, and frees `match`, also after a failure. result NULL:
 * gives the match up without waiting. */
PFX_API pfx_code pfx_match_end(pfx_pending_match* match, pfx_match_result* result);
/* Says why a match of these tokens finds as many as it does, and no more: {"match": {...},
 * "asked_tokens": 8192, "misses": [{"reason": "diverges", "text": "...", ...}]}. `identity_json`,
 * or NULL, is the identity that the engine has now, [["weights", "..."], ...], to compare. */
PFX_API pfx_code pfx_explain(pfx_store* client, const pfx_match_options* options,
                             const char* identity_json, char** json);
/* One page of summaries, by tenant and id: {"prefixes": [...], "next": "..."}. `list_json` as for
 * pfx_list_models, and "tenant" for one tenant's alone. */
PFX_API pfx_code pfx_list_prefixes(pfx_store* client, const char* list_json, char** json);
/* Everything of one prefix (PFX_NOT_FOUND); free `*json` with pfx_free. */
PFX_API pfx_code pfx_prefix(pfx_store* client, const char* prefix, char** json);
/* Removes the name; tokens that others continue stay with those. PFX_FAILED_PRECONDITION: a session
 * has it open. */
PFX_API pfx_code pfx_remove(pfx_store* client, const char* prefix);
/* {"pinned": true, "ttl_seconds": 3600}: absent fields stay unchanged. */
PFX_API pfx_code pfx_set_lifetime(pfx_store* client, const char* prefix, const char* lifetime_json);
/* Waits until summaries, indexes and choices are ready; fails with the reason otherwise.
 * `progress` may be NULL. */
PFX_API pfx_code pfx_wait_ready(pfx_store* client, const char* prefix, pfx_progress progress,
                                void* user);
/* Rewrites what a prefix needs now: `kind` is "recluster", "compact" or "encrypt". Answers stay the
 * same.
 * `json` may be NULL: {"segments": 3, "rewritten": 1, "bytes": ..., "left": ["why another stays"]}.
 */
PFX_API pfx_code pfx_rewrite(pfx_store* client, const char* prefix, const char* kind,
                             pfx_progress progress, void* user, char** json);
/* Gives up, for good, the rows of most tokens of the segment in which the prefix ends, once what
 * that does to attention over it is measured. `spec_json`: {"keep": 0.25, "policy": "gkv",
 * "scorers": "", "max_error": 0.1, "dry_run": true}, each with a default (prefixd/compress.h).
 * `json` may be NULL:
 * {"compressed": true, "bytes_before": ..., "error_after": ..., ...}; where max_error was exceeded,
 * "refused" says so. PFX_FAILED_PRECONDITION: others need its rows, a session has it open, or its
 * summaries are not ready. */
PFX_API pfx_code pfx_compress(pfx_store* client, const char* prefix, const char* spec_json,
                              pfx_progress progress, void* user, char** json);
/* Reads and verifies every segment that a prefix needs (NULL or "": the whole store, over a
 * connection all of the tenant's), each once; `json` may be NULL. */
PFX_API pfx_code pfx_verify(pfx_store* client, const char* prefix, pfx_progress progress,
                            void* user, char** json);
/* Does the same for all segments of one tenant. */
PFX_API pfx_code pfx_verify_tenant(pfx_store* client, const char* tenant, pfx_progress progress,
                                   void* user, char** json);

/* ---- sessions ------------------------------------------------------------------------------- */

typedef struct pfx_attach_options {
  size_t struct_size;
  const char* model;
  const char* tenant;
  const uint32_t* tokens; /* attaches to their longest stored prefix, */
  size_t n_tokens;
  const char* prefix; /* or to this one, when there are no tokens */
  uint32_t cut;       /* bound on the tokens used of it; 0: all that match */
  /* How steps read, e.g. {"budget": 0.01, "estimator": "moment"}, {"k": 64}, {"mode": "full"}. */
  const char* policy_json;
  /* Derived rows that are taken, as in pfx_match_options; a named prefix that has others is refused
   * (PFX_FAILED_PRECONDITION). */
  int accept_approximate;
  const char* lineage;
  /* Bounds the attach and each call of the session (PFX_DEADLINE_EXCEEDED); 0: none. */
  uint32_t call_timeout_ms;
  double prefill_tokens_per_second; /* for the estimate, as in pfx_match_options */
  uint32_t cached_tokens, answer_tokens;
  /* Own tokens kept in memory; beyond so many (0: no bound, else at least 256) the oldest move to
   * the store in the background, and steps read them as they read the prefix. */
  uint32_t own_memory_tokens;
  /* Of the tokens' longest prefix, as in pfx_match_options; a named one needs it not. */
  int accept_compressed;
} pfx_attach_options;
#define PFX_ATTACH_OPTIONS_INIT \
  { sizeof(pfx_attach_options), NULL, NULL, NULL, 0, NULL, 0, NULL, 0, NULL, 0, 0, 0, 0, 0, 0 }

typedef struct pfx_session_shape {
  size_t struct_size;
  uint32_t n_tokens; /* length of the prefix; the engine continues at this position */
  uint32_t n_layers, n_q_heads, n_kv_heads, key_dim, value_dim;
  uint32_t row_bytes;    /* bytes of one token of one KV head: key, then value */
  char dtype[8];         /* "f32", "f16", "bf16" */
  uint32_t exact_tokens; /* tokens before the first derived one; fewer than n_tokens: what is
                            computed over the session is derived, whatever the policy */
  pfx_estimate estimate; /* when it was attached */
} pfx_session_shape;
#define PFX_SESSION_SHAPE_INIT \
  { sizeof(pfx_session_shape), 0, 0, 0, 0, 0, 0, 0, "", 0, PFX_ESTIMATE_INIT }

/* PFX_NOT_FOUND when no stored prefix matches. */
PFX_API pfx_code pfx_attach(pfx_store* client, const pfx_attach_options* options,
                            pfx_session** session);
/* Set struct_size before; the members that fit into it are written. */
PFX_API pfx_code pfx_session_get_shape(const pfx_session* session, pfx_session_shape* shape);
/* One layer's heads and dimensions, which are those of pfx_session_shape unless the model was
 * registered with others; all members behind struct_size 0: the layer has no rows. */
typedef struct pfx_layer_shape {
  size_t struct_size;
  uint32_t n_q_heads, n_kv_heads, key_dim, value_dim;
  uint32_t row_bytes;
} pfx_layer_shape;
#define PFX_LAYER_SHAPE_INIT \
  { sizeof(pfx_layer_shape), 0, 0, 0, 0, 0 }
PFX_API pfx_code pfx_session_get_layer(const pfx_session* session, uint32_t layer,
                                       pfx_layer_shape* shape);
/* Replaces the policy of later steps; absent fields take their default. */
PFX_API pfx_code pfx_session_set_policy(pfx_session* session, const char* policy_json);

/* Computes attention of one decode step over the stored prefix, for all heads of one layer:
 *   q: [n_q_heads][key_dim] after RoPE -> y: [n_q_heads][value_dim], lse: [n_q_heads].
 * The counts are in floats. */
PFX_API pfx_code pfx_step(pfx_session* session, uint32_t layer, const float* q, size_t q_count,
                          float* y, size_t y_count, float* lse, size_t lse_count);

/* Own tokens: what was asked and generated behind the prefix. A session takes their rows, so that
 * the engine need not keep them; they belong to the session alone and end with it, and lie in
 * memory unless own_memory_tokens bounds them.
 * Each KV head takes them in order. For KV heads [first_head, first_head + n_heads) of a layer
 * (n_heads 0: to the last): k: [n][n_heads][key_dim] after RoPE, v: [n][n_heads][value_dim], in the
 * model's dtype, sizes in bytes. PFX_RESOURCE_EXHAUSTED without memory; a refused call has changed
 * nothing (over a connection a block of several messages may have been appended up to the refused
 * one). The same call may be repeated, and goes on. */
PFX_API pfx_code pfx_session_append(pfx_session* session, uint32_t layer, uint32_t first_head,
                                    uint32_t n_heads, uint32_t n, const void* k, size_t k_bytes,
                                    const void* v, size_t v_bytes);
/* Decodes one token of a layer: appends its row and attends, over the prefix as pfx_step does and
 * exactly over all own tokens, the appended one included. q, y and lse as in pfx_step, of the query
 * heads of these KV heads. A call that fails has appended nothing and may be repeated; after
 * PFX_UNAVAILABLE the own tokens may be lost, which the message says. */
PFX_API pfx_code pfx_step_append(pfx_session* session, uint32_t layer, uint32_t first_head,
                                 uint32_t n_heads, const float* q, size_t q_count, const void* k,
                                 size_t k_bytes, const void* v, size_t v_bytes, float* y,
                                 size_t y_count, float* lse, size_t lse_count);
/* Keeps the first n own tokens of every head; a head with no more keeps all of its. */
PFX_API pfx_code pfx_session_truncate(pfx_session* session, uint32_t n);
/* Attaches another session to the same prefix, with the policy and the own tokens of this one; both
 * go on apart. Free it as any other. */
PFX_API pfx_code pfx_session_fork(pfx_session* session, pfx_session** fork);

/* What pfx_session_persist stores, and how; members are those of pfx_put_options. */
typedef struct pfx_persist_options {
  size_t struct_size;
  const uint32_t* tokens; /* the ids of the first n_tokens own tokens */
  size_t n_tokens;
  const char* label;
  int pinned;
  uint64_t ttl_seconds;
  const char* encoding;
  uint32_t wait_ms;
  int alone;
  int derived; /* for a reason that the session does not know */
} pfx_persist_options;
#define PFX_PERSIST_OPTIONS_INIT \
  { sizeof(pfx_persist_options), NULL, 0, NULL, 0, 0, NULL, 0, 0, 0 }
/* Stores the first own tokens as a prefix that continues the session's, durable and visible when it
 * returns; rows that are stored already are not stored again. Rows from the first token on that was
 * not whole when a step below mode full began are derived. The session goes on as before. `result`
 * may be NULL. PFX_INVALID_ARGUMENT: no ids, or more than own tokens; PFX_FAILED_PRECONDITION: some
 * heads lack rows of them. A refused call has changed nothing of the session. */
PFX_API pfx_code pfx_session_persist(pfx_session* session, const pfx_persist_options* options,
                                     pfx_put_result* result);
/* Goes on over what was persisted last: as pfx_session_fork, but attached to the stored own tokens,
 * all but the last `window` of them, with the others as its own tokens. Free `session` then, which
 * frees their memory. PFX_FAILED_PRECONDITION: nothing was persisted; PFX_NOT_FOUND: it was evicted
 * or removed since. */
PFX_API pfx_code pfx_session_fork_persisted(pfx_session* session, uint32_t window,
                                            pfx_session** fork);

/* One layer step of one session, in a batch of several sessions of one client. */
typedef struct pfx_step_request {
  pfx_session* session;
  uint32_t layer;
  pfx_code code; /* out: this request's own code */
  const float* q;
  size_t q_count;
  float* y;
  size_t y_count;
  float* lse;
  size_t lse_count;
  /* KV heads [first_head, first_head + n_heads) step, with the query heads of their groups: q, y
   * and lse are of these alone. n_heads 0: to the last. */
  uint32_t first_head, n_heads;
  /* Where both are not NULL the step is a pfx_step_append: the token's own key and value rows. */
  const void* k;
  size_t k_bytes;
  const void* v;
  size_t v_bytes;
} pfx_step_request;
/* request_size is sizeof(pfx_step_request). Returns the first failing request's code; each request
 * has its own, and the others run all the same, also beside one that has no session, an array that
 * is NULL, or the session of another client. Where the call as a whole is refused (no client, no
 * requests, another request_size) nothing runs and no code is written. */
PFX_API pfx_code pfx_step_batch(pfx_store* client, pfx_step_request* requests, size_t n,
                                size_t request_size);

/* Computes exact attention of n queries (the new question) in one pass over the prefix, for KV
 * heads as in pfx_step_request and the h query heads of their groups: q: [n][h][key_dim] -> y:
 * [n][h][value_dim], lse: [n][h]. */
PFX_API pfx_code pfx_attend_exact(pfx_session* session, uint32_t layer, uint32_t first_head,
                                  uint32_t n_heads, uint32_t n, const float* q, size_t q_count,
                                  float* y, size_t y_count, float* lse, size_t lse_count);

/* Read verified rows, key then value, in the model's dtype, for engines that compute themselves.
 * ids ascend; out holds n_ids * row_bytes (or (end - begin) * row_bytes) bytes. */
PFX_API pfx_code pfx_read_rows(pfx_session* session, uint32_t layer, uint32_t kv_head,
                               const uint32_t* ids, size_t n_ids, void* out, size_t out_bytes);
PFX_API pfx_code pfx_read_range(pfx_session* session, uint32_t layer, uint32_t kv_head,
                                uint32_t begin, uint32_t end, void* out, size_t out_bytes);

/* Tells how far a cut may be trusted (0: there is no cut): under an exact cut no token of the mid
 * region that was not selected scores above it. */
typedef enum pfx_cut_kind {
  PFX_CUT_NONE = 0,
  PFX_CUT_APPROXIMATE = 1,
  PFX_CUT_EXACT = 2
} pfx_cut_kind;
typedef struct pfx_cut {
  float score; /* scaled score, natural */
  pfx_cut_kind kind;
} pfx_cut;
/* Selects alone, in one KV head for its group's queries q [n_q_heads / n_kv_heads][key_dim].
 * Writes at most k ids, ascending, into ids[k]; their number into n_ids; one cut per query head of
 * the group into cuts[n_cuts] (may be NULL with n_cuts 0). */
PFX_API pfx_code pfx_select(pfx_session* session, uint32_t layer, uint32_t kv_head, const float* q,
                            size_t q_count, uint32_t k, uint32_t* ids, size_t* n_ids, pfx_cut* cuts,
                            size_t n_cuts);

/* Ends the calls of this session that run now, on any thread, with PFX_CANCELLED; later calls are
 * not concerned. Any thread may call it; it does not wait. */
PFX_API pfx_code pfx_session_cancel(pfx_session* session);

/* Reports what the session has read so far: info, total, per_head; after pfx_session_detach what
 * that returned. Fails as other calls do: it never answers with an old report. Free `*json` with
 * pfx_free. */
PFX_API pfx_code pfx_session_report(pfx_session* session, char** json);
/* Ends the session and returns its report (`json` may be NULL); later calls with it fail with
 * PFX_FAILED_PRECONDITION. A daemon that went away has ended the session: the report is then the
 * last one that was asked for (empty where none was). Free the handle with pfx_session_free all the
 * same; that also detaches where this was not called. */
PFX_API pfx_code pfx_session_detach(pfx_session* session, char** json);
/* Detaches, where that was not done, and frees. Ignores NULL. */
PFX_API void pfx_session_free(pfx_session* session);

/* ---- restoring ------------------------------------------------------------------------------ */

/* The order of rows of several tokens and KV heads. */
typedef enum pfx_kv_order {
  PFX_TOKEN_MAJOR = 0, /* [n][n_kv_heads][dim] */
  PFX_HEAD_MAJOR = 1   /* [n_kv_heads][n][dim] */
} pfx_kv_order;

/* Options for restoring rows into the engine's own cache, the first layer first; the next runs are
 * read while the engine works on this one. Defaults: everything, token-major, 128 MiB of buffers.
 */
typedef struct pfx_restore_options {
  size_t struct_size;
  uint32_t begin, end;             /* tokens; end 0: to the end of the prefix */
  uint32_t first_layer, end_layer; /* [first, end); end 0: to the last */
  pfx_kv_order order;
  uint64_t buffer_bytes; /* rows read ahead and rows handed out; never less than two runs */
  pfx_progress progress; /* bytes handed out, from pfx_restore_next; may be NULL */
  void* user;
} pfx_restore_options;
#define PFX_RESTORE_OPTIONS_INIT \
  { sizeof(pfx_restore_options), 0, 0, 0, 0, PFX_TOKEN_MAJOR, 0, NULL, NULL }

/* Verified keys and values of tokens [begin, end) in one layer, for every KV head, in the model's
 * dtype. Borrowed until the next pfx_restore_next or pfx_restore_free. */
typedef struct pfx_restored_run {
  size_t struct_size;
  uint32_t layer, begin, end;
  const void* k;
  size_t k_bytes;
  const void* v;
  size_t v_bytes;
} pfx_restored_run;
#define PFX_RESTORED_RUN_INIT \
  { sizeof(pfx_restored_run), 0, 0, 0, NULL, 0, NULL, 0 }

/* Begins to read in its own thread. `options` may be NULL. The restore keeps the session's parts
 * that it needs alive. */
PFX_API pfx_code pfx_restore_begin(pfx_session* session, const pfx_restore_options* options,
                                   pfx_restore** restore);
/* Waits for the next run, in order of layers and within them of tokens. After the last run, `run`
 * has k NULL. After a failure every call returns it. */
PFX_API pfx_code pfx_restore_next(pfx_restore* restore, pfx_restored_run* run);
/* Makes pfx_restore_next fail with PFX_CANCELLED from now on, also where it waits. Callable from
 * any thread. */
PFX_API void pfx_restore_cancel(pfx_restore* restore);
PFX_API void pfx_restore_free(pfx_restore* restore); /* cancels */

/* ---- merging -------------------------------------------------------------------------------- */

/* Merges n partial states (y_b, lse_b) into (y_a, lse_a), in place:
 *   lse = log(e^lse_a + e^lse_b), y = (e^lse_a y_a + e^lse_b y_b) / e^lse.
 *   y: [n][value_dim], lse: [n]. Either side may be empty (lse = -INFINITY). Cannot fail. */
PFX_API void pfx_merge_states(float* y_a, float* lse_a, const float* y_b, const float* lse_b,
                              size_t n, size_t value_dim);

#ifdef __cplusplus
}
#endif
#endif /* PREFIXD_H_ */
