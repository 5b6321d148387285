#include "runtime/retention/scorer_file.h"

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

#include "prefixd/kv_shape.h"
#include "runtime/derived/trained_for.h"

namespace prefixd {
namespace {

constexpr uint64_t kMaxHidden = 4096;  // for sanity, no tuning knob
// What a sigmoid between 0 and 1 stands for, as logarithms (prefixd/retention/scorers.py).
constexpr double kFastestDecay = 0.999, kSlowestDecay = 0.999999;

// Reads the tensors of one layer, and deals them out to its heads.
class LayerReader {
 public:
  LayerReader(const SafetensorsFile& file, uint32_t layer, uint64_t heads)
      : file_(file), prefix_("layers." + std::to_string(layer) + "."), heads_(heads) {}

  // Sets `member` of each to its part of tensor `name`, of shape [heads, shape...].
  template <typename Of, typename T>
  Status Read(const char* name, std::vector<uint64_t> shape, std::vector<Of>& each,
              T Of::*member) const {
    shape.insert(shape.begin(), heads_);
    PREFIXD_ASSIGN(const std::vector<float> all, file_.ReadFloats(prefix_ + name, shape));
    const size_t part = all.size() / heads_;
    for (size_t h = 0; h < heads_; ++h) {
      if constexpr (std::is_same_v<T, float>) {
        each[h].*member = all[h];
      } else {
        const auto begin = all.begin() + static_cast<ptrdiff_t>(h * part);
        each[h].*member = std::vector<float>(begin, begin + static_cast<ptrdiff_t>(part));
      }
    }
    return {};
  }

  bool has(const char* name) const { return file_.Find(prefix_ + name) != nullptr; }

  // Returns the last dimension of tensor `name`, or something else where it has none.
  uint64_t Width(const char* name) const {
    const TensorInfo* info = file_.Find(prefix_ + name);
    return info == nullptr || info->shape.size() != 3 ? 1 : info->shape[2];
  }

 private:
  const SafetensorsFile& file_;
  const std::string prefix_;
  const uint64_t heads_;
};

struct Common {
  std::vector<float> mean, scale;
  float decay = 0;
};

template <typename W>
void Append(std::vector<Common>& common, std::vector<W>& weights, uint32_t window,
            std::vector<TokenScorer>& out) {
  const double low = std::log(kFastestDecay), high = std::log(kSlowestDecay);
  for (size_t h = 0; h < common.size(); ++h) {
    Common& c = common[h];
    out.push_back({std::move(c.mean), std::move(c.scale),
                   low + (high - low) / (1 + std::exp(-double{c.decay})), window,
                   std::move(weights[h])});
  }
}

Status AppendLayer(const SafetensorsFile& file, uint32_t layer, const LayerShape& shape, bool mlp,
                   uint32_t window, std::vector<TokenScorer>& out) {
  const size_t heads = shape.n_kv_heads;
  const uint64_t width = shape.key_dim + shape.value_dim;
  const LayerReader read(file, layer, heads);
  if (!read.has("mean")) {
    return InvalidArgument("no scorer of layer " + std::to_string(layer) +
                           "; train with --layer-step 1, which makes one of each");
  }
  std::vector<Common> common(heads);
  PREFIXD_TRY(read.Read("mean", {1, width}, common, &Common::mean));
  PREFIXD_TRY(read.Read("scale", {1, width}, common, &Common::scale));
  PREFIXD_TRY(read.Read("decay", {}, common, &Common::decay));
  for (const Common& c : common) {
    if (!std::isfinite(c.decay)) return InvalidArgument("decay holds NaN or infinity");
  }
  if (mlp) {
    std::vector<MlpWeights> w(heads);
    const uint64_t hidden = read.Width("w1");
    if (hidden < 1 || hidden > kMaxHidden) {
      return InvalidArgument("layers." + std::to_string(layer) + ".w1 is " +
                             std::to_string(hidden) + " wide, not 1 to " +
                             std::to_string(kMaxHidden));
    }
    PREFIXD_TRY(read.Read("w1", {width, hidden}, w, &MlpWeights::w1));
    PREFIXD_TRY(read.Read("b1", {1, hidden}, w, &MlpWeights::b1));
    PREFIXD_TRY(read.Read("w2", {hidden, 1}, w, &MlpWeights::w2));
    PREFIXD_TRY(read.Read("b2", {1}, w, &MlpWeights::b2));
    Append(common, w, window, out);
    return {};
  }
  std::vector<MlstmWeights> w(heads);
  const uint64_t half = width / 4;
  PREFIXD_TRY(read.Read("wq", {width, half}, w, &MlstmWeights::wq));
  PREFIXD_TRY(read.Read("wk", {width, half}, w, &MlstmWeights::wk));
  PREFIXD_TRY(read.Read("wv", {width, half}, w, &MlstmWeights::wv));
  PREFIXD_TRY(read.Read("wi", {width, 1}, w, &MlstmWeights::wi));
  PREFIXD_TRY(read.Read("wf", {width, 1}, w, &MlstmWeights::wf));
  PREFIXD_TRY(read.Read("bi", {1}, w, &MlstmWeights::bi));
  PREFIXD_TRY(read.Read("bf", {1}, w, &MlstmWeights::bf));
  PREFIXD_TRY(read.Read("a", {half, 1}, w, &MlstmWeights::a));
  PREFIXD_TRY(read.Read("b", {1}, w, &MlstmWeights::b));
  Append(common, w, window, out);
  return {};
}

}  // namespace

uint64_t ScorerBytes(const SafetensorsFile& file) {
  uint64_t bytes = 0;
  for (const TensorInfo& tensor : file.tensors()) bytes += tensor.elements * sizeof(float);
  return bytes;
}

Result<std::vector<TokenScorer>> LoadScorers(const SafetensorsFile& file, const ModelSpec& spec) {
  const auto refuse = [&](const std::string& what) {
    return InvalidArgument("scorers " + file.path().string() + " do not serve model '" + spec.name +
                           "': " + what + " (python -m prefixd.retention --train makes them)");
  };
  const auto text = [&](const char* key) {
    const auto it = file.metadata().find(key);
    return it == file.metadata().end() ? std::string() : it->second;
  };
  if (text("format") != kScorerFormat) return refuse("not a file of scorers");
  const std::string kind = text("scorer"), tokens = text("window"), weights = text("weights");
  if (kind != "kvpop-mlp" && kind != "kvpop-mlstm") {
    return refuse(QuoteName(kind) + " is no scorer that is known here: kvpop-mlp, kvpop-mlstm");
  }
  uint32_t window = 0;
  const auto [end, error] = std::from_chars(tokens.data(), tokens.data() + tokens.size(), window);
  if (error != std::errc() || end != tokens.data() + tokens.size()) {
    return refuse("metadata 'window' is no number of tokens");
  }
  // What they let go is gone.
  if (weights.empty()) return refuse("the file does not say for which weights they were trained");
  if (const std::string why = TrainedForOthers(spec, weights); !why.empty()) return refuse(why);
  std::vector<TokenScorer> scorers;
  for (uint32_t layer = 0; layer < spec.geometry.n_layers; ++layer) {
    const LayerShape shape = spec.geometry.layer(layer);
    if (shape.n_kv_heads == 0) continue;
    const size_t first = scorers.size();
    const Status read = AppendLayer(file, layer, shape, kind == "kvpop-mlp", window, scorers);
    if (!read.ok()) return refuse(read.error().message);
    for (size_t i = first; i < scorers.size(); ++i) {
      if (const Status valid = scorers[i].Validate(); !valid.ok()) {
        return refuse("layer " + std::to_string(layer) + ": " + valid.error().message);
      }
    }
  }
  return scorers;
}

}  // namespace prefixd
