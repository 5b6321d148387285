#include "client_lib/load_library.h"

#include <dlfcn.h>

#include <filesystem>

namespace prefixd {
namespace {

// Returns the folder of the library or program that contains this code; empty when it is unknown.
std::filesystem::path OwnFolder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&OwnFolder), &info) == 0 || !info.dli_fname) return {};
  std::error_code ignored;
  const auto real = std::filesystem::canonical(info.dli_fname, ignored);
  return ignored ? std::filesystem::path() : real.parent_path();
}

Error Why() { return {Code::kFailedPrecondition, ::dlerror()}; }

}  // namespace

Result<void*> LoadSymbol(const char* name, const char* symbol) {
  void* library = nullptr;
  if (const auto folder = OwnFolder(); !folder.empty()) {
    const auto beside = folder / name;
    std::error_code ignored;
    if (std::filesystem::exists(beside, ignored)) {
      library = ::dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (!library) return Why();
    }
  }
  if (!library) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) return Why();
  void* const found = ::dlsym(library, symbol);
  if (!found) return Why();
  return found;
}

}  // namespace prefixd
