# prefixd_test(NAME SOURCES... LINK libs... [LABELS unit|e2e|gpu|fuzz|threads ...] [TIMEOUT seconds]
#              [SHARDS n: ctest runs it as n tests beside each other, a part of its cases each])
# Tests of attention/ and gpu/ include "tests/support/test.h". It is GoogleTest where that is
# installed, and a small subset of it on machines that have only a compiler.
find_package(GTest QUIET)
# The tests' own files take two thirds of the time to compile so. What they test is optimised
# as the preset says, and watched for undefined behaviour; a test's own code is not.
set(PREFIXD_TEST_OPTIONS)
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  set(PREFIXD_TEST_OPTIONS -O0)
elseif(PREFIXD_SANITIZE MATCHES "undefined")
  set(PREFIXD_TEST_OPTIONS -fno-sanitize=undefined)
endif()
if(TARGET GTest::gtest)
  # This is an executable so that its code is position-independent like that of the tests that use
  # the header.
  add_executable(prefixd_test_headers EXCLUDE_FROM_ALL
    ${CMAKE_SOURCE_DIR}/tests/support/precompiled.cc)
  target_link_libraries(prefixd_test_headers PRIVATE prefixd_options GTest::gtest)
  target_compile_options(prefixd_test_headers PRIVATE ${PREFIXD_TEST_OPTIONS})
  prefixd_headers(prefixd_test_headers tests)
  target_precompile_headers(prefixd_test_headers PRIVATE
    ${CMAKE_SOURCE_DIR}/tests/support/precompiled.h)
  # A precompiled header names its checkout's files: another checkout's, out of the cache, would
  # define everything twice.
  set_target_properties(prefixd_test_headers PROPERTIES CXX_COMPILER_LAUNCHER "")
endif()
# Sanitizers run these tests; programs that only tests of processes need are not built for them.
add_custom_target(prefixd_unit_tests)
# The thread sanitizer runs the tests with the label "threads", which have more than one thread: all
# of storage/ (its I/O has threads) and runtime/, and the parts of other rooms that threads share.
# attention/, base/, tensors/, decoder/ and the codec of protocol/ have no threads.
add_custom_target(prefixd_threaded_tests)
# prefixd_shards(NAME COUNT) sets PREFIXD_SHARDS to the names of the parts, and
# PREFIXD_SHARD_ENVIRONMENTS to what GoogleTest is told in each, with commas; one part without a
# count.
function(prefixd_shards name count)
  if(NOT count)
    set(PREFIXD_SHARDS ${name} PARENT_SCOPE)
    set(PREFIXD_SHARD_ENVIRONMENTS "" PARENT_SCOPE)
    return()
  endif()
  set(names)
  set(environments)
  foreach(shard RANGE 1 ${count})
    math(EXPR index "${shard} - 1")
    list(APPEND names ${name}_${shard})
    list(APPEND environments "GTEST_TOTAL_SHARDS=${count},GTEST_SHARD_INDEX=${index}")
  endforeach()
  set(PREFIXD_SHARDS ${names} PARENT_SCOPE)
  set(PREFIXD_SHARD_ENVIRONMENTS ${environments} PARENT_SCOPE)
endfunction()
function(prefixd_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;SHARDS" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(PREFIXD_SANITIZE)
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 4")  # sanitizers take several times as long
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE prefixd_options ${ARG_LINK})
  prefixd_headers(${name} tests)
  target_compile_definitions(${name} PRIVATE PREFIXD_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  target_compile_options(${name} PRIVATE ${PREFIXD_TEST_OPTIONS})
  if(TARGET GTest::gtest_main)
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
    target_compile_definitions(${name} PRIVATE PREFIXD_HAVE_GTEST=1)
    target_precompile_headers(${name} REUSE_FROM prefixd_test_headers)
    # mini_test.h names what it registers by lines of a file.
    prefixd_compile_together(${name})
  else()
    target_sources(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests/support/mini_test_main.cc)
  endif()
  if("unit" IN_LIST ARG_LABELS)
    add_dependencies(prefixd_unit_tests ${name})
  endif()
  if("threads" IN_LIST ARG_LABELS)
    add_dependencies(prefixd_threaded_tests ${name})
  endif()
  prefixd_shards(${name} "${ARG_SHARDS}")
  foreach(test environment IN ZIP_LISTS PREFIXD_SHARDS PREFIXD_SHARD_ENVIRONMENTS)
    string(REPLACE "," ";" environment "${environment}")
    # The disk's part is tested without sanitizers; half of these tests' time would be waits for it.
    if(PREFIXD_SANITIZE AND EXISTS /dev/shm AND name MATCHES "^(storage|runtime)_")
      list(APPEND environment TMPDIR=/dev/shm)
    endif()
    add_test(NAME ${test} COMMAND ${name})
    # Those that may take longest begin, so that no core waits for them at the end.
    set_tests_properties(${test} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
      COST ${ARG_TIMEOUT} ENVIRONMENT "${environment}")
  endforeach()
endfunction()

# Most tests of stores hold for encrypted ones, too. prefixd_test_with_key(NAME [SHARDS n]
# [EXCEPT patterns...]) runs the tests of a program once more with a key; EXCEPT: those that cannot
# hold with one. They have the label "encryption" alone: sanitizers run their code without a key.
# Their stores lie in memory, which takes a fifth of the time: the disk's part is tested without a
# key.
set(PREFIXD_TEST_KEY_FILE ${CMAKE_BINARY_DIR}/tests/store.key)
string(REPEAT "5c" 32 key)
file(WRITE ${PREFIXD_TEST_KEY_FILE} "${key}\n")
file(CHMOD ${PREFIXD_TEST_KEY_FILE} PERMISSIONS OWNER_READ OWNER_WRITE)
set(PREFIXD_WITH_KEY PREFIXD_TEST_KEY_FILE=${PREFIXD_TEST_KEY_FILE})
if(EXISTS /dev/shm)
  list(APPEND PREFIXD_WITH_KEY TMPDIR=/dev/shm)
endif()
function(prefixd_test_with_key name)
  cmake_parse_arguments(ARG "" "SHARDS" "EXCEPT" ${ARGN})
  if(NOT TARGET GTest::gtest OR PREFIXD_SANITIZE)
    return()
  endif()
  set(filter)
  if(ARG_EXCEPT)
    list(JOIN ARG_EXCEPT ":" except)
    set(filter --gtest_filter=-${except})
  endif()
  prefixd_shards(${name}_with_key "${ARG_SHARDS}")
  foreach(test environment IN ZIP_LISTS PREFIXD_SHARDS PREFIXD_SHARD_ENVIRONMENTS)
    string(REPLACE "," ";" environment "${environment}")
    add_test(NAME ${test} COMMAND ${name} ${filter})
    set_tests_properties(${test} PROPERTIES LABELS encryption TIMEOUT 300
      ENVIRONMENT "${PREFIXD_WITH_KEY};${environment}")
  endforeach()
endfunction()
