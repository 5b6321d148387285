// Estimates how long the ways to the keys and values of a matched prompt take on this machine, and
// names the fastest. What nobody has measured or given stays unknown.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd {

// What an engine says of itself when it asks for an estimate.
struct EngineSpeed {
  // Its prefill rate. 0: not given; then the store takes what it has learnt from the tenant's puts
  // that stream a prefill (PutSpec::prefill_from).
  double prefill_tokens_per_second = 0;
  uint32_t cached_tokens =
      0;  // the prompt's first tokens that it has already: nothing is estimated
  uint32_t answer_tokens = 0;  // that it expects to generate over an attached prefix; 0: unknown
  bool operator==(const EngineSpeed&) const = default;
};
// kInvalidArgument: the rate is below 0 or not finite.
Status CheckEngineSpeed(const EngineSpeed& engine);

enum class EstimateSource : uint8_t {
  kUnknown = 0,
  kMeasured = 1,  // by this process, lately
  kEarlier = 2,   // by the process that had the store open before
  kGiven = 3,     // by the engine
  kLearnt = 4,    // from puts that streamed a prefill: no more than the engine's rate
};
inline constexpr size_t kEstimateSources = 5;
std::string_view EstimateSourceName(EstimateSource source);  // "unknown", "measured", ...

struct TimeEstimate {
  double seconds = 0;
  EstimateSource source = EstimateSource::kUnknown;
  bool known() const { return source != EstimateSource::kUnknown; }
  bool operator==(const TimeEstimate&) const = default;
};

enum class ReuseAdvice : uint8_t {
  kUnknown = 0,  // there is nothing to compare: use what is stored
  kRestore = 1,
  kAttach = 2,  // and retrieve
  kRecompute = 3,
};
inline constexpr size_t kReuseAdvices = 4;
std::string_view ReuseAdviceName(ReuseAdvice advice);  // "unknown", "restore", ...

struct ReuseEstimate {
  uint32_t tokens = 0;  // matched, behind those that the engine has: what follows is for these
  // The bytes of their rows: so many lie in the host tier, the others are read from the disk.
  uint64_t memory_bytes = 0, disk_bytes = 0;
  // Reading all of them for the engine's own cache: opening the prefix (a match's estimate; an
  // attach has done it) and its rows, at the rates of the store's own last restores. The way from
  // the store to the engine is not in it.
  TimeEstimate restore;
  // A step over the whole prefix in mode retrieve, summed over layers: what each generated token
  // costs. Measured in the tenant's own steps with this model over prefixes of a similar length,
  // under whatever policy they had.
  TimeEstimate retrieve;
  TimeEstimate recompute;  // linear in tokens, though attention's part grows with the length
  double prefill_tokens_per_second = 0;  // the rate behind it; 0: unknown
  ReuseAdvice advice = ReuseAdvice::kUnknown;
  bool operator==(const ReuseEstimate&) const = default;
};

// Returns the fastest of the ways that are known, if at least two are; attaching, with
// answer_tokens above 0, takes a step for each of these. kRecompute only where restoring is known
// to be slower.
ReuseAdvice FastestWay(const ReuseEstimate& estimate, uint32_t answer_tokens);

}  // namespace prefixd
