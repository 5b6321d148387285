#include "base/embedded_entry.h"

#include "runtime/store/local_store.h"

namespace prefixd {
namespace {

Result<std::unique_ptr<Store>> OpenStore(const RuntimeOptions& options) {
  PREFIXD_ASSIGN(std::unique_ptr<Store> store, LocalStore::Open(options));
  return store;
}

}  // namespace
}  // namespace prefixd

const prefixd::EmbeddedEntry* prefixd_embedded_entry() {
  static constexpr prefixd::EmbeddedEntry kEntry{PREFIXD_VERSION, prefixd::OpenStore};
  return &kEntry;
}
