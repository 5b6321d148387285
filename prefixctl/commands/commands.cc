#include "prefixctl/commands/commands.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "base/every_page.h"
#include "prefixctl/commands/prefix_file.h"
#include "prefixctl/show/output.h"
#include "protocol/codec.h"

namespace prefixd::ctl {

using wire::Json;
using wire::ToJson;

namespace {

std::string Count(uint64_t n) { return std::to_string(n); }

std::string ShapeText(const KvGeometry& g) {
  const auto text = [](const LayerShape& shape) {
    if (shape.n_kv_heads == 0) return std::string("no rows");
    return Count(shape.n_q_heads) + "/" + Count(shape.n_kv_heads) + " heads, dim " +
           Count(shape.key_dim) +
           (shape.value_dim == shape.key_dim ? "" : "/" + Count(shape.value_dim));
  };
  const std::string dtype(DTypeName(g.dtype));
  std::map<std::string, uint32_t> kinds;
  for (uint32_t l = 0; l < g.layers.size(); ++l) ++kinds[text(g.layer(l))];
  if (kinds.size() == 1) {
    return Count(g.n_layers) + " layers, " + kinds.begin()->first + ", " + dtype;
  }
  // "6 layers (4: 8/2 heads, dim 64; 2: no rows), bf16"
  std::string out = Count(g.n_layers) + " layers (";
  for (const auto& [kind, n] : kinds) {
    out += (out.ends_with("(") ? "" : "; ") + Count(n) + ": " + kind;
  }
  return out + "), " + dtype;
}

std::string ErrorText(double error) {
  if (std::isnan(error)) return "-";
  char text[32];
  std::snprintf(text, sizeof(text), "%.4f", error);
  return text;
}

// "int8, keys off by 0.0061 (at most 0.0098), values off by ...". Errors are relative to the rows'
// norms.
std::string CompressedText(const PrefixSummary& p) {
  if (p.kept_tokens == 0) return "-";
  return "rows of " + Count(p.kept_tokens) + " of " + Count(p.own_tokens) + " tokens, " +
         Bytes(p.saved_bytes) + " saved";
}

std::string RowsText(RowEncoding encoding, const EncodingError& e) {
  const std::string name(RowEncodingName(encoding));
  if (encoding == RowEncoding::kAsGiven) return name;
  const auto part = [](const char* what, float rms, float max) {
    return std::string(what) + " off by " + ErrorText(double{rms}) + " (at most " +
           ErrorText(double{max}) + ")";
  };
  return name + ", " + part("keys", e.key_rms, e.key_max) + ", " +
         part("values", e.value_rms, e.value_max);
}

// "150 (120 exact)", or "150".
std::string TokensText(const PrefixSummary& p) {
  if (p.exact_tokens >= p.n_tokens) return Count(p.n_tokens);
  return Count(p.n_tokens) + " (" + Count(p.exact_tokens) + " exact)";
}

std::string DerivedText(const PrefixSummary& p) {
  if (p.exact_tokens >= p.n_tokens) return "-";
  return "from token " + Count(p.exact_tokens) + " on, computed behind an approximate step";
}

// "until 2026-01-31 12:00:00, pinned", or "-".
std::string LifetimeText(const PrefixSummary& p) {
  std::string text = p.expires_unix_ms == 0 ? "" : "until " + Time(p.expires_unix_ms);
  if (p.pinned) text += text.empty() ? "pinned" : ", pinned";
  return text.empty() ? "-" : text;
}

// A model file may leave out "layers" (then all are equal, with "scale" or 1/sqrt(key_dim)) and
// give "identity" as an object.
Result<ModelSpec> ReadModelFile(const std::string& file, const std::string& name) {
  std::ifstream in(file, std::ios::binary);
  if (!in) return Error{Code::kIo, "cannot read the geometry file " + file};
  Json json = Json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) {
    return InvalidArgument(file + " is no JSON object");
  }
  if (!name.empty()) json["name"] = name;
  if (auto identity = json.find("identity"); identity != json.end() && identity->is_object()) {
    Json pairs = Json::array();
    for (const auto& [key, value] : identity->items()) pairs.push_back(Json::array({key, value}));
    json["identity"] = std::move(pairs);
  }
  double scale = 0;
  auto geometry = json.find("geometry");
  const bool same_layers = geometry != json.end() && geometry->is_object() &&
                           geometry->find("layers") == geometry->end();
  if (same_layers && geometry->contains("scale")) {
    PREFIXD_ASSIGN(scale, wire::Field<double>(*geometry, "scale"));
  }
  PREFIXD_ASSIGN(ModelSpec spec, wire::FromJson<ModelSpec>(json, file));
  KvGeometry& g = spec.geometry;
  if (same_layers && g.n_layers <= 1024 && g.key_dim > 0) {
    LayerGeometry layer;
    layer.scale = float(scale > 0 ? scale : 1 / std::sqrt(double(g.key_dim)));
    g.layers.assign(g.n_layers, layer);
  }
  if (spec.name.empty()) return InvalidArgument(file + " has no name: add \"name\" or use --name");
  if (Status s = g.Validate(); !s.ok()) return InvalidArgument(file + ": " + s.error().message);
  return spec;
}

}  // namespace

Status ListModels(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const std::vector<ModelSpec> models, EveryModel(client));
  if (options.json) {
    PrintJson(ToJson(models));
    return {};
  }
  std::vector<std::vector<std::string>> rows = {{"MODEL", "GEOMETRY", "FEATURE MAPS"}};
  for (const ModelSpec& m : models) {
    rows.push_back({m.name, ShapeText(m.geometry), Count(m.feature_maps.size())});
  }
  PrintTable(rows);
  return {};
}

Status ShowModel(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const ModelSpec model, client.Model(options.name));
  if (options.json) {
    PrintJson(ToJson(model));
    return {};
  }
  std::vector<std::pair<std::string, std::string>> fields = {
      {"model", model.name},
      {"geometry", ShapeText(model.geometry)},
      {"bytes per token", Count(model.geometry.token_bytes())}};
  for (const auto& [key, value] : model.identity) fields.emplace_back("identity." + key, value);
  for (const auto& path : model.feature_maps) fields.emplace_back("feature map", path.string());
  PrintFields(fields);
  return {};
}

Status RegisterModel(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const ModelSpec spec, ReadModelFile(options.geometry_file, options.name));
  PREFIXD_TRY(client.RegisterModel(spec));
  if (options.json) {
    PrintJson(ToJson(spec));
  } else {
    std::printf("registered %s: %s\n", Printable(spec.name).c_str(),
                ShapeText(spec.geometry).c_str());
  }
  return {};
}

Status RemoveModel(RemoteStore& client, const Options& options) {
  PREFIXD_TRY(client.RemoveModel(options.name));
  if (options.json) {
    PrintJson({{"removed", options.name}});
  } else {
    std::printf("removed %s\n", Printable(options.name).c_str());
  }
  return {};
}

Status ListPrefixes(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const std::vector<PrefixSummary> prefixes, EveryPrefix(client));
  if (options.json) {
    PrintJson(ToJson(prefixes));
    return {};
  }
  std::vector<std::vector<std::string>> rows = {{"PREFIX", "MODEL", "TENANT", "TOKENS", "ON DISK",
                                                 "STATE", "LAST USED (UTC)", "KEPT (UTC)",
                                                 "LABEL"}};
  for (const PrefixSummary& p : prefixes) {
    rows.push_back({p.id, p.model, p.tenant.empty() ? "-" : p.tenant, TokensText(p),
                    Bytes(p.own_bytes),
                    p.quarantined ? "quarantined" : std::string(IngestStateName(p.ingest)),
                    Time(p.last_used_unix_ms), LifetimeText(p), p.label});
  }
  PrintTable(rows);
  for (const PrefixSummary& p : prefixes) {
    if (p.quarantined) std::printf("%s is quarantined: %s\n", p.id.c_str(), p.quarantine.c_str());
  }
  return {};
}

namespace {

std::string HowSearched(const IndexRecall& r) {
  if (!r.used) return "exact: the index finds too little";
  char effort[32];
  std::snprintf(effort, sizeof effort, "%g", r.index == "ivf" ? 100 * r.effort : r.effort);
  const std::string how = Printable(r.index) + ", " + effort +
                          (r.index == "ivf" ? "% of lists" : " keys looked at per token");
  return how + (r.queries == 0 ? ", untuned: the put gave no queries" : "");
}

// Recall is measured on queries that did not tune the index.
void PrintIndexes(const std::vector<IndexRecall>& indexes) {
  if (indexes.empty()) return;
  std::vector<std::vector<std::string>> rows = {
      {"LAYER", "KV HEAD", "INDEX", "RECALL", "MASS", "K", "QUERIES", "SEARCHED BY"}};
  for (const IndexRecall& r : indexes) {
    const bool tuned = r.queries > 0;
    rows.push_back({Count(r.layer), Count(r.kv_head), r.index, tuned ? ErrorText(r.recall) : "-",
                    tuned ? ErrorText(r.mass) : "-", tuned ? Count(r.k) : "-", Count(r.queries),
                    HowSearched(r)});
  }
  PrintTable(rows);
}

}  // namespace

Status ShowPrefix(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const PrefixDetail detail, client.Prefix(options.prefix));
  if (options.json) {
    PrintJson(ToJson(detail));
    return {};
  }
  const PrefixSummary& p = detail.summary;
  std::string state(IngestStateName(p.ingest));
  if (p.quarantined) state = "quarantined: " + p.quarantine;
  if (!p.ingest_error.empty()) state += " (" + p.ingest_error + ")";
  PrintFields({{"prefix", p.id},
               {"label", p.label.empty() ? "-" : p.label},
               {"model", p.model},
               {"tenant", p.tenant.empty() ? "-" : p.tenant},
               {"tokens", Count(p.n_tokens) + " (" + Count(p.own_tokens) + " stored here)"},
               {"on disk", Bytes(p.own_bytes)},
               {"rows", RowsText(p.encoding, p.encoding_error)},
               {"derived rows", DerivedText(p)},
               {"compressed", CompressedText(p)},
               {"state", state},
               {"created (UTC)", Time(p.created_unix_ms)},
               {"last used (UTC)", Time(p.last_used_unix_ms)},
               {"lifetime (UTC)", LifetimeText(p)},
               {"continued by", Count(p.children)}});
  for (size_t i = 0; i < detail.chain.size(); ++i) {
    std::printf("%s%s\n", i == 0 ? "chain             " : "               -> ",
                Printable(detail.chain[i]).c_str());
  }
  for (const std::string& blob : detail.blobs)
    std::printf("derived           %s\n", Printable(blob).c_str());
  PrintIndexes(detail.indexes);
  if (detail.choices.empty()) return {};
  std::vector<std::vector<std::string>> rows = {
      {"LAYER", "KV HEAD", "BUDGET", "CHOSEN", "ERROR", "OTHERS"}};
  for (const HeadChoice& c : detail.choices) {
    std::string error = "-", others;
    bool found = false;
    for (const EstimatorError& e : c.errors) {
      if (!found && e.estimator == c.chosen) {
        error = ErrorText(e.error);
        found = true;
        continue;
      }
      others += (others.empty() ? "" : ", ") + e.estimator.Name() + " " + ErrorText(e.error);
    }
    rows.push_back({Count(c.layer), Count(c.kv_head), ErrorText(c.budget), c.chosen.Name(), error,
                    others.empty() ? "-" : others});
  }
  PrintTable(rows);
  return {};
}

Status ExportPrefixToFile(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const PrefixFile file, ExportPrefix(client, options.prefix, options.file,
                                                     ShowProgress("export", options.quiet)));
  if (options.json) {
    PrintJson({{"prefix", file.prefix},
               {"model", file.model},
               {"label", file.label},
               {"n_tokens", file.n_tokens},
               {"bytes", file.bytes},
               {"file", options.file}});
  } else {
    std::printf("%s: %s tokens of %s, %s\n", Printable(options.file).c_str(),
                Count(file.n_tokens).c_str(), Printable(file.model).c_str(),
                Bytes(file.bytes).c_str());
  }
  return {};
}

Status PutPrefixFromFile(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const PutResult result,
                 PutPrefixFile(client, options.file, ShowProgress("put", options.quiet)));
  if (options.json) {
    PrintJson(ToJson(result));
  } else {
    std::printf("stored %s: %s tokens, %s of them new\n", result.prefix.c_str(),
                Count(result.n_tokens).c_str(), Count(result.stored_tokens).c_str());
    if (!result.lineage.empty()) {
      std::printf("tokens from %s on are derived; their lineage is %s\n",
                  Count(result.exact_tokens).c_str(), Printable(result.lineage).c_str());
    }
  }
  return {};
}

Status RemovePrefix(RemoteStore& client, const Options& options) {
  PREFIXD_TRY(client.Remove(options.prefix));
  if (options.json) {
    PrintJson({{"removed", options.prefix}});
  } else {
    std::printf("removed %s\n", options.prefix.c_str());
  }
  return {};
}

namespace {

Status ChangeLifetime(RemoteStore& client, const Options& options, const Lifetime& lifetime) {
  PREFIXD_TRY(client.SetLifetime(options.prefix, lifetime));
  const auto detail = client.Prefix(options.prefix);
  if (!detail.ok()) {
    // It is done; a token that may write need not have the right to read.
    if (options.json) {
      PrintJson({{"prefix", options.prefix}, {"changed", true}});
    } else {
      std::printf("%s: changed (what it is now cannot be shown: %s)\n", options.prefix.c_str(),
                  Printable(detail.error().message).c_str());
    }
  } else if (options.json) {
    PrintJson(ToJson(*detail));
  } else {
    std::printf("%s: %s\n", options.prefix.c_str(), LifetimeText(detail->summary).c_str());
  }
  return {};
}

}  // namespace

Status PinPrefix(RemoteStore& client, const Options& options) {
  return ChangeLifetime(client, options, {true, std::nullopt});
}

Status UnpinPrefix(RemoteStore& client, const Options& options) {
  return ChangeLifetime(client, options, {false, std::nullopt});
}

Status LimitPrefix(RemoteStore& client, const Options& options) {
  if (options.ttl == "never") return ChangeLifetime(client, options, {std::nullopt, 0});
  uint64_t seconds = 0;
  const char* end = options.ttl.data() + options.ttl.size();
  const auto [at, ec] = std::from_chars(options.ttl.data(), end, seconds);
  if (ec != std::errc{} || at != end || seconds == 0) {
    return InvalidArgument("the time to live is a whole number of seconds, at least 1, or never; " +
                           ("not '" + options.ttl + "'"));
  }
  return ChangeLifetime(client, options, {std::nullopt, seconds});
}

}  // namespace prefixd::ctl
