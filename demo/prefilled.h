// A prompt's keys, values and queries, computed once and kept, to be put more than once.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "decoder/attention/local_attention.h"
#include "decoder/model/model.h"
#include "demo/events.h"
#include "prefixd/client.h"

namespace prefixd::demo {

class Prefilled {
 public:
  // Prefills cold. `prompt`: token ids, kept. `model` is not used afterwards. `progress` names the
  // work for whoever watches.
  static Result<Prefilled> Compute(const decoder::Model& model, const KvGeometry& geometry,
                                   std::vector<uint32_t> prompt, const char* progress);

  // Stores the prompt under the registered model, with the queries that a put keeps a sample of;
  // durable when it returns.
  Result<PutResult> Put(Store& store, const std::string& model, const std::string& label) const;

  // Goes on from the prompt; whoever does cuts it to the prompt again.
  decoder::LocalAttention& attention() { return attention_; }

 private:
  Prefilled(const KvGeometry& geometry, std::vector<uint32_t> prompt);

  std::vector<uint32_t> prompt_;
  decoder::LocalAttention attention_;
  uint32_t first_query_;                     // earlier tokens' queries are not kept
  std::vector<std::vector<float>> queries_;  // of each layer, [n][n_q_heads][key_dim]
};

}  // namespace prefixd::demo
