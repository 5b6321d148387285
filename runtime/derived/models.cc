#include "runtime/derived/models.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <system_error>

#include "runtime/derived/trained_for.h"
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
  if (!spec.geometry.alike()) {
    return wrong("maps are for models whose layers have the same heads and dimensions");
  }
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
  if (const std::string why = TrainedForOthers(spec, header.weights); !why.empty()) {
    return wrong(why);
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

uint64_t BytesOf(const ModelSpec& spec) {
  uint64_t bytes = sizeof(Model) + spec.name.capacity() +
                   spec.geometry.layers.capacity() * (sizeof(LayerGeometry) + sizeof(size_t));
  for (const auto& [tag, value] : spec.identity) {
    bytes += sizeof(spec.identity[0]) + tag.capacity() + value.capacity();
  }
  for (const auto& path : spec.feature_maps) bytes += sizeof(path) + path.native().capacity();
  return bytes;
}

uint64_t BytesOf(const std::vector<FeatureMapSet>& maps) {
  uint64_t bytes = 0;
  for (const FeatureMapSet& set : maps) {
    for (const auto* side : {&set.phi_q, &set.phi_k}) {
      for (const FeatureMap& m : *side) {
        bytes += sizeof(m) +
                 sizeof(float) * (m.w_in.size() + m.b_in.size() + m.w1.size() + m.b1.size() +
                                  m.w2.size() + m.b2.size() + m.w_out.size() + m.b_out.size());
      }
    }
  }
  return bytes;
}

// What the files take, so that nothing is loaded that there is no room for; loading them says what
// else is wrong with them.
uint64_t FileBytes(const std::vector<std::filesystem::path>& files) {
  uint64_t bytes = 0;
  for (const auto& path : files) {
    std::error_code failed;
    if (const auto size = std::filesystem::file_size(path, failed); !failed) bytes += size;
  }
  return bytes;
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
    model->heads = model->spec.geometry.heads();
    const uint64_t bytes = BytesOf(model->spec);
    model->memory = memory_.Charge(MemoryKind::kSummaries, bytes);
    const auto load = [&]() -> Status {
      PREFIXD_TRY(model->memory.Resize(bytes + FileBytes(model->spec.feature_maps)));
      PREFIXD_ASSIGN(model->maps, LoadAllMaps(model->spec));
      return {};
    };
    if (const Status loaded = load(); !loaded.ok()) model->maps_error = loaded.error().message;
    model->memory.Set(bytes + BytesOf(model->maps));
    std::lock_guard lock(mutex_);
    models_[record.name].model = std::move(model);
  }
  return {};
}

std::vector<std::string> ModelRegistry::LeastRecentlyUsed() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<uint64_t, std::string>> models;
  for (const auto& [name, entry] : models_) models.emplace_back(entry.used, name);
  std::ranges::sort(models);
  std::vector<std::string> names;
  for (auto& [used, name] : models) names.push_back(std::move(name));
  return names;
}

Status ModelRegistry::MakeRoom(const std::string& name, uint64_t bytes) {
  if (bytes > limits_.bytes) {
    return Error{Code::kResourceExhausted,
                 "model '" + name + "' takes " + std::to_string(bytes) + " bytes, more than all " +
                     std::to_string(limits_.bytes) +
                     " that models may (limits.models_mib); use smaller feature maps"};
  }
  const auto fits = [&] {
    const Stats now = stats();
    std::lock_guard lock(mutex_);
    const auto old = models_.find(name);
    const bool known = old != models_.end();
    const uint64_t others = now.bytes - (known ? old->second.model->memory.bytes() : 0);
    return (known || now.models < limits_.models) && others + bytes <= limits_.bytes;
  };
  if (fits()) return {};
  for (const std::string& other : LeastRecentlyUsed()) {
    if (other == name || !storage_->RemoveModel(other).ok()) continue;
    {
      std::lock_guard lock(mutex_);
      models_.erase(other);
      ++dropped_;
    }
    if (fits()) return {};
  }
  const Stats now = stats();
  return Error{Code::kResourceExhausted,
               "there are " + std::to_string(now.models) + " models of " +
                   std::to_string(now.bytes) +
                   " bytes, and prefixes of all of them are stored (limits.max_models, "
                   "limits.models_mib); remove one's prefixes first"};
}

Result<bool> ModelRegistry::Register(const ModelSpec& spec) {
  std::lock_guard registering(register_mutex_);
  if (spec.name.empty()) return InvalidArgument("a model needs a name");
  PREFIXD_TRY(spec.geometry.Validate());
  std::shared_ptr<const Model> known;
  {
    std::lock_guard lock(mutex_);
    if (const auto it = models_.find(spec.name); it != models_.end()) known = it->second.model;
  }
  auto model = std::make_shared<Model>();
  model->spec = spec;
  model->heads = spec.geometry.heads();
  for (auto& path : model->spec.feature_maps) {
    std::error_code ignored;  // keeps the path as given; loading it says what is wrong
    if (auto absolute = std::filesystem::absolute(path, ignored); !ignored) path = absolute;
  }
  const uint64_t bytes = BytesOf(model->spec);
  PREFIXD_ASSIGN(model->memory,
                 memory_.Take(MemoryKind::kSummaries, bytes + FileBytes(model->spec.feature_maps)));
  PREFIXD_ASSIGN(model->maps, LoadAllMaps(model->spec));
  model->memory.Set(bytes + BytesOf(model->maps));
  const storage::ModelRecord record{spec.name,
                                    storage::ModelFingerprint(spec.geometry, spec.identity),
                                    spec.geometry, Describe(model->spec)};
  if (!known || model->memory.bytes() > known->memory.bytes()) {
    if (known) PREFIXD_TRY(storage_->PutModel(record));  // others go only for what is not refused
    PREFIXD_TRY(MakeRoom(spec.name, model->memory.bytes()));
  }
  PREFIXD_TRY(storage_->PutModel(record));
  std::lock_guard lock(mutex_);
  Entry& entry = models_[spec.name];
  entry.used = ++uses_;
  const bool changed = known && !SameMaps(*known, *model);
  if (!known || changed || known->spec.feature_maps != model->spec.feature_maps) {
    entry.model = std::move(model);
  }
  return changed;
}

Status ModelRegistry::Remove(std::string_view name) {
  std::lock_guard registering(register_mutex_);
  PREFIXD_TRY(storage_->RemoveModel(name));
  std::lock_guard lock(mutex_);
  if (const auto it = models_.find(name); it != models_.end()) models_.erase(it);
  return {};
}

Result<std::shared_ptr<const Model>> ModelRegistry::Find(std::string_view name) const {
  constexpr size_t kNamed = 8;
  std::lock_guard lock(mutex_);
  if (const auto it = models_.find(name); it != models_.end()) {
    it->second.used = ++uses_;
    return it->second.model;
  }
  std::string known;
  size_t n = 0;
  for (auto it = models_.begin(); it != models_.end() && n < kNamed; ++it, ++n) {
    known += (n == 0 ? "" : ", ") + it->first;
  }
  if (models_.size() > n) known += " and " + std::to_string(models_.size() - n) + " more";
  return Error{Code::kNotFound, "no model named '" + std::string(name) + "' is registered" +
                                    (known.empty() ? "" : "; known: " + known)};
}

ModelPage ModelRegistry::List(std::string_view after, size_t limit, uint64_t max_bytes) const {
  ModelPage page;
  uint64_t bytes = 0;
  std::lock_guard lock(mutex_);
  // No model has an empty name.
  for (auto it = models_.upper_bound(after); it != models_.end(); ++it) {
    const ModelSpec& spec = it->second.model->spec;
    bytes += BytesOf(spec);
    if (!page.models.empty() && (page.models.size() >= limit || bytes > max_bytes)) {
      page.next = page.models.back().name;
      break;
    }
    page.models.push_back(spec);
  }
  return page;
}

ModelRegistry::Stats ModelRegistry::stats() const {
  std::lock_guard lock(mutex_);
  Stats s{models_.size(), 0, dropped_};
  for (const auto& [name, entry] : models_) s.bytes += entry.model->memory.bytes();
  return s;
}

}  // namespace prefixd
