// Tells how much of a machine others worked on while something was measured.
//
// Thread-safety: one thread at a time.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <utility>

namespace prefixd::bench {

class OtherWork {
 public:
  // `proc`: where the kernel tells of itself.
  explicit OtherWork(std::filesystem::path proc = "/proc");
  // Since it was made: the part of all cores' time that neither this process nor children that it
  // has waited for took, hypervisors' included; 0 where the kernel does not tell. Interrupts and
  // the kernel's own threads are nobody's: a run that reads and writes keeps them busy itself.
  double Share() const;

 private:
  using KernelThreads = std::map<std::pair<int, std::string>, double>;  // pid and start: seconds
  struct Times {
    double all = 0, busy = 0, own = 0;  // seconds of all cores
    KernelThreads kernel;
  };
  KernelThreads ReadKernelThreads() const;
  Times Now() const;

  const std::filesystem::path proc_;
  const Times begun_;
};

// The sentence for a verdict; empty where others took too little to matter.
std::string DisturbedBy(double share);

}  // namespace prefixd::bench
