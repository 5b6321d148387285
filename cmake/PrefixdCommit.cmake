# Runs at every build: writes OUTPUT (commit.h) with the commit of SOURCE, and leaves the file alone
# when nothing changed. COMMIT replaces git's answer where it is given (packages are built without
# git).
cmake_policy(VERSION 3.25)
if(NOT COMMIT)
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty=\ with\ changes --exclude=*
    OUTPUT_VARIABLE COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT COMMIT)
  set(COMMIT unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT
  "#define PREFIXD_COMMIT \"@COMMIT@\"\n#define PREFIXD_BUILD \"@BUILD@\"\n")
