// Includes GoogleTest where it is installed, otherwise its small subset in mini_test.h, so that
// attention/ and gpu/ can be tested on a machine with only a compiler, CMake and CUDA.
#pragma once

#if defined(PREFIXD_HAVE_GTEST)
#include <gtest/gtest.h>
#else
#include "tests/support/mini_test.h"
#endif
