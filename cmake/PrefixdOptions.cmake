# Compiler settings shared by every target, carried by one interface library.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

find_package(Threads REQUIRED)

add_library(prefixd_options INTERFACE)
target_include_directories(prefixd_options INTERFACE
  $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}> $<INSTALL_INTERFACE:include/prefixd>)
target_compile_features(prefixd_options INTERFACE cxx_std_20)
# Warnings are this build's own: who links the installed libraries keeps theirs.
add_library(prefixd_warnings INTERFACE)
target_link_libraries(prefixd_options INTERFACE $<BUILD_INTERFACE:prefixd_warnings>)
target_compile_options(prefixd_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor
  # Designated initialisers that leave the rest at its default are how options are written here.
  -Wno-missing-field-initializers>)
# g++ 12 warns of impossible overlaps, overflows and bounds inside std::string and std::vector when it
# optimises (GCC bugs 105329, 105651 and 105762).
target_compile_options(prefixd_warnings INTERFACE
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-Wno-restrict;-Wno-stringop-overflow;-Wno-array-bounds>")
if(PREFIXD_WERROR)
  target_compile_options(prefixd_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(PREFIXD_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${PREFIXD_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=${PREFIXD_SANITIZE})
endif()

# prefixd_library(NAME SOURCES... [LINK public libs...] [PRIVATE private libs...])
function(prefixd_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK;PRIVATE" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC prefixd_options ${ARG_LINK} PRIVATE ${ARG_PRIVATE})
endfunction()
