// Writes files of random scorers, whole or damaged, and scores tokens by their formulas in float64:
// of the memory in its quadratic form, in which every token looks back at every other.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/kv_shape.h"
#include "tensors/safetensors.h"
#include "tests/support/expect_ok.h"
#include "tests/support/test.h"

namespace prefixd::testing {

class ScorersFile {
 public:
  using Row = std::vector<double>;

  ScorersFile(const KvGeometry& geometry, const std::string& scorer, uint64_t seed)
      : metadata{{"format", "prefixd-scorers-v1"},
                 {"scorer", scorer},
                 {"weights", "blake2b:aa"},
                 {"window", "24"}} {
    std::mt19937_64 random(seed);
    for (uint32_t l = 0; l < geometry.n_layers; ++l) {
      const LayerShape shape = geometry.layer(l);
      if (shape.n_kv_heads == 0) continue;
      const uint64_t width = shape.key_dim + shape.value_dim, half = width / 4, hidden = 11;
      std::map<std::string, std::vector<uint64_t>> shapes = {
          {"mean", {1, width}}, {"scale", {1, width}}, {"decay", {}}};
      if (scorer == "kvpop-mlp") {
        shapes.merge(std::map<std::string, std::vector<uint64_t>>{
            {"w1", {width, hidden}}, {"b1", {1, hidden}}, {"w2", {hidden, 1}}, {"b2", {1}}});
      } else {
        for (const char* name : {"wq", "wk", "wv"}) shapes[name] = {width, half};
        for (const char* name : {"wi", "wf"}) shapes[name] = {width, 1};
        for (const char* name : {"bi", "bf", "b"}) shapes[name] = {1};
        shapes["a"] = {half, 1};
      }
      for (auto& [name, of_head] : shapes) {
        of_head.insert(of_head.begin(), shape.n_kv_heads);
        uint64_t elements = 1;
        for (const uint64_t dim : of_head) elements *= dim;
        std::normal_distribution<float> normal(0, name == "b2" || name == "b" ? 5.0f : 0.7f);
        std::vector<float> values(elements);
        for (float& v : values) v = name == "scale" ? std::exp(normal(random)) : normal(random);
        tensors[Name(l, name)] = {of_head, values};
      }
    }
  }

  static std::string Name(uint32_t layer, const std::string& name) {
    return "layers." + std::to_string(layer) + "." + name;
  }

  void Write(const std::filesystem::path& path) const {
    std::vector<TensorToWrite> list;
    for (const auto& [name, entry] : tensors) {
      list.push_back({name, TensorType::kF32, entry.first, std::as_bytes(std::span(entry.second))});
    }
    ASSERT_OK(WriteSafetensors(path, list, metadata));
  }

  // Returns the priorities of all tokens of a head.
  Row Priorities(uint32_t layer, uint32_t head, const RowsView& rows) const {
    const Weights w = Of(layer, head);
    const size_t n = rows.count, window = std::stoul(metadata.at("window"));
    const double low = std::log(0.999), high = std::log(0.999999);
    const double log_decay = low + (high - low) / (1 + std::exp(-w.at("decay")[0]));
    std::vector<Row> x(n);
    for (size_t t = 0; t < n; ++t) x[t] = Input(w, rows, t);
    const Row scores =
        metadata.at("scorer") == "kvpop-mlp" ? MlpScores(w, x) : MemoryScores(w, x, window);
    Row out(n, std::numeric_limits<double>::infinity());
    for (size_t t = 0; t + window < n; ++t) out[t] = scores[t] - static_cast<double>(t) * log_decay;
    return out;
  }

  std::map<std::string, std::string> metadata;
  std::map<std::string, std::pair<std::vector<uint64_t>, std::vector<float>>> tensors;

 private:
  using Weights = std::map<std::string, Row>;

  Weights Of(uint32_t layer, uint32_t head) const {
    Weights out;
    const std::string prefix = Name(layer, "");
    for (const auto& [name, entry] : tensors) {
      if (!name.starts_with(prefix)) continue;
      const auto& [shape, values] = entry;
      const auto part = static_cast<ptrdiff_t>(values.size() / shape[0]);
      const auto begin = values.begin() + head * part;
      out[name.substr(prefix.size())] = Row(begin, begin + part);
    }
    return out;
  }

  static Row Input(const Weights& w, const RowsView& rows, size_t token) {
    std::vector<float> key(rows.shape.key_dim), value(rows.shape.value_dim);
    ToFloat(rows.shape.dtype, rows.key(token), key);
    ToFloat(rows.shape.dtype, rows.value(token), value);
    key.insert(key.end(), value.begin(), value.end());
    Row x(key.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = (key[i] - w.at("mean")[i]) / w.at("scale")[i];
    return x;
  }
  // x w, for w [x.size(), columns].
  static Row Times(const Row& x, const Row& w) {
    Row out(w.size() / x.size());
    for (size_t j = 0; j < out.size(); ++j) {
      for (size_t i = 0; i < x.size(); ++i) out[j] += x[i] * w[i * out.size() + j];
    }
    return out;
  }
  static double Silu(double x) { return x / (1 + std::exp(-x)); }
  static Row Features(const Row& x) {
    Row out;
    for (const double sign : {1.0, -1.0}) {
      double sum = 0;
      for (const double v : x) sum += std::exp(sign * v);
      for (const double v : x) out.push_back(std::exp(sign * v) / sum);
    }
    return out;
  }

  static Row MlpScores(const Weights& w, const std::vector<Row>& x) {
    Row out;
    for (const Row& input : x) {
      const Row h = Times(input, w.at("w1"));
      double score = w.at("b2")[0];
      for (size_t j = 0; j < h.size(); ++j) score += w.at("w2")[j] * Silu(h[j] + w.at("b1")[j]);
      out.push_back(score);
    }
    return out;
  }

  // Asks for each token once the `window` tokens behind it are read.
  static Row MemoryScores(const Weights& w, const std::vector<Row>& x, size_t window) {
    std::vector<Row> q, k, v;
    Row log_i, log_f;
    for (const Row& input : x) {
      q.push_back(Features(Times(input, w.at("wq"))));
      k.push_back(Features(Times(input, w.at("wk"))));
      v.push_back(Times(input, w.at("wv")));
      log_i.push_back(Times(input, w.at("wi"))[0] + w.at("bi")[0]);
      log_f.push_back(-std::log1p(std::exp(-Times(input, w.at("wf"))[0] - w.at("bf")[0])));
    }
    const Row& a = w.at("a");
    Row out;
    for (size_t asked = 0; asked + window < x.size(); ++asked) {
      Row above(a.size());
      double below = 0, forgot = 0;
      for (size_t t = asked + window + 1; t-- > 0; forgot += log_f[t]) {
        const double weight =
            std::exp(log_i[t] + forgot) *
            std::inner_product(q[asked].begin(), q[asked].end(), k[t].begin(), 0.0);
        for (size_t j = 0; j < above.size(); ++j) above[j] += weight * v[t][j];
        below += weight;
      }
      double score = w.at("b")[0];
      for (size_t j = 0; j < above.size(); ++j) score += a[j] * Silu(above[j] / below);
      out.push_back(score);
    }
    return out;
  }
};

}  // namespace prefixd::testing
