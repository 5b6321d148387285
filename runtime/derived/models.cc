#include "runtime/derived/models.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <system_error>

#include "storage/segment/identity.h"
#include "tensors/feature_map_file.h"
#include "tensors/safetensors.h"

namespace prefixd {
namespace {

using Json = nlohmann::json;

// Serialises what the catalog keeps of a model beyond its fingerprint and geometry.
std::string Describe(const ModelSpec& spec) {
  Json json;
  json["identity"] = Json::array();
  for (const auto& [tag, value] : spec.identity) json["identity"].push_back({tag, value});
  json["feature_maps"] = Json::array();
  for (const auto& path : spec.feature_maps) json["feature_maps"].push_back(path.string());
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<ModelSpec> SpecOf(const storage::ModelRecord& record) {
  ModelSpec spec{record.name, record.geometry, {}, {}};
  const Error malformed{Code::kCorrupt,
                        "the stored description of model '" + record.name + "' is malformed"};
  const Json json = Json::parse(record.description_json, nullptr, false);
  if (!json.is_object()) return malformed;
  const Json identity = json.value("identity", Json::array());
  const Json maps = json.value("feature_maps", Json::array());
  if (!identity.is_array() || !maps.is_array()) return malformed;
  for (const Json& field : identity) {
    if (!field.is_array() || field.size() != 2 || !field[0].is_string() || !field[1].is_string()) {
      return malformed;
    }
    spec.identity.emplace_back(field[0].get<std::string>(), field[1].get<std::string>());
  }
  for (const Json& path : maps) {
    if (!path.is_string()) return malformed;
    spec.feature_maps.emplace_back(path.get<std::string>());
  }
  return spec;
}

// Loads maps and checks model and heads against `spec`: maps approximate exp(scale q.k) of one
// model's heads.
Result<FeatureMapSet> LoadFor(const ModelSpec& spec, const std::filesystem::path& path) {
  const auto wrong = [&](const std::string& what) {
    return InvalidArgument("feature maps " + path.string() + " do not fit model '" + spec.name +
                           "': " + what);
  };
  PREFIXD_ASSIGN(auto file, SafetensorsFile::Open(path));
  PREFIXD_ASSIGN(const auto header, ReadFeatureMapHeader(file));
  PREFIXD_ASSIGN(auto maps, LoadFeatureMaps(file));
  if (Status status = maps.Validate(spec.geometry); !status.ok()) {
    return wrong(status.error().message);
  }
  for (uint32_t l = 0; l < spec.geometry.n_layers; ++l) {
    const double scale = spec.geometry.layers[l].scale;
    if (std::abs(header.scale - scale) > 1e-5 * scale) {
      return wrong("they were trained for scale " + std::to_string(header.scale) + ", layer " +
                   std::to_string(l) + " has " + std::to_string(scale));
    }
  }
  // Digests of one kind ("blake2b:...") can be compared; a name that the user gave cannot.
  const auto kind = [](std::string_view weights) {
    return weights.substr(0, std::min(weights.find(':') + 1, weights.size()));
  };
  for (const auto& [tag, value] : spec.identity) {
    if (tag == "weights" && !header.weights.empty() && kind(value) == kind(header.weights) &&
        value != header.weights) {
      return wrong("they were trained for weights " + header.weights + ", the model has " + value);
    }
  }
  return maps;
}

Result<std::vector<FeatureMapSet>> LoadAllMaps(const ModelSpec& spec) {
  std::vector<FeatureMapSet> all;
  for (const auto& path : spec.feature_maps) {
    PREFIXD_ASSIGN(auto maps, LoadFor(spec, path));
    for (const FeatureMapSet& other : all) {
      if (other.length == maps.length) {
        return InvalidArgument("two feature-map files of model '" + spec.name +
                               "' are for prefix length " + std::to_string(maps.length));
      }
    }
    all.push_back(std::move(maps));
  }
  std::sort(all.begin(), all.end(),
            [](const FeatureMapSet& a, const FeatureMapSet& b) { return a.length < b.length; });
  return all;
}

bool SameMaps(const Model& a, const Model& b) {
  return std::equal(a.maps.begin(), a.maps.end(), b.maps.begin(), b.maps.end(),
                    [](const FeatureMapSet& x, const FeatureMapSet& y) {
                      return x.digest == y.digest && x.length == y.length;
                    });
}

}  // namespace

const FeatureMapSet* Model::MapsFor(uint32_t n_tokens) const {
  for (const FeatureMapSet& set : maps) {
    if (set.length >= n_tokens) return &set;
  }
  return maps.empty() ? nullptr : &maps.back();
}

bool Model::Summarised(uint32_t layer) const {
  const LayerGeometry& geometry = spec.geometry.layers[layer];
  return geometry.softcap == 0 && geometry.sliding_window == 0;
}

Status ModelRegistry::LoadAll() {
  for (const storage::ModelRecord& record : storage_->ListModels()) {
    PREFIXD_ASSIGN(auto spec, SpecOf(record));
    auto model = std::make_shared<Model>();
    model->spec = std::move(spec);
    if (auto maps = LoadAllMaps(model->spec); maps.ok()) {
      model->maps = std::move(maps).value();
    } else {
      model->maps_error = maps.error().message;
    }
    std::lock_guard lock(mutex_);
    models_[record.name] = std::move(model);
  }
  return {};
}

Result<bool> ModelRegistry::Register(const ModelSpec& spec) {
  std::lock_guard registering(register_mutex_);
  if (spec.name.empty()) return InvalidArgument("a model needs a name");
  PREFIXD_TRY(spec.geometry.Validate());
  auto model = std::make_shared<Model>();
  model->spec = spec;
  for (auto& path : model->spec.feature_maps) {
    std::error_code ignored;  // keeps the path as given; loading it says what is wrong
    if (auto absolute = std::filesystem::absolute(path, ignored); !ignored) path = absolute;
  }
  PREFIXD_ASSIGN(model->maps, LoadAllMaps(model->spec));
  PREFIXD_TRY(
      storage_->PutModel({spec.name, storage::ModelFingerprint(spec.geometry, spec.identity),
                          spec.geometry, Describe(model->spec)}));
  std::lock_guard lock(mutex_);
  auto& slot = models_[spec.name];
  const bool changed = !slot || !SameMaps(*slot, *model);
  if (changed || slot->spec.feature_maps != model->spec.feature_maps) slot = std::move(model);
  return changed;
}

Result<std::shared_ptr<const Model>> ModelRegistry::Find(std::string_view name) const {
  std::lock_guard lock(mutex_);
  if (auto it = models_.find(name); it != models_.end()) return it->second;
  std::string known;
  for (const auto& [other, model] : models_) known += (known.empty() ? "" : ", ") + other;
  return Error{Code::kNotFound, "no model named '" + std::string(name) + "' is registered" +
                                    (known.empty() ? "" : "; known: " + known)};
}

std::vector<ModelSpec> ModelRegistry::Specs() const {
  std::lock_guard lock(mutex_);
  std::vector<ModelSpec> specs;
  for (const auto& [name, model] : models_) specs.push_back(model->spec);
  return specs;
}

}  // namespace prefixd
