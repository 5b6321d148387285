# One interface library carries the compiler settings that every target shares.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Shared libraries of this build lie side by side, as they do when installed.
set(PREFIXD_LIBRARY_DIR ${CMAKE_BINARY_DIR}/lib)
set(PREFIXD_PROGRAM_DIR ${CMAKE_BINARY_DIR}/bin)
# Programs of this build find the embedded store where it is built; installing removes the path.
set(CMAKE_BUILD_RPATH ${PREFIXD_LIBRARY_DIR})
# Before 1.0 a minor version may change the interface.
set(PREFIXD_SOVERSION ${PROJECT_VERSION_MAJOR})
if(PREFIXD_SOVERSION EQUAL 0)
  set(PREFIXD_SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endif()

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # Precompiled headers need the sloppiness; an edited header is rebuilt all the same.
  # CCACHE_BASEDIR makes paths below the checkout relative, so that checkouts share compiled
  # objects.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}
    CCACHE_NOHASHDIR=1 ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${CCACHE_PROGRAM})
endif()

find_package(Threads REQUIRED)

add_library(prefixd_options INTERFACE)
target_include_directories(prefixd_options INTERFACE
  $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/include>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(prefixd_options INTERFACE cxx_std_20)
# Only this build uses the warnings; programs that link the installed libraries keep their own.
add_library(prefixd_warnings INTERFACE)
target_link_libraries(prefixd_options INTERFACE $<BUILD_INTERFACE:prefixd_warnings>)
target_compile_options(prefixd_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor
  # Options are written as designated initialisers that leave the rest at its default.
  -Wno-missing-field-initializers>)
# g++ 12 warns of impossible overlaps, overflows and bounds inside std::string and std::vector when
# it optimises (GCC bugs 105329, 105651 and 105762).
target_compile_options(prefixd_warnings INTERFACE
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-Wno-restrict;-Wno-stringop-overflow;-Wno-array-bounds>")
if(PREFIXD_WERROR)
  target_compile_options(prefixd_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
# A compiler that rarely collects its garbage is 5% faster and uses some 300 MB more.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(prefixd_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-expand=300>
    $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=524288>)
endif()
# A library that lacks a symbol is not linked. Clang's programs bring the sanitizers' own symbols.
set(PREFIXD_NO_UNDEFINED -Wl,--no-undefined)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # Debian 12's Asio takes Clang for one with coroutines of the technical specification alone.
  target_compile_definitions(prefixd_warnings INTERFACE
    BOOST_ASIO_HAS_CO_AWAIT BOOST_ASIO_HAS_STD_COROUTINE)
endif()
if(PREFIXD_SANITIZE)
  set(PREFIXD_NO_UNDEFINED)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${PREFIXD_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  if(PREFIXD_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # g++ leaves out the search for pointers to variables of functions that have returned, too, unless
    # it is asked for at run time: it copies stacks at every call.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize-address-use-after-return=never>)
  endif()
  if(PREFIXD_SANITIZE MATCHES "undefined")
    # The address sanitizer finds null pointers that are used, and object-size sees little without
    # optimisation: the two take a quarter of the time to compile.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=null$<COMMA>object-size>)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
      # It takes one type in two libraries, neither of which shows it, for two types.
      add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=function>)
    endif()
  endif()
  # The sanitizer's dlopen does not search the caller's RUNPATH. The older RPATH of a program holds
  # for everything that the program loads.
  add_link_options(-fsanitize=${PREFIXD_SANITIZE} -Wl,--disable-new-dtags)
  # A sanitized test has 230 MB, a hundred are linked, and GNU's linker takes four times as long.
  find_program(MOLD_PROGRAM mold)
  if(MOLD_PROGRAM)
    add_link_options(-fuse-ld=mold)
  endif()
endif()
