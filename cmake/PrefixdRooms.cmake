# The libraries that a target links decide which headers it may include: each library shows its
# headers through its own folder of links, and no target has the source tree on its include path.
# tests/layering checks the same from the #include lines.

# prefixd_headers(TARGET PATH...) shows folders or files (relative to the source tree) to the target
# and to those that link it, by the names in #include lines.
function(prefixd_headers target)
  set(root ${CMAKE_BINARY_DIR}/rooms/${target})
  foreach(path ${ARGN})
    if(NOT EXISTS ${root}/${path})
      cmake_path(GET path PARENT_PATH parent)
      file(MAKE_DIRECTORY ${root}/${parent})
      file(CREATE_LINK ${CMAKE_SOURCE_DIR}/${path} ${root}/${path} SYMBOLIC)
    endif()
  endforeach()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE" OR type STREQUAL "MODULE_LIBRARY")
    target_include_directories(${target} PRIVATE ${root})
  else()
    target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${root}>)
  endif()
endfunction()

# prefixd_compile_together(TARGET): compiling files together saves time, since half of a small file's
# time goes into headers that it shares with its neighbours. A dozen at a time keeps many cores
# busy; few cores are busy with three dozen, which take a sixth less, a quarter under sanitizers
# (docs/decisions/034). Both divide a room at the same files: what compiles in the large units does
# in the small ones.
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
set(PREFIXD_UNITY_FILES 12)
if(cores LESS_EQUAL 4)
  set(PREFIXD_UNITY_FILES 36)
endif()
function(prefixd_compile_together target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${PREFIXD_UNITY}
    UNITY_BUILD_BATCH_SIZE ${PREFIXD_UNITY_FILES})
endfunction()

# prefixd_library(NAME SOURCES... [LINK public libs...] [PRIVATE private libs...]
#                 [HEADERS paths that it shows; else all of its room])
function(prefixd_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK;PRIVATE;HEADERS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  prefixd_compile_together(${name})
  target_link_libraries(${name} PUBLIC prefixd_options ${ARG_LINK} PRIVATE ${ARG_PRIVATE})
  if(NOT ARG_HEADERS)
    cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR BASE_DIRECTORY ${CMAKE_SOURCE_DIR}
      OUTPUT_VARIABLE ARG_HEADERS)
  endif()
  prefixd_headers(${name} ${ARG_HEADERS})
endfunction()

# prefixd_optimise_sanitized(TARGET): sanitizer builds compile without optimisation, in less than half
# of the time, but for what computes, whose tests would wait for it.
function(prefixd_optimise_sanitized target)
  if(PREFIXD_SANITIZE AND NOT PREFIXD_FUZZ)
    target_compile_options(${target} PRIVATE -O1)
  endif()
endfunction()
