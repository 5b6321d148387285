#include "runtime/retention/scorer_shelf.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "runtime/retention/scorer_file.h"
#include "storage/io/errors.h"
#include "tensors/safetensors.h"

namespace prefixd {
namespace {

namespace fs = std::filesystem;

bool SameModel(const ModelSpec& a, const ModelSpec& b) {
  return a.identity == b.identity && a.geometry == b.geometry;
}

std::string WeightsOf(const ModelSpec& spec) {
  for (const auto& [key, value] : spec.identity) {
    if (key == "weights") return value;
  }
  return "";
}

}  // namespace

Result<std::shared_ptr<const ShelvedScorers>> ScorerShelf::For(const ModelSpec& spec) {
  {
    std::lock_guard lock(mutex_);
    const auto it = shelved_.find(spec.name);
    if (it != shelved_.end() && SameModel(it->second.spec, spec)) {
      if (auto scorers = it->second.scorers.lock()) return scorers;
    }
  }
  auto scorers = Load(spec);
  std::lock_guard lock(mutex_);
  if (scorers.ok()) {
    shelved_[spec.name] = {spec, *scorers};
    return scorers;
  }
  const Error& why = scorers.error();
  if (why.code == Code::kResourceExhausted) return why;
  if (why.message != last_logged_) storage::LogWarning("store.scorers: " + why.message);
  last_logged_ = why.message;
  return Error{Code::kFailedPrecondition,
               "retain.by kvpop needs scorers that were trained for model '" + spec.name +
                   "', and the store has none (python -m prefixd.retention --train makes them; the "
                   "operator names their file or folder as store.scorers)"};
}

Result<ScorerShelf::Scorers> ScorerShelf::Load(const ModelSpec& spec) const {
  if (path_.empty()) return Error{Code::kNotFound, "there is no file of scorers"};
  std::error_code failed;
  if (!fs::is_directory(path_, failed)) return LoadFile(path_, spec);
  const std::string weights = WeightsOf(spec);
  fs::directory_iterator it(path_, failed);
  for (; !failed && it != fs::directory_iterator(); it.increment(failed)) {
    if (it->path().extension() != ".safetensors") continue;
    const auto file = SafetensorsFile::Open(it->path());
    if (!file.ok()) continue;  // another may serve
    const auto of = file->metadata().find("weights");
    if (of != file->metadata().end() && of->second == weights) return LoadFile(it->path(), spec);
  }
  return Error{Code::kNotFound, failed ? path_.string() + ": " + failed.message()
                                       : "no file of " + path_.string() + " is of weights '" +
                                             weights + "', which model '" + spec.name + "' has"};
}

Result<ScorerShelf::Scorers> ScorerShelf::LoadFile(const fs::path& path,
                                                   const ModelSpec& spec) const {
  PREFIXD_ASSIGN(const SafetensorsFile file, SafetensorsFile::Open(path));
  auto scorers = std::make_shared<ShelvedScorers>();
  const auto format = file.metadata().find("format");
  if (format != file.metadata().end() && format->second == kScorerFormat) {
    PREFIXD_ASSIGN(scorers->memory, account_.Take(MemoryKind::kSummaries, ScorerBytes(file)));
  }
  PREFIXD_ASSIGN(scorers->heads, LoadScorers(file, spec));  // refuses other formats
  return Scorers(std::move(scorers));
}

}  // namespace prefixd
