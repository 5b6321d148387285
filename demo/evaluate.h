// Measures one method of reading the stored prompt: answers, likelihood, output error, reads, time.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "decoder/attention/spliced_attention.h"
#include "decoder/model/model.h"
#include "demo/request.h"
#include "prefixd/estimator_variant.h"
#include "prefixd/policy.h"
#include "prefixd/result.h"

namespace prefixd::demo {

struct Method {
  std::string name;  // as in report.json: "full", "sink_tail", "topk", "topk_phi", ...
  StepMode mode = StepMode::kRetrieve;
  EstimatorVariant estimator = EstimatorKind::kNone;
};
const std::vector<Method>& Methods();
// kInvalidArgument: no method has this name.
Result<StepPolicy> PolicyOf(const Reading& reading);

struct Row {
  Reading reading;
  bool feasible = true;
  std::string reason;                      // why the budget is not feasible
  double nll = 0;                          // nats per token of the held-out continuation
  double rel_l1 = 0;                       // mean over heads and queries
  std::vector<double> rel_l1_by_head;      // [n_layers * n_q_heads]
  std::vector<double> rel_l1_by_quartile;  // [4], heads by entropy
  double tokens_per_step = 0;              // token-equivalents per KV head, summary included
  uint32_t k = 0;
  // Physical bytes per generated token, over all layers and heads.
  double bytes_per_step = 0, ssd_bytes_per_step = 0, host_bytes_per_step = 0;
  double scan_bytes_per_step = 0;
  double ms_per_token = 0;
};

// Decodes over one session and compares the results with the truth.
class Evaluator {
 public:
  Evaluator(const decoder::Model& model, const Request& request, std::shared_ptr<Session> session);

  // Reads everything: records queries, true outputs and head entropies.
  Status RecordTruth();

  Result<Row> Run(const Reading& reading);

  // Decodes the continuation's first tokens with teacher forcing, under the session's policy.
  struct Continuation {
    double nll = 0;  // per token
    double ms_per_token = 0;
    // Physical bytes per token.
    double ssd_bytes = 0, host_bytes = 0, scan_bytes = 0;
    double tokens = 0;            // token-equivalents per layer step and KV head, as accounted
    double retrieved_tokens = 0;  // the part of them that was retrieved
  };
  Result<Continuation> Continue(size_t max_tokens);

  struct Timing {
    double load_ms = 0, compute_ms = 0, select_ms = 0;  // per generated token
  };
  // Times the attention of the recorded queries at a fixed K with rows in memory, for the
  // break-even map.
  Result<Timing> TimeAtK(const EstimatorVariant& estimator, uint32_t k);

  const std::vector<double>& entropy() const { return entropy_; }  // [n_layers * n_q_heads]

 private:
  struct Recorded {  // one recorded token: [n_layers] of [n_q_heads * dim]
    std::vector<std::vector<float>> q, y;
  };

  // Returns the mean relative l1 error per head over the recorded queries, under the session's
  // policy.
  Result<std::vector<double>> Errors();
  Status MeasureEntropy();
  std::vector<double> ByQuartile(const std::vector<double>& errors) const;

  const decoder::Model& model_;
  const Request& request_;
  std::shared_ptr<Session> session_;
  decoder::SplicedAttention attention_;
  std::vector<Recorded> recorded_;
  std::vector<double> entropy_;
};

}  // namespace prefixd::demo
