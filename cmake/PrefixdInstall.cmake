# `cmake --install` installs the daemon and its tool, the libraries for C and C++, all of
# include/prefixd, a CMake package and a pkg-config file. Everything is relocatable (DESTDIR and any
# prefix).
include(CMakePackageConfigHelpers)
set(PREFIXD_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/prefixd)

# Programs link one archive with the objects of all rooms that they need.
add_library(prefixd_cpp STATIC
  $<TARGET_OBJECTS:prefixd_base> $<TARGET_OBJECTS:prefixd_protocol> $<TARGET_OBJECTS:prefixd_client>)
target_link_libraries(prefixd_cpp INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
set(PREFIXD_ARCHIVES prefixd_cpp)
if(PREFIXD_HAVE_CUDA)
  add_library(prefixd_gpu_archive STATIC
    $<TARGET_OBJECTS:prefixd_base> $<TARGET_OBJECTS:prefixd_attention> $<TARGET_OBJECTS:prefixd_gpu>)
  target_link_libraries(prefixd_gpu_archive INTERFACE CUDA::cudart_static)
  set_target_properties(prefixd_gpu_archive PROPERTIES OUTPUT_NAME prefixd-gpu EXPORT_NAME gpu)
endif()
set_target_properties(prefixd_cpp PROPERTIES OUTPUT_NAME prefixd-cpp EXPORT_NAME cpp)
foreach(archive prefixd_cpp prefixd_gpu_archive)
  if(TARGET ${archive})
    set_target_properties(${archive} PROPERTIES LINKER_LANGUAGE CXX)
    target_compile_features(${archive} INTERFACE cxx_std_20)
    target_include_directories(${archive} INTERFACE
      $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  endif()
endforeach()
install(TARGETS prefixd prefixctl RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT daemon)
install(FILES ${CMAKE_SOURCE_DIR}/packaging/grafana/prefixd.json COMPONENT daemon
  DESTINATION ${CMAKE_INSTALL_DATADIR}/prefixd/grafana)
install(TARGETS prefixd_embedded COMPONENT embedded
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP)
install(TARGETS prefixd_tls COMPONENT tls
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP)
install(TARGETS prefixd_c EXPORT prefixdTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT development)
install(TARGETS prefixd_cpp EXPORT prefixdTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
if(PREFIXD_HAVE_CUDA)
  install(TARGETS prefixd_gpu_archive EXPORT prefixdGpuTargets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
  install(EXPORT prefixdGpuTargets NAMESPACE prefixd:: DESTINATION ${PREFIXD_PACKAGE_DIR}
    COMPONENT development)
  set(PREFIXD_LEFT_OUT)
else()
  set(PREFIXD_LEFT_OUT PATTERN gpu EXCLUDE)
endif()
install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/prefixd DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development ${PREFIXD_LEFT_OUT})

install(EXPORT prefixdTargets NAMESPACE prefixd:: DESTINATION ${PREFIXD_PACKAGE_DIR}
  COMPONENT development)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/prefixdConfig.cmake.in
  ${CMAKE_BINARY_DIR}/prefixdConfig.cmake INSTALL_DESTINATION ${PREFIXD_PACKAGE_DIR})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/prefixdConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/prefixdConfig.cmake ${CMAKE_BINARY_DIR}/prefixdConfigVersion.cmake
  DESTINATION ${PREFIXD_PACKAGE_DIR} COMPONENT development)

# The way from the pkg-config file up to the prefix depends on LIBDIR: one with an architecture in
# it is a level deeper.
file(RELATIVE_PATH PREFIXD_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/prefixd.pc.in ${CMAKE_BINARY_DIR}/prefixd.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/prefixd.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT development)
