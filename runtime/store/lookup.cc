#include "runtime/store/lookup.h"

#include "base/session_arguments.h"

namespace prefixd {

Status KnownModel(const Core& core, std::string_view model) {
  PREFIXD_ASSIGN(const auto found, core.models.Find(model));
  return {};
}

Result<storage::PrefixInfo> FindPrefix(const Core& core, std::string_view prefix) {
  const auto id = storage::SegmentId::Parse(prefix);
  if (!id.ok()) return NoSuchPrefix(prefix);
  auto info = core.storage->GetPrefix(*id);
  const bool gone = !info.ok() && info.error().code == Code::kNotFound;
  // What a session moved is that session's alone.
  if (gone || (info.ok() && info->live)) return NoSuchPrefix(prefix);
  return info;
}

}  // namespace prefixd
