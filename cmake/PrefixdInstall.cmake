# `cmake --install`: the daemon and its tool, the C library, the C++ interface as static libraries,
# headers, a CMake package and a pkg-config file. Everything is relocatable (DESTDIR and any prefix).
include(CMakePackageConfigHelpers)
set(PREFIXD_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/prefixd)

install(TARGETS prefixd prefixctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS prefixd_c EXPORT prefixdCTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  PUBLIC_HEADER DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

# The C++ interface (client_lib/client.h) and the rooms below it.
set(PREFIXD_ROOMS attention tensors storage index runtime client)
if(PREFIXD_HAVE_CUDA)
  list(APPEND PREFIXD_ROOMS gpu)
endif()
list(TRANSFORM PREFIXD_ROOMS PREPEND prefixd_ OUTPUT_VARIABLE PREFIXD_ROOM_TARGETS)
set_target_properties(prefixd_client PROPERTIES EXPORT_NAME cpp)
install(TARGETS prefixd_options ${PREFIXD_ROOM_TARGETS} EXPORT prefixdCppTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}/prefixd)
install(FILES ${CMAKE_SOURCE_DIR}/client_lib/client.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/prefixd/client_lib)
install(FILES ${CMAKE_SOURCE_DIR}/runtime/restore.h ${CMAKE_SOURCE_DIR}/runtime/session.h
              ${CMAKE_SOURCE_DIR}/runtime/store.h ${CMAKE_SOURCE_DIR}/runtime/types.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/prefixd/runtime)
install(FILES ${CMAKE_SOURCE_DIR}/storage/row_encoding.h ${CMAKE_SOURCE_DIR}/storage/stored_part.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/prefixd/storage)
install(FILES ${CMAKE_SOURCE_DIR}/storage/row_encoding.h ${CMAKE_SOURCE_DIR}/storage/stored_part.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/prefixd/storage)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/attention
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/prefixd
  FILES_MATCHING PATTERN "*.h" PATTERN "kernels*.h" EXCLUDE)

# Two sets: who links the C library needs none of the C++ one's dependencies.
install(EXPORT prefixdCTargets NAMESPACE prefixd:: DESTINATION ${PREFIXD_PACKAGE_DIR})
install(EXPORT prefixdCppTargets NAMESPACE prefixd:: DESTINATION ${PREFIXD_PACKAGE_DIR})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/prefixdConfig.cmake.in
  ${CMAKE_BINARY_DIR}/prefixdConfig.cmake INSTALL_DESTINATION ${PREFIXD_PACKAGE_DIR})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/prefixdConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/prefixdConfig.cmake ${CMAKE_BINARY_DIR}/prefixdConfigVersion.cmake
  DESTINATION ${PREFIXD_PACKAGE_DIR})

configure_file(${CMAKE_CURRENT_LIST_DIR}/prefixd.pc.in ${CMAKE_BINARY_DIR}/prefixd.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/prefixd.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
