// Defines the function that libFuzzer calls.
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  prefixd::fuzz::RunOne(in);
  return 0;
}
