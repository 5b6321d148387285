// Tells how much of a machine others worked on while something was measured.
//
// Thread-safety: one thread at a time.
#pragma once

#include <string>

namespace prefixd::bench {

class OtherWork {
 public:
  OtherWork();
  // Since it was made: the part of all cores' time that neither this process nor children that it
  // has waited for took, hypervisors' included; 0 where the kernel does not tell.
  double Share() const;

 private:
  struct Times {
    double all = 0, busy = 0, own = 0;  // seconds of all cores
  };
  static Times Now();
  Times begun_;
};

// The sentence for a verdict; empty where others took too little to matter.
std::string DisturbedBy(double share);

}  // namespace prefixd::bench
