#include "prefixctl/commands/prefix_file.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "prefixctl/commands/commands.h"
#include "protocol/codec.h"
#include "protocol/json_text.h"
#include "tensors/safetensors.h"

namespace prefixd::ctl {
namespace {

constexpr const char* kFormat = "prefixd-prefix-v1";
// Files with derived rows have a format of their own, so that nobody takes them for exact.
constexpr const char* kDerivedFormat = "prefixd-prefix-v2";
constexpr const char* kExactTokens = "exact_tokens";
constexpr const char* kTokens = "tokens";
constexpr uint32_t kTokensAtATime = 4096;
constexpr size_t kMaxLabelBytes = 4096;  // the store's limit

std::string LayerName(uint32_t layer, char part) {
  return "layers." + std::to_string(layer) + "." + part;
}

// A label may be any bytes, but a header is UTF-8. The replacement of a byte is longer than the
// byte, so a label that then exceeds the limit is cut where a character begins.
std::string AsUtf8(const std::string& label) {
  const auto json = wire::Json::parse(
      wire::Json(label).dump(-1, ' ', false, wire::Json::error_handler_t::replace));
  std::string text = json.get<std::string>();
  size_t end = std::min(text.size(), kMaxLabelBytes);
  while (end < text.size() && end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80)
    --end;
  text.resize(end);
  return text;
}

// Returns the tensors that a file of n tokens under this geometry holds.
std::vector<TensorInfo> TensorsOf(const KvGeometry& g, uint64_t n) {
  std::vector<TensorInfo> tensors;
  const auto add = [&](std::string name, TensorType type, std::vector<uint64_t> shape) {
    TensorInfo& info = tensors.emplace_back();
    info.name = std::move(name), info.type = type, info.shape = std::move(shape);
  };
  add(kTokens, TensorType::kU32, {n});
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    if (!g.layers[layer].stored) continue;
    const LayerShape own = g.layer(layer);
    add(LayerName(layer, 'k'), TensorTypeOf(g.dtype), {n, own.n_kv_heads, own.key_dim});
    add(LayerName(layer, 'v'), TensorTypeOf(g.dtype), {n, own.n_kv_heads, own.value_dim});
  }
  return tensors;
}

// Returns the model of the file, checked against the tensors that are there.
Result<ModelSpec> ModelOf(const SafetensorsFile& file) {
  const std::string path = file.path().string();
  const auto& metadata = file.metadata();
  const auto format = metadata.find("format"), model = metadata.find("model");
  const bool known =
      format != metadata.end() && (format->second == kFormat || format->second == kDerivedFormat);
  if (!known || model == metadata.end()) {
    return InvalidArgument(path + " is no exported prefix: its metadata does not say format '" +
                           kFormat + "'; `prefixctl prefixes export` writes such files");
  }
  PREFIXD_ASSIGN(ModelSpec spec, wire::FromText<ModelSpec>(model->second, path + ": model"));
  if (Status valid = spec.geometry.Validate(); !valid.ok()) {
    return InvalidArgument(path + ": " + valid.error().message);
  }
  spec.feature_maps.clear();  // their paths are another machine's
  const TensorInfo* tokens = file.Find(kTokens);
  if (!tokens || tokens->shape.size() != 1 || tokens->elements > UINT32_MAX) {
    return InvalidArgument(path + ": has no tensor 'tokens' of one dimension");
  }
  const auto wanted = TensorsOf(spec.geometry, tokens->elements);
  for (const TensorInfo& want : wanted) {
    const TensorInfo* have = file.Find(want.name);
    if (!have) return InvalidArgument(path + ": has no tensor " + QuoteName(want.name));
    if (have->type != want.type || have->shape != want.shape) {
      return InvalidArgument(path + ": tensor " + QuoteName(want.name) + " is " +
                             std::string(TensorTypeName(have->type)) + " " +
                             ShapeString(have->shape) + "; its model's are " +
                             std::string(TensorTypeName(want.type)) + " " +
                             ShapeString(want.shape));
    }
  }
  if (file.tensors().size() != wanted.size()) {
    return InvalidArgument(path + ": has more tensors than its model has layers");
  }
  return spec;
}

// Registers the file's model, or checks that the store's model of that name is the same.
Status MatchModel(Store& client, const ModelSpec& spec, const std::string& path) {
  const auto known = client.Model(spec.name);
  if (!known.ok() && known.error().code == Code::kNotFound) return client.RegisterModel(spec);
  if (!known.ok()) return known.error();
  if (known->geometry == spec.geometry && known->identity == spec.identity) return {};
  return Error{Code::kAlreadyExists,
               path + " is of a model '" + spec.name +
                   "' with another geometry or identity than the one registered here; rows of one "
                   "model are wrong under another"};
}

}  // namespace

Result<PrefixFile> ExportPrefix(Store& client, const std::string& prefix,
                                const std::filesystem::path& path, const ProgressFn& progress) {
  PREFIXD_ASSIGN(const PrefixDetail detail, client.Prefix(prefix));
  PREFIXD_ASSIGN(ModelSpec spec, client.Model(detail.summary.model));
  spec.feature_maps.clear();
  AttachSpec attach;
  attach.model = spec.name;
  attach.tenant = detail.summary.tenant;
  attach.prefix = prefix;
  attach.accept_approximate = true;         // the file says so
  attach.policy.mode = StepMode::kAnchors;  // the cheapest mode, as the session makes no step
  PREFIXD_ASSIGN(const std::shared_ptr<Session> session, client.Attach(attach));
  const KvGeometry& geometry = session->info().geometry;
  const uint32_t n = session->info().n_tokens;

  std::map<std::string, std::string> metadata = {
      {"format", kFormat}, {"model", wire::ToText(spec)}, {"label", AsUtf8(detail.summary.label)}};
  if (session->info().exact_tokens < n) {
    metadata["format"] = kDerivedFormat;
    metadata[kExactTokens] = std::to_string(session->info().exact_tokens);
  }
  PREFIXD_ASSIGN(auto writer,
                 SafetensorsWriter::Create(path, TensorsOf(geometry, n), metadata, 0600));
  std::vector<uint32_t> tokens(n);
  PREFIXD_TRY(session->ReadTokens({0, n}, tokens));
  PREFIXD_TRY(writer.Write(kTokens, 0, std::as_bytes(std::span(tokens))));
  PrefixFile out{prefix, spec.name, detail.summary.label, n, tokens.size() * sizeof(uint32_t)};

  RestoreOptions options;
  options.progress = progress;
  PREFIXD_ASSIGN(const auto restore, Restore::Begin(session, options));
  while (true) {
    Result<std::optional<RestoredRun>> next = restore->Next();
    if (!next.ok() && next.error().code == Code::kCancelled) {
      return Error{Code::kCancelled,
                   "the export was stopped; " + path.string() + " was not written"};
    }
    PREFIXD_ASSIGN(const std::optional<RestoredRun> run, std::move(next));
    if (!run) break;
    const LayerShape own = geometry.layer(run->layer);
    const uint64_t k_token = own.n_kv_heads * own.row().key_bytes();
    const uint64_t v_token = own.n_kv_heads * own.row().value_bytes();
    PREFIXD_TRY(writer.Write(LayerName(run->layer, 'k'), run->tokens.begin * k_token, run->k));
    PREFIXD_TRY(writer.Write(LayerName(run->layer, 'v'), run->tokens.begin * v_token, run->v));
    out.bytes += run->k.size() + run->v.size();
  }
  PREFIXD_TRY(writer.Commit());
  return out;
}

Result<PutResult> PutPrefixFile(Store& client, const std::filesystem::path& path,
                                const ProgressFn& progress) {
  const auto opened = SafetensorsFile::Open(path);
  if (!opened.ok()) return OfLocalFile(opened.error());
  const SafetensorsFile& file = *opened;
  PREFIXD_ASSIGN(const ModelSpec model, ModelOf(file));
  PREFIXD_TRY(MatchModel(client, model, path.string()));
  PutSpec spec;
  spec.model = model.name;
  if (const auto label = file.metadata().find("label"); label != file.metadata().end()) {
    spec.label = label->second;
  }
  // Tokens of the file's exact part that are not stored here yet are stored as derived, too.
  spec.derived = file.metadata().find("format")->second == kDerivedFormat;
  const auto ids = file.Bytes(*file.Find(kTokens));
  spec.tokens.resize(ids.size() / sizeof(uint32_t));
  if (!ids.empty()) std::memcpy(spec.tokens.data(), ids.data(), ids.size());
  PREFIXD_ASSIGN(const auto put, client.BeginPut(spec));

  const KvGeometry& geometry = model.geometry;
  const TokenRange missing = put->missing();
  const uint64_t total = missing.size() * geometry.token_bytes();
  uint64_t done = 0;
  for (uint32_t layer = 0; layer < geometry.n_layers; ++layer) {
    if (!geometry.layers[layer].stored) continue;
    const LayerShape own = geometry.layer(layer);
    const uint64_t k_token = own.n_kv_heads * own.row().key_bytes();
    const uint64_t v_token = own.n_kv_heads * own.row().value_bytes();
    const auto k = file.Bytes(*file.Find(LayerName(layer, 'k')));
    const auto v = file.Bytes(*file.Find(LayerName(layer, 'v')));
    for (uint32_t at = missing.begin, n = 0; at < missing.end; at += n) {
      n = std::min(kTokensAtATime, missing.end - at);
      PREFIXD_TRY(put->Write(layer, at, n, k.subspan(at * k_token, n * k_token),
                             v.subspan(at * v_token, n * v_token)));
      done += n * (k_token + v_token);
      if (progress && !progress(done, total, "bytes")) {
        return Error{Code::kCancelled, "the put was stopped by the caller"};
      }
    }
  }
  return put->Commit();
}

}  // namespace prefixd::ctl
