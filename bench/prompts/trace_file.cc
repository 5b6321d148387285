#include "bench/prompts/trace_file.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "tensors/safetensors.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

class Reader {
 public:
  explicit Reader(const SafetensorsFile& file) : file_(file) {}

  Result<RetrievalTrace> Read(uint32_t most_steps) {
    const auto format = file_.metadata().find("format");
    if (format == file_.metadata().end() || format->second != kTraceFormat) {
      return InvalidArgument(file_.path().string() + " is no trace of python -m prefixd.trace (" +
                             kTraceFormat + ")");
    }
    PREFIXD_TRY(ReadGeometry());
    PREFIXD_ASSIGN(trace_.tokens, Integers("tokens"));
    PREFIXD_ASSIGN(trace_.sampled_at, Integers("sampled_at"));
    PREFIXD_ASSIGN(const std::vector<uint32_t> steps, Integers("step_tokens"));
    trace_.n_tokens = static_cast<uint32_t>(trace_.tokens.size());
    trace_.mid = Partition::Of(trace_.n_tokens, Anchors{}).mid;
    const auto inside = [&](uint32_t at) { return at < trace_.n_tokens; };
    if (trace_.mid.size() == 0 || steps.empty() ||
        !std::ranges::all_of(trace_.sampled_at, inside)) {
      return Wrong("its prompt, steps or samples are too few");
    }
    const std::vector<size_t> chosen = Chosen(steps.size(), most_steps);
    for (uint32_t l = 0; l < trace_.geometry.n_layers; ++l) {
      PREFIXD_TRY(ReadLayer(l, steps.size(), chosen));
    }
    return std::move(trace_);
  }

 private:
  Error Wrong(const std::string& why) const {
    return InvalidArgument(file_.path().string() + ": " + why);
  }

  // The dimensions are those of layer 0's tensors; the others must have the same.
  Status ReadGeometry() {
    KvGeometry& g = trace_.geometry;
    const auto text = file_.metadata().find("layers");
    const json layers =
        text == file_.metadata().end() ? json() : json::parse(text->second, nullptr, false);
    const auto number = [](const json& layer, const char* name) {
      return layer.is_object() && layer.contains(name) && layer[name].is_number();
    };
    if (!layers.is_array() || layers.empty()) return Wrong("its metadata name no layers");
    for (const json& layer : layers) {
      if (!number(layer, "scale") || !number(layer, "softcap"))
        return Wrong("a layer has no scale");
      g.layers.push_back(
          {.scale = layer["scale"].get<float>(), .softcap = layer["softcap"].get<float>()});
    }
    const TensorInfo* k = file_.Find("layers.0.k");
    const TensorInfo* v = file_.Find("layers.0.v");
    const TensorInfo* q = file_.Find("layers.0.steps");
    if (!k || !v || !q || k->shape.size() != 3 || v->shape.size() != 3 || q->shape.size() != 3) {
      return Wrong("layer 0 is not there");
    }
    g.n_layers = static_cast<uint32_t>(g.layers.size());
    g.n_kv_heads = static_cast<uint32_t>(k->shape[0]);
    g.n_q_heads = static_cast<uint32_t>(q->shape[1]);
    g.key_dim = static_cast<uint32_t>(k->shape[2]);
    g.value_dim = static_cast<uint32_t>(v->shape[2]);
    g.dtype = DType::kBf16;
    return g.Validate();
  }

  Result<std::vector<uint32_t>> Integers(const std::string& name) const {
    const TensorInfo* info = file_.Find(name);
    if (!info || info->type != TensorType::kI32 || info->shape.size() != 1)
      return Wrong(name + " is not there");
    const auto bytes = file_.Bytes(*info);
    std::vector<uint32_t> out(bytes.size() / sizeof(uint32_t));
    std::memcpy(out.data(), bytes.data(), out.size() * sizeof(uint32_t));
    return out;
  }

  // Returns which of n steps are taken.
  static std::vector<size_t> Chosen(size_t n, size_t most) {
    std::vector<size_t> chosen;
    const size_t wanted = std::min(n, most), runs = (wanted + kTraceRun - 1) / kTraceRun;
    for (size_t run = 0; run < runs; ++run) {
      const size_t begin = wanted == n ? run * kTraceRun : run * n / runs;
      const size_t end = run + 1 < runs ? begin + kTraceRun : begin + (wanted - run * kTraceRun);
      for (size_t s = begin; s < std::min(n, end); ++s) chosen.push_back(s);
    }
    return chosen;
  }

  Status ReadLayer(uint32_t layer, size_t n_steps, const std::vector<size_t>& chosen) {
    const KvGeometry& g = trace_.geometry;
    const std::string name = "layers." + std::to_string(layer) + ".";
    const uint64_t n = trace_.n_tokens, samples = trace_.sampled_at.size();
    const std::vector<uint64_t> k_shape = {g.n_kv_heads, n, g.key_dim};
    const std::vector<uint64_t> v_shape = {g.n_kv_heads, n, g.value_dim};
    const std::vector<uint64_t> sample_shape = {samples, g.n_q_heads, g.key_dim};
    const std::vector<uint64_t> step_shape = {n_steps, g.n_q_heads, g.key_dim};
    PREFIXD_ASSIGN(const std::vector<float> k, file_.ReadFloats(name + "k", k_shape));
    PREFIXD_ASSIGN(const std::vector<float> v, file_.ReadFloats(name + "v", v_shape));
    PREFIXD_ASSIGN(const std::vector<float> sampled,
                   file_.ReadFloats(name + "samples", sample_shape));
    PREFIXD_ASSIGN(const std::vector<float> steps, file_.ReadFloats(name + "steps", step_shape));
    const size_t token = size_t{g.n_q_heads} * g.key_dim,
                 group = size_t{g.group_size(layer)} * g.key_dim;
    for (uint32_t h = 0; h < g.n_kv_heads; ++h) {
      RetrievalTrace::Head& head = trace_.heads.emplace_back();
      const auto part = [](const std::vector<float>& all, size_t begin, size_t size) {
        return std::span(all).subspan(begin, size);
      };
      const auto append = [](std::vector<float>& to, std::span<const float> from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(head.keys, part(k, h * n * g.key_dim, n * g.key_dim));
      append(head.values, part(v, h * n * g.value_dim, n * g.value_dim));
      for (size_t s = 0; s < samples; ++s) {
        append(head.sample_queries, part(sampled, s * token + h * group, group));
      }
      for (const size_t s : chosen) {
        append(head.step_queries, part(steps, s * token + h * group, group));
      }
    }
    return {};
  }

  const SafetensorsFile& file_;
  RetrievalTrace trace_;
};

}  // namespace

Result<RetrievalTrace> ReadTraceFile(const std::filesystem::path& path, uint32_t steps) {
  PREFIXD_ASSIGN(const SafetensorsFile file, SafetensorsFile::Open(path));
  return Reader(file).Read(steps);
}

}  // namespace prefixd::bench
