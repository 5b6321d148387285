#include "storage/core/stored_models.h"

#include <utility>

#include "storage/io/crash_point.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {
namespace {

constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxDescriptionBytes = 64 << 10;

}  // namespace

void StoredModels::Load(std::vector<ModelRecord> models) {
  std::lock_guard guard(mutex_);
  for (ModelRecord& model : models) models_.emplace(model.name, std::move(model));
}

Result<RequestScope> StoredModels::Resolve(std::string_view model, std::string_view tenant) const {
  if (tenant.size() > kMaxNameBytes) return InvalidArgument("a tenant has at most 256 bytes");
  std::lock_guard guard(mutex_);
  const auto it = models_.find(model);
  if (it == models_.end()) {
    return Error{Code::kNotFound, "no model named '" + std::string(model) + "' in the store"};
  }
  return RequestScope{it->second, std::string(tenant), PrefixScope(it->second.fingerprint, tenant)};
}

Status StoredModels::Put(const ModelRecord& model) {
  PREFIXD_TRY(model.geometry.Validate());
  if (model.name.empty() || model.name.size() > kMaxNameBytes ||
      model.description_json.size() > kMaxDescriptionBytes) {
    return InvalidArgument(
        "a model has a name of 1..256 bytes and a description of at most 64 KiB");
  }
  std::lock_guard guard(mutex_);
  for (const auto& [name, known] : models_) {
    const bool same = known.fingerprint == model.fingerprint && known.geometry == model.geometry;
    if (name == model.name && same) {
      if (known.description_json == model.description_json) return {};
      PREFIXD_TRY(catalog_.PutModel(model));  // people and the runtime may have changed its notes
      models_.at(model.name) = model;
      return {};
    }
    if (name == model.name) {
      return Error{Code::kAlreadyExists,
                   "model '" + name + "' is stored with another fingerprint or geometry"};
    }
    if (known.fingerprint == model.fingerprint && !(known.geometry == model.geometry)) {
      return Error{Code::kAlreadyExists, "the fingerprint of model '" + model.name +
                                             "' is that of model '" + name +
                                             "', which has another geometry"};
    }
  }
  CrashPoint("model.begin");
  PREFIXD_TRY(catalog_.PutModel(model));
  CrashPoint("model.done");
  models_.emplace(model.name, model);
  return {};
}

std::vector<ModelRecord> StoredModels::List() const {
  std::lock_guard guard(mutex_);
  std::vector<ModelRecord> out;
  for (const auto& [name, model] : models_) out.push_back(model);
  return out;
}

Result<ModelHold> StoredModels::Hold(std::string_view name) {
  std::lock_guard guard(mutex_);
  if (!models_.contains(name)) {
    return Error{Code::kNotFound, "no model named '" + std::string(name) + "' in the store"};
  }
  std::weak_ptr<const void>& held = held_[std::string(name)];
  ModelHold hold = held.lock();
  if (!hold) held = hold = std::make_shared<char>();
  return hold;
}

// A put inserts its segment before it lets go of the model, so that what is seen here in this order
// is complete.
Status StoredModels::Remove(std::string_view name) {
  std::lock_guard guard(mutex_);
  const auto it = models_.find(name);
  if (it == models_.end()) {
    return Error{Code::kNotFound, "no model named '" + std::string(name) + "' in the store"};
  }
  const auto held = held_.find(name);
  if (held != held_.end() && !held->second.expired()) {
    return Error{Code::kFailedPrecondition,
                 "puts of model '" + std::string(name) + "' are under way; end them first"};
  }
  if (const uint64_t segments = tree_.SegmentsOf(name); segments > 0) {
    return Error{Code::kFailedPrecondition, "model '" + std::string(name) + "' is used by " +
                                                std::to_string(segments) +
                                                " stored segments; remove its prefixes first"};
  }
  CrashPoint("model.before_removal");
  PREFIXD_TRY(catalog_.RemoveModel(name));
  CrashPoint("model.removed");
  // A history that cannot be written costs an explanation, not the removal.
  (void)catalog_.NoteGone(
      {GoneReason::kModelRemoved, "", {}, {}, NowUnixMs(), "", {ModelNameHash(name)}});
  if (held != held_.end()) held_.erase(held);
  models_.erase(it);
  return {};
}

bool StoredModels::Knows(std::string_view name) const {
  std::lock_guard guard(mutex_);
  return models_.contains(name);
}

BlockHash StoredModels::ScopeOf(const SegmentRecord& record) const {
  std::lock_guard guard(mutex_);
  const auto model = models_.find(record.model);
  return model == models_.end() ? BlockHash{}
                                : PrefixScope(model->second.fingerprint, record.tenant);
}

Status StoredModels::Check(const SegmentRecord& record, const SegmentHeader& header) const {
  std::lock_guard guard(mutex_);
  const auto it = models_.find(record.model);
  if (it != models_.end()) {
    const ModelRecord& model = it->second;
    if (header.model == model.fingerprint && header.IsOf(model.geometry)) return {};
  }
  return Error{Code::kCorrupt, "its rows are not of the model '" + record.model + "'"};
}

}  // namespace prefixd::storage
