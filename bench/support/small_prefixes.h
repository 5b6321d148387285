// Makes many small prefixes for one small model: what a store does when there are many is then seen
// apart from what rows cost.
//
// Thread-safety: const methods may be called concurrently.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "prefixd/store.h"

namespace prefixd::bench {

class SmallPrefixes {
 public:
  // All begin with the same tokens, as prompts do: what begins a text, and the head of a chat.
  static constexpr uint32_t kAlike = 4;

  // Each of `tokens` tokens, more than kAlike; prefix i is the same in every run.
  explicit SmallPrefixes(uint32_t tokens) : n_(tokens) {
    model_.name = "small";
    model_.geometry = {1, 1, 1, 16, 16, DType::kBf16, {}};
    model_.geometry.layers.assign(1, {0.25f, 0, 0});
    model_.identity = {{"weights", "small"}};
    policy_.k = 8;
    policy_.estimator = EstimatorKind::kMoment;
    policy_.selector = "exact";
  }

  uint32_t tokens_each() const { return n_; }
  const ModelSpec& model() const { return model_; }

  std::vector<uint32_t> Tokens(uint32_t prefix) const {
    std::mt19937 rng(prefix + 1);
    std::vector<uint32_t> tokens(n_);
    for (uint32_t i = 0; i < n_; ++i) tokens[i] = i < kAlike ? i + 1 : rng() % 100000;
    return tokens;
  }

  // Puts the prefix unless it is stored, and returns its id.
  Result<std::string> Put(Store& store, uint32_t prefix) const {
    PREFIXD_ASSIGN(const auto put, store.BeginPut({model_.name, "", Tokens(prefix), "bench"}));
    if (put->missing().size() > 0) {
      std::vector<std::byte> rows(size_t{n_} * model_.geometry.key_dim * 2);
      std::mt19937 rng(prefix);
      for (size_t b = 0; b < rows.size(); b += 2) {  // bf16 in [1, 2)
        rows[b] = std::byte(rng()), rows[b + 1] = std::byte{0x3f};
      }
      PREFIXD_TRY(put->Write(0, 0, n_, rows, rows));
    }
    PREFIXD_ASSIGN(const PutResult stored, put->Commit());
    return stored.prefix;
  }

  // `tokens` are Tokens(i), made before the clock runs.
  Status Match(Store& store, const std::vector<uint32_t>& tokens) const {
    PREFIXD_ASSIGN(const PrefixMatch match, store.Match({.model = model_.name, .tokens = tokens}));
    if (match.n_tokens == n_) return {};
    return Error{Code::kInternal, "a stored prefix does not match"};
  }

  // The same of a prefix that nobody stored: no more than a beginning is found.
  Status Miss(Store& store, const std::vector<uint32_t>& tokens) const {
    PREFIXD_ASSIGN(const PrefixMatch match, store.Match({.model = model_.name, .tokens = tokens}));
    if (match.n_tokens < n_) return {};
    return Error{Code::kInternal, "a prefix that nobody stored matches"};
  }

  Result<std::shared_ptr<Session>> Attach(Store& store, const std::string& id) const {
    AttachSpec spec;
    spec.model = model_.name;
    spec.prefix = id;
    spec.policy = policy_;
    return store.Attach(spec);
  }

 private:
  uint32_t n_;
  ModelSpec model_;
  StepPolicy policy_;
};

}  // namespace prefixd::bench
