#include "bench/prompts/retrieval_trace.h"

#include <algorithm>
#include <cmath>

#include "bench/prompts/trace_file.h"
#include "decoder/attention/local_attention.h"
#include "decoder/checkpoint/tokenizer.h"
#include "decoder/model/model.h"
#include "demo/document.h"
#include "index/search/key_index.h"
#include "runtime/derived/query_samples.h"
#include "runtime/work/thread_pool.h"

namespace prefixd::bench {
namespace {

constexpr uint32_t kRoomForQuestions = 64;

class Capture {
 public:
  Capture(const TraceOptions& options, const decoder::Model& model)
      : options_(options), model_(model), local_(model.Geometry(DType::kBf16)) {
    trace_.geometry = model.Geometry(DType::kBf16);
  }

  Result<RetrievalTrace> Run(const demo::Document& document,
                             const decoder::ByteTokenizer& tokenizer) {
    const std::vector<uint32_t> prompt = tokenizer.Encode(document.prompt, /*with_bos=*/true);
    PREFIXD_TRY(Prefill(prompt));
    // Half of the steps continue the text, the other half answer questions about facts.
    const std::vector<uint32_t> text = tokenizer.Encode(document.continuation, false);
    PREFIXD_TRY(Decode(std::span(text).first(std::min<size_t>(options_.steps / 2, text.size()))));
    for (const demo::Fact& fact : document.facts) {
      const uint32_t done = Steps();
      if (done == options_.steps) break;
      const auto question = tokenizer.Encode(fact.Question() + fact.answer, false);
      // Retrieval serves the answer's digits, so only the last 8 tokens of each question are
      // recorded.
      const size_t counted = std::min<size_t>(8, options_.steps - done);
      PREFIXD_TRY(Decode(question, question.size() - counted));
    }
    return std::move(trace_);
  }

 private:
  uint32_t Steps() const {
    const size_t floats = size_t{trace_.geometry.group_size(0)} * trace_.geometry.key_dim;
    return static_cast<uint32_t>(trace_.heads[0].step_queries.size() / floats);
  }

  Status Prefill(const std::vector<uint32_t>& prompt) {
    const KvGeometry& g = trace_.geometry;
    const auto n = static_cast<uint32_t>(prompt.size());
    trace_.n_tokens = n;
    trace_.tokens = prompt;
    trace_.mid = Partition::Of(n, Anchors{}).mid;
    trace_.heads.resize(size_t{g.n_layers} * g.n_kv_heads);
    QueryReservoir reservoir(g, n, options_.query_samples);
    decoder::ObservedAttention observed(
        local_, [&](uint32_t layer, uint32_t first, uint32_t count, std::span<const float> q) {
          reservoir.Add(layer, first, count, q);
        });
    PREFIXD_TRY(model_.Forward(prompt, 0, observed, 0, {}));
    const QuerySamples samples = reservoir.Take();
    for (size_t i = 0; i < trace_.heads.size(); ++i) {
      RetrievalTrace::Head& head = trace_.heads[i];
      const auto layer = static_cast<uint32_t>(i / g.n_kv_heads);
      const auto kv_head = static_cast<uint32_t>(i % g.n_kv_heads);
      const auto keys = local_.cache().keys(layer, kv_head);
      head.keys.assign(keys.begin(), keys.end());
      const auto values = local_.cache().values(layer, kv_head);
      head.values.assign(values.begin(), values.end());
      const size_t token = size_t{g.n_q_heads} * g.key_dim;
      const size_t group = size_t{g.group_size(0)} * g.key_dim;
      const std::vector<float>& q = samples.layers[layer].q;
      for (size_t at = kv_head * group; at < q.size(); at += token) {
        head.sample_queries.insert(head.sample_queries.end(), q.begin() + ptrdiff_t(at),
                                   q.begin() + ptrdiff_t(at + group));
      }
    }
    trace_.sampled_at = samples.layers[0].positions;
    return {};
  }

  // Runs `tokens` one by one after the prompt and removes them again; records steps from number
  // `counted_from` on.
  Status Decode(std::span<const uint32_t> tokens, size_t counted_from = 0) {
    size_t step = 0;
    decoder::ObservedAttention observed(
        local_, [&](uint32_t layer, uint32_t, uint32_t, std::span<const float> q) {
          if (step >= counted_from) Record(layer, q);
        });
    for (; step < tokens.size(); ++step) {
      const auto at = trace_.n_tokens + static_cast<uint32_t>(step);
      PREFIXD_TRY(model_.Forward({&tokens[step], 1}, at, observed, 0, {}));
    }
    local_.TruncateTo(trace_.n_tokens);
    return {};
  }

  // Records q, [n_q_heads][key_dim] of one token.
  void Record(uint32_t layer, std::span<const float> q) {
    const KvGeometry& g = trace_.geometry;
    const size_t group = size_t{g.group_size(0)} * g.key_dim;
    for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
      const auto own = q.subspan(h * group, group);
      auto& queries = trace_.heads[size_t{layer} * g.n_kv_heads + h].step_queries;
      queries.insert(queries.end(), own.begin(), own.end());
    }
  }

  const TraceOptions& options_;
  const decoder::Model& model_;
  decoder::LocalAttention local_;
  RetrievalTrace trace_;
};

Result<RetrievalTrace> CaptureTrace(const TraceOptions& options) {
  PREFIXD_ASSIGN(const decoder::Model model, decoder::Model::Load(options.model_dir, {}));
  PREFIXD_ASSIGN(const auto tokenizer, decoder::ByteTokenizer::For(model.config()));
  demo::DocumentOptions from;
  from.file = options.document;
  // The BOS takes one token.
  from.prompt_tokens =
      std::min(options.prompt_tokens, model.config().max_positions - kRoomForQuestions) - 1;
  from.continuation_tokens = std::max(2u, options.steps / 2);
  PREFIXD_ASSIGN(const demo::Document document, demo::LoadDocument(from));
  return Capture(options, model).Run(document, tokenizer);
}

// Finds the exact Top-K of each step of a head.
Status FindSets(const RetrievalTrace& trace, std::span<const double> fractions, size_t index,
                RetrievalTrace::Head& head) {
  const KvGeometry& g = trace.geometry;
  const auto layer = static_cast<uint32_t>(index / g.n_kv_heads);
  const auto exact = index::MakeExactIndex(trace.mid);
  const size_t floats = size_t{g.group_size(layer)} * g.key_dim;
  head.sets.resize(fractions.size());
  index::SearchRequest request;
  request.group = g.group_size(layer);
  request.layer = g.layers[layer];
  request.candidates = trace.mid;
  request.keys = {reinterpret_cast<const std::byte*>(head.keys.data()), trace.n_tokens,
                  g.key_dim * sizeof(float), RowShape{g.key_dim, 0, DType::kF32}};
  for (size_t at = 0; at < head.step_queries.size(); at += floats) {
    request.queries = std::span(head.step_queries).subspan(at, floats);
    for (size_t f = 0; f < fractions.size(); ++f) {
      request.k = static_cast<uint32_t>(std::ceil(fractions[f] * double(trace.mid.size())));
      PREFIXD_ASSIGN(Selection selection, exact->Search(request));
      head.sets[f].push_back(std::move(selection.ids));
    }
  }
  return {};
}

}  // namespace

Result<RetrievalTrace> MakeTrace(const TraceOptions& options) {
  PREFIXD_ASSIGN(RetrievalTrace trace, options.file.empty()
                                           ? CaptureTrace(options)
                                           : ReadTraceFile(options.file, options.steps));
  ThreadPool pool(0);
  PREFIXD_TRY(pool.ParallelFor(trace.heads.size(), [&](size_t i) {
    return FindSets(trace, options.fractions, i, trace.heads[i]);
  }));
  return trace;
}

}  // namespace prefixd::bench
