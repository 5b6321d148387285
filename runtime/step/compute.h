// Computes group steps, and exact attention of a question's tokens: on the CPU with attention/, or
// with CUDA where the build has it and a device answers.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "attention/step/step.h"
#include "prefixd/result.h"

namespace prefixd {

class Compute {
 public:
  // wanted: "cpu"; "cuda", steps and questions on the device (kUnavailable when there is none); or
  // "auto", questions on a device where there is one and steps on the CPU, which has the rows
  // (docs/decisions/057-steps-stay-on-the-cpu.md).
  static Result<std::unique_ptr<Compute>> Open(std::string_view wanted);
  virtual ~Compute() = default;
  // "cpu", "cuda: <device>", or "cpu, questions on cuda: <device>".
  virtual std::string name() const = 0;
  virtual bool steps_on_device() const { return false; }
  // Same contract as GroupStep (attention/step/step.h). owner: while it lives, nothing that `in`
  // points to changes, except the retrieved rows and what else each step brings, so a device may
  // keep a copy; null: everything may change.
  virtual Status Step(const GroupStepInput& in, const GroupStepOutput& out,
                      const std::shared_ptr<const void>& owner) = 0;
  // Whether Step reads GroupStepInput::retrieved_scores; a device computes these scores itself.
  bool takes_scores() const { return !steps_on_device(); }
  // Whether rows that several steps read are worth a contiguous copy.
  bool wants_rows_together() const { return !steps_on_device(); }
  // Queries that AttendExact takes at a time for the price of few: a device brings the rows over
  // for each call anew.
  virtual uint32_t queries_at_once() const { return 1; }
  // Same contract as ExactAttention (attention/step/step.h).
  virtual Status AttendExact(std::span<const float> queries, uint32_t n_queries,
                             const LayerGeometry& layer, const RowsView& rows, std::span<float> y,
                             std::span<float> lse) = 0;
};

}  // namespace prefixd
