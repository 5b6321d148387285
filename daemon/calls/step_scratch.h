// What a thread that serves rings keeps between steps. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/memory_budget.h"
#include "prefixd/store.h"
#include "protocol/step_frame.h"

namespace prefixd::daemon {

// What one thread keeps from step to step, so that steps through a ring allocate nothing here.
struct StepScratch {
  explicit StepScratch(const MemoryAccount& account)
      : memory(account.Charge(MemoryKind::kMessages)) {}
  std::vector<std::byte> request;  // a private copy
  std::vector<wire::StepEntry> entries;
  std::vector<std::shared_ptr<Session>> sessions;
  std::vector<StepInfo> infos;
  std::vector<StepRequest> steps;
  std::vector<float> answers;  // y and lse of all steps
  MemoryCharge memory;
};
struct StepServed {
  bool ok = false;  // false: the call was refused as a whole, or a step of it failed
  uint32_t steps = 0;
  uint32_t spin_us = 0;  // StepHeader::spin_us
};

}  // namespace prefixd::daemon
