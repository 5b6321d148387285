# Finds every dependency beyond the standard library; docs/dependencies.md says why each was chosen.
find_package(PkgConfig REQUIRED)
find_package(OpenMP REQUIRED)  # before faiss, whose config file expects it
find_package(RocksDB CONFIG REQUIRED)
find_package(faiss CONFIG REQUIRED)
find_package(spdlog CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(CLI11 CONFIG REQUIRED)
find_package(tomlplusplus CONFIG REQUIRED)
find_package(Boost 1.74 REQUIRED)
pkg_check_modules(liburing REQUIRED IMPORTED_TARGET liburing)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(sodium REQUIRED IMPORTED_TARGET libsodium)
pkg_check_modules(openblas REQUIRED IMPORTED_TARGET openblas)
