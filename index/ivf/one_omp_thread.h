// Libraries that parallelise with OpenMP kept to the calling thread. Internal to index/.
#pragma once

#include <omp.h>

namespace prefixd::index {

// The limit is a property of the calling thread's OpenMP environment, not of the process, and is
// put back.
class OneOmpThread {
 public:
  OneOmpThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneOmpThread() { omp_set_num_threads(before_); }
  OneOmpThread(const OneOmpThread&) = delete;
  OneOmpThread& operator=(const OneOmpThread&) = delete;

 private:
  int before_;
};

}  // namespace prefixd::index
