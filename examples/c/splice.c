/* Acts as an engine in C: it stores the keys and values of a prompt, closes the store, opens it
 * again, and goes on decoding over the stored prompt: first with the answer's rows in its own
 * memory, then with a session that takes them, too, and moves the oldest out of memory. It checks
 * states against attention over the whole cache in plain loops.
 *
 *   cc -std=c99 splice.c $(pkg-config --cflags --libs prefixd) -lm -o splice
 *   ./splice DIR            a store of its own in DIR
 *   ./splice unix:/path     a running daemon
 */
#include <math.h>
#include <prefixd/prefixd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  LAYERS = 2,
  Q_HEADS = 4,
  KV_HEADS = 2,
  DIM = 16,
  STORED = 1000,
  OWN = 8,
  ASKED = STORED + OWN, /* tokens of the prompt with its question */
  TOKENS = ASKED + 1500 /* and of a long answer */
};
static const float kScale = 0.25f; /* 1 / sqrt(DIM) */

/* A real engine has these in its cache: [layer][token][KV head][dim]. */
static float keys[LAYERS][TOKENS][KV_HEADS][DIM], values[LAYERS][TOKENS][KV_HEADS][DIM];
static uint32_t tokens[TOKENS];

static void must(pfx_code code, const char* what) {
  if (code == PFX_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, pfx_code_name(code), pfx_last_error());
  exit(1);
}

static float noise(void) { /* roughly normal */
  float sum = 0;
  int i;
  for (i = 0; i < 12; ++i) sum += (float)rand() / (float)RAND_MAX;
  return sum - 6;
}

/* Computes one head's attention over tokens [begin, end) of the engine's own memory: (y, lse). */
static void attend(int layer, int head, const float* q, int begin, int end, float* y, float* lse) {
  const int kv = head / (Q_HEADS / KV_HEADS);
  float score[TOKENS], top = -INFINITY;
  double sum = 0, out[DIM] = {0};
  int t, d;
  for (t = begin; t < end; ++t) {
    score[t] = 0;
    for (d = 0; d < DIM; ++d) score[t] += kScale * q[d] * keys[layer][t][kv][d];
    if (score[t] > top) top = score[t];
  }
  for (t = begin; t < end; ++t) {
    const double weight = exp(score[t] - top);
    sum += weight;
    for (d = 0; d < DIM; ++d) out[d] += weight * values[layer][t][kv][d];
  }
  for (d = 0; d < DIM; ++d) y[d] = (float)(out[d] / sum);
  *lse = top + (float)log(sum);
}

static pfx_store* open_client(const char* where) {
  pfx_store* client = NULL;
  if (strncmp(where, "unix:", 5) == 0 || strncmp(where, "tcp:", 4) == 0 ||
      strncmp(where, "tls:", 4) == 0) {
    pfx_connect_options options = PFX_CONNECT_OPTIONS_INIT;
    options.address = where;
    must(pfx_connect(&options, &client), "connect");
  } else {
    pfx_open_options options = PFX_OPEN_OPTIONS_INIT;
    options.dir = where;
    options.options_json = "{\"host_tier_bytes\": 67108864}";
    must(pfx_open(&options, &client), "open");
  }
  return client;
}

static const char kModel[] =
    "{\"name\": \"c-example\", \"identity\": [[\"weights\", \"random numbers\"]],"
    " \"geometry\": {\"n_layers\": 2, \"n_q_heads\": 4, \"n_kv_heads\": 2, \"key_dim\": 16,"
    "  \"value_dim\": 16, \"dtype\": \"f32\", \"layers\": [{\"scale\": 0.25}, {\"scale\": 0.25}]}}";

/* During the prefill, each layer's rows go to the store as soon as they are computed. */
static void store_prompt(const char* where) {
  pfx_store* client = open_client(where);
  pfx_put_options options = PFX_PUT_OPTIONS_INIT;
  pfx_put_result result = PFX_PUT_RESULT_INIT;
  pfx_put* put;
  uint32_t begin, end;
  int layer;
  must(pfx_register_model(client, kModel), "register the model");
  options.model = "c-example";
  options.tokens = tokens;
  options.n_tokens = STORED;
  options.label = "examples/c";
  must(pfx_begin_put(client, &options, &put), "begin the put");
  must(pfx_put_missing(put, &begin, &end), "what is missing");
  for (layer = 0; layer < LAYERS; ++layer) {
    const size_t bytes = (size_t)(end - begin) * sizeof keys[0][0];
    must(pfx_put_write(put, (uint32_t)layer, begin, end - begin, keys[layer][begin], bytes,
                       values[layer][begin], bytes),
         "write rows");
  }
  must(pfx_put_commit(put, &result), "commit");
  pfx_put_free(put);
  must(pfx_wait_ready(client, result.prefix, NULL, NULL), "prepare");
  printf("stored %u of %u tokens as %s\n", result.stored_tokens, result.n_tokens, result.prefix);
  pfx_store_close(client);
}

/* Runs one decode step of every layer; returns the largest error against attention over all. */
static float decode(pfx_session* session) {
  float worst = 0;
  int layer, head, d, i;
  for (layer = 0; layer < LAYERS; ++layer) {
    float q[Q_HEADS][DIM], y[Q_HEADS][DIM], lse[Q_HEADS], own[Q_HEADS][DIM], own_lse[Q_HEADS];
    for (i = 0; i < Q_HEADS * DIM; ++i) q[0][i] = noise();
    must(pfx_step(session, (uint32_t)layer, q[0], Q_HEADS * DIM, y[0], Q_HEADS * DIM, lse, Q_HEADS),
         "step");
    for (head = 0; head < Q_HEADS; ++head) {
      attend(layer, head, q[head], STORED, ASKED, own[head], &own_lse[head]);
    }
    pfx_merge_states(own[0], own_lse, y[0], lse, Q_HEADS, DIM); /* the splice */
    for (head = 0; head < Q_HEADS; ++head) {
      float want[DIM], want_lse;
      attend(layer, head, q[head], 0, ASKED, want, &want_lse);
      worst = fmaxf(worst, fabsf(own_lse[head] - want_lse));
      for (d = 0; d < DIM; ++d) worst = fmaxf(worst, fabsf(own[head][d] - want[d]));
    }
  }
  return worst;
}

/* Returns how many own tokens have moved out of memory, once any has; 0 after a minute without. */
static int wait_for_move(pfx_session* session) {
  static const char kMember[] = "\"own_moved\":";
  const time_t begun = time(NULL);
  int moved = 0;
  while (moved == 0 && time(NULL) - begun < 60) {
    char *report, *at;
    must(pfx_session_report(session, &report), "report");
    at = strstr(report, kMember);
    if (at) moved = atoi(at + strlen(kMember));
    pfx_free(report);
  }
  return moved;
}

/* A long answer: the session takes each row, so that an engine need not keep any. It has 256 of
 * them in memory; the oldest move to the store meanwhile, where steps read them as they read the
 * prompt. Returns the largest error against attention over all; *moved: how many moved at the end,
 * when a real engine would still have most of its answer before it. */
static float generate(pfx_store* client, int* moved) {
  pfx_attach_options options = PFX_ATTACH_OPTIONS_INIT;
  pfx_session* session;
  float worst = 0;
  int t, layer, head, d, i;
  options.model = "c-example";
  options.tokens = tokens;
  options.n_tokens = ASKED;
  options.policy_json = "{\"mode\": \"full\"}";
  options.own_memory_tokens = 256;
  must(pfx_attach(client, &options, &session), "attach");
  for (layer = 0; layer < LAYERS; ++layer) { /* the question, in one block */
    must(pfx_session_append(session, (uint32_t)layer, 0, 0, OWN, keys[layer][STORED],
                            OWN * sizeof keys[0][0], values[layer][STORED],
                            OWN * sizeof values[0][0]),
         "append the question");
  }
  for (t = ASKED; t < TOKENS; ++t) {
    if (t == TOKENS - 100) *moved = wait_for_move(session);
    for (layer = 0; layer < LAYERS; ++layer) {
      float q[Q_HEADS][DIM], y[Q_HEADS][DIM], lse[Q_HEADS];
      for (i = 0; i < Q_HEADS * DIM; ++i) q[0][i] = noise();
      must(pfx_step_append(session, (uint32_t)layer, 0, 0, q[0], Q_HEADS * DIM, keys[layer][t],
                           sizeof keys[0][0], values[layer][t], sizeof values[0][0], y[0],
                           Q_HEADS * DIM, lse, Q_HEADS),
           "decode");
      for (head = 0; head < Q_HEADS && t % 50 == 0; ++head) {
        float want[DIM], want_lse;
        attend(layer, head, q[head], 0, t + 1, want, &want_lse);
        worst = fmaxf(worst, fabsf(lse[head] - want_lse));
        for (d = 0; d < DIM; ++d) worst = fmaxf(worst, fabsf(y[head][d] - want[d]));
      }
    }
  }
  must(pfx_session_detach(session, NULL), "detach"); /* own tokens end with the session */
  pfx_session_free(session);
  return worst;
}

int main(int argc, char** argv) {
  pfx_store* client;
  pfx_session* session;
  pfx_attach_options options = PFX_ATTACH_OPTIONS_INIT;
  pfx_session_shape shape = PFX_SESSION_SHAPE_INIT;
  char* report;
  float exact, sparse, generated;
  int i, layer, moved;
  if (argc != 2) {
    fprintf(stderr, "usage: %s DIR | unix:/path | tcp:host:port\n", argv[0]);
    return 2;
  }
  srand(7);
  for (i = 0; i < TOKENS; ++i) tokens[i] = (uint32_t)rand() % 32000;
  for (layer = 0; layer < LAYERS; ++layer) {
    for (i = 0; i < TOKENS * KV_HEADS * DIM; ++i) {
      keys[layer][0][0][i] = noise();
      values[layer][0][0][i] = noise();
    }
  }
  printf("prefixd %s\n", pfx_version());
  store_prompt(argv[1]);

  client = open_client(argv[1]);
  options.model = "c-example";
  options.tokens = tokens; /* the new prompt: the stored one and a question after it */
  options.n_tokens = ASKED;
  options.policy_json = "{\"mode\": \"full\"}";
  must(pfx_attach(client, &options, &session), "attach");
  must(pfx_session_get_shape(session, &shape), "shape");
  printf("attached to %u of %d tokens\n", shape.n_tokens, ASKED);
  exact = decode(session);
  must(pfx_session_set_policy(session, "{\"k\": 100, \"estimator\": \"moment\"}"),
       "set the policy");
  sparse = decode(session);
  printf("largest error: everything read %.2g, 120 of %d tokens read %.2g\n", (double)exact, STORED,
         (double)sparse);
  must(pfx_session_detach(session, &report), "detach");
  printf("report: %.60s...\n", report);
  pfx_free(report);
  pfx_session_free(session);
  generated = generate(client, &moved);
  printf("an answer of %d tokens: largest error %.2g, %d of them moved out of memory\n",
         TOKENS - ASKED, (double)generated, moved);
  pfx_store_close(client);
  if (shape.n_tokens != STORED || exact > 1e-4f || generated > 1e-4f || moved <= 0 ||
      !(sparse < 1.0f)) {
    fprintf(stderr, "the spliced states are not those of attention over the whole cache\n");
    return 1;
  }
  return 0;
}
