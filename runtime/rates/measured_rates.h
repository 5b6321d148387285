// Measures how fast this store restores rows and steps, and learns how fast engines prefill. What
// reads of the disk and of memory take is common to all tenants; steps and prefills are kept by
// tenant, so that nobody learns from an estimate what others do, or changes it.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>

#include "prefixd/estimate.h"
#include "prefixd/result.h"

namespace prefixd {

struct Rate {
  double value = 0;
  EstimateSource source = EstimateSource::kUnknown;
  bool known() const { return source != EstimateSource::kUnknown; }
};

class MeasuredRates {
 public:
  using Clock = std::chrono::steady_clock;
  // Reads that are older say nothing of the next one. An engine that is advised to compute would
  // otherwise never restore again, and never learn that the disk is fast by now.
  static constexpr std::chrono::minutes kForgetReads{10};
  // Averages of the last so many bytes, layer steps and tokens count for most of a rate.
  static constexpr double kReadWindow = 256 << 20, kStepWindow = 256, kPrefillWindow = 32768;
  // Tenants' steps and prefills that are kept; those not changed for longest go first.
  static constexpr size_t kMaxEntries = 4096;

  // A restore read rows, so many stored bytes of them out of the host tier and from the disk.
  void NoteRead(uint64_t host_bytes, uint64_t disk_bytes, double seconds,
                Clock::time_point now = Clock::now());
  // A prefix was opened for restoring.
  void NoteOpen(double seconds, Clock::time_point now = Clock::now());
  // A step of one layer in mode retrieve.
  void NoteStep(std::string_view tenant, std::string_view model, uint32_t n_tokens, double seconds);
  // So many tokens were prefilled in all layers while they were stored, in `seconds` or less.
  void NotePrefill(std::string_view tenant, std::string_view model, double tokens, double seconds);

  // Bytes per second.
  Rate Host(Clock::time_point now = Clock::now()) const;
  Rate Disk(Clock::time_point now = Clock::now()) const;
  // Seconds.
  Rate Open(Clock::time_point now = Clock::now()) const;
  // Seconds of one layer's step over prefixes of n_tokens or up to a factor of two more or fewer.
  Rate Step(std::string_view tenant, std::string_view model, uint32_t n_tokens) const;
  // Tokens per second.
  Rate Prefill(std::string_view tenant, std::string_view model) const;

  // Whether anything was noted since the last Save, and all that is known, as text for Load.
  bool changed() const;
  std::string Save();
  // Takes what an earlier process saved, until this one has measured the same; of text that is
  // malformed what can be read, or nothing.
  void Load(std::string_view text, Clock::time_point now = Clock::now());

 private:
  // Decayed sums: amount / weight is the average, of bytes over seconds or of seconds over opens.
  struct Sums {
    double amount = 0, weight = 0;
    bool earlier = false;
    Clock::time_point at{};
    bool known() const { return amount > 0 && weight > 0; }
  };
  struct Average {
    double value = 0, weight = 0;
    bool earlier = false;
    uint64_t changed = 0;  // clock_ when it last changed
  };
  enum class Kind : uint8_t { kPrefill, kStep };
  // Kind, tenant, model, and of a step the logarithm of its prefix's length.
  using Key = std::tuple<Kind, std::string, std::string, uint32_t>;
  using KeyView = std::tuple<Kind, std::string_view, std::string_view, uint32_t>;

  static void Add(Sums& sums, double amount, double weight, double keep, Clock::time_point now);
  static Rate RateOf(const Sums& sums, Clock::time_point now);
  void Note(const KeyView& key, double value, double weight, double window);
  Rate Find(const KeyView& key, EstimateSource own) const;
  Average& Entry(const KeyView& key);  // makes room; mutex_ is held
  static uint32_t LengthClass(uint32_t n_tokens);

  mutable std::mutex mutex_;
  Sums host_, disk_;  // bytes over seconds
  Sums open_;         // seconds over opens
  std::map<Key, Average, std::less<>> entries_;
  uint64_t clock_ = 0;
  bool changed_ = false;
};

}  // namespace prefixd
