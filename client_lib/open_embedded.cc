// Open: the store of a process's own lies in a library of its own, so that those who only speak to
// a daemon load none of what it is made of.
#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "base/embedded_entry.h"
#include "prefixd/client.h"

namespace prefixd {
namespace {

// The folder of the library or program that this code is linked into; empty: not known.
std::filesystem::path OwnFolder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&OwnFolder), &info) == 0 || !info.dli_fname) return {};
  std::error_code ignored;
  const auto real = std::filesystem::canonical(info.dli_fname, ignored);
  return ignored ? std::filesystem::path() : real.parent_path();
}

Error CannotLoad(const std::string& why) {
  return {Code::kFailedPrecondition,
          "a store of this process's own needs " + std::string(kEmbeddedLibrary) + " (" + why +
              "); install it beside this library, or connect to a running daemon instead"};
}

// Loaded once and never unloaded: stores run threads of its code.
Result<const EmbeddedEntry*> LoadEmbedded() {
  void* library = nullptr;
  if (const auto folder = OwnFolder(); !folder.empty()) {
    const auto beside = folder / kEmbeddedLibrary;
    std::error_code ignored;
    if (std::filesystem::exists(beside, ignored)) {
      library = ::dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (!library) return CannotLoad(::dlerror());
    }
  }
  if (!library) library = ::dlopen(kEmbeddedLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) return CannotLoad(::dlerror());
  const auto entry =
      reinterpret_cast<decltype(&prefixd_embedded_entry)>(::dlsym(library, kEmbeddedSymbol));
  if (!entry) return CannotLoad(::dlerror());
  const EmbeddedEntry* found = entry();
  if (std::string_view(found->version) != PREFIXD_VERSION) {
    return CannotLoad("the one that was found is of version " + std::string(found->version) +
                      ", this library of " + PREFIXD_VERSION);
  }
  return found;
}

}  // namespace

Result<std::unique_ptr<Store>> Open(const RuntimeOptions& options) {
  static const Result<const EmbeddedEntry*> entry = LoadEmbedded();
  if (!entry.ok()) return entry.error();
  return (*entry)->open(options);
}

}  // namespace prefixd
