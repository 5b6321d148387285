// Encodes and checks what lies in a slot of a ring (step_ring.h): the steps of one call, and then,
// in the same place, their answers. docs/protocol.md has the layout.
//
// Either side may change the slot at any time, so the daemon decodes a copy. Nothing here does I/O,
// throws or keeps memory. Thread-safety: plain values and pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "prefixd/session_info.h"

namespace prefixd::wire {

// Raise it when anything below changes, or the members of Ledger.
inline constexpr uint32_t kStepFrameVersion = 4;
inline constexpr uint32_t kMaxStepsPerFrame = 256;
inline constexpr size_t kStepHeaderBytes = 32;
inline constexpr size_t kStepEntryBytes = 48;
inline constexpr size_t kStepResultBytes = 16;

struct StepHeader {
  uint32_t n_steps = 0;      // 1 to kMaxStepsPerFrame
  uint32_t bytes = 0;        // of the whole request
  uint32_t deadline_ms = 0;  // from now; 0: none
  uint32_t spin_us = 0;      // asks the daemon to poll for the next call so long
  bool operator==(const StepHeader&) const = default;
};

struct StepEntry {
  uint64_t session = 0;  // handle
  uint32_t layer = 0;
  bool info = false;                              // whether a StepInfo is wanted
  uint32_t q_size = 0, y_size = 0, lse_size = 0;  // floats
  uint32_t tail_bytes = 0;  // room for the StepInfo, or for an error's message
  HeadRange heads;
  bool append = false;                // appends an own token first
  uint32_t k_bytes = 0, v_bytes = 0;  // of its row; 0 unless it appends
  bool operator==(const StepEntry&) const = default;
};

// Says where the tensors of a call lie; add its entries in their order. Positions are multiples of
// kTensorAlignment.
class StepLayout {
 public:
  struct Places {
    uint64_t q = 0, k = 0, v = 0;       // in the request
    uint64_t y = 0, lse = 0, tail = 0;  // in the answer
  };
  explicit StepLayout(uint32_t n_steps);
  Places Add(const StepEntry& entry);
  uint64_t request_bytes() const { return request_; }
  uint64_t answer_bytes() const { return answer_; }

 private:
  uint64_t request_, answer_;
};

void EncodeStepHeader(const StepHeader& header, std::span<std::byte, kStepHeaderBytes> at);
void EncodeStepEntry(const StepEntry& entry, std::span<std::byte, kStepEntryBytes> at);
// kInvalidArgument for another version, unknown flags, or numbers that no slot of so many bytes can
// hold: the caller may copy header->bytes.
Result<StepHeader> DecodeStepHeader(std::span<const std::byte, kStepHeaderBytes> bytes,
                                    uint64_t slot_bytes);
// Decodes all entries of a request of header.bytes, into a place for each. kInvalidArgument unless
// the request has exactly the bytes that its entries ask for, and the answer fits into the slot.
Status DecodeStepEntries(std::span<const std::byte> request, const StepHeader& header,
                         uint64_t slot_bytes, std::span<StepEntry> entries);

// What became of a call, or of one of its steps.
struct StepOutcome {
  uint32_t code = 0;            // 0: done; else 1 + the place of the error's Code
  uint32_t retry_after_ms = 0;  // Error::retry_after_ms
  uint32_t tail_bytes = 0;      // of the message, or of the StepInfo
  bool ok() const { return code == 0; }
};
// The first kStepHeaderBytes of an answer: the number of steps, and what became of the call as a
// whole. The message of an error lies behind it; else kStepResultBytes for each step.
void EncodeAnswer(uint32_t n_steps, const StepOutcome& outcome,
                  std::span<std::byte, kStepHeaderBytes> at);
// kUnavailable when it is no answer to a call of so many steps.
Result<StepOutcome> DecodeAnswer(std::span<const std::byte, kStepHeaderBytes> bytes,
                                 uint32_t n_steps);
void EncodeOutcome(const StepOutcome& outcome, std::span<std::byte, kStepResultBytes> at);
StepOutcome DecodeOutcome(std::span<const std::byte, kStepResultBytes> bytes);

// Writes the message, cut to the room. An outcome that is no error decodes to kInternal.
StepOutcome EncodeError(const Error& error, std::span<std::byte> room);
Error DecodeError(const StepOutcome& outcome, std::span<const std::byte> tail);

// Returns a room that holds the StepInfo of a step with so many heads.
uint32_t StepInfoRoom(uint32_t n_kv_heads, uint32_t n_q_heads);
// kInternal when the room is too small.
Result<uint32_t> EncodeStepInfo(const StepInfo& info, std::span<std::byte> room);
// kUnavailable when the bytes are no StepInfo. Allocates nothing when *info had as many elements.
Status DecodeStepInfo(std::span<const std::byte> bytes, StepInfo* info);

}  // namespace prefixd::wire
