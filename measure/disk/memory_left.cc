#include "measure/disk/memory_left.h"

#include <fstream>
#include <string>

namespace prefixd::bench {

uint64_t AvailableMemory() {
  std::ifstream in("/proc/meminfo");
  std::string name, unit;
  for (uint64_t kib = 0; in >> name >> kib; std::getline(in, unit)) {
    if (name == "MemAvailable:") return kib << 10;
  }
  return 0;
}

}  // namespace prefixd::bench
