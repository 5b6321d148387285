#include "runtime/rates/measured_rates.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/capture_errors.h"

namespace prefixd {
namespace {

using Json = nlohmann::json;

constexpr double kOpenKeep = 15.0 / 16;  // of what was known before an open
constexpr int kVersion = 1;              // of the text that Save returns
constexpr double kMaxLengthClass = 32;
constexpr const char *kHost = "host_bytes_per_second", *kDisk = "disk_bytes_per_second",
                     *kOpen = "open_seconds";
// A read counts for the disk only where most of it came from there.
constexpr double kMostlyDisk = 0.5;

bool Usable(double x) { return std::isfinite(x) && x > 0; }

double NumberIn(const Json& json, const char* name) {
  const auto it = json.find(name);
  return it != json.end() && it->is_number() && Usable(it->get<double>()) ? it->get<double>() : 0;
}

std::string TextIn(const Json& json, const char* name) {
  const auto it = json.find(name);
  return it != json.end() && it->is_string() ? it->get<std::string>() : std::string();
}

}  // namespace

uint32_t MeasuredRates::LengthClass(uint32_t n_tokens) {
  return static_cast<uint32_t>(std::bit_width(n_tokens));
}

void MeasuredRates::Add(Sums& sums, double amount, double weight, double keep,
                        Clock::time_point now) {
  if (sums.earlier || now - sums.at > kForgetReads) sums = {};
  sums.amount = sums.amount * keep + amount;
  sums.weight = sums.weight * keep + weight;
  sums.at = now;
}

void MeasuredRates::NoteRead(uint64_t host_bytes, uint64_t disk_bytes, double seconds,
                             Clock::time_point now) {
  const double all = double(host_bytes) + double(disk_bytes);
  if (all <= 0 || !Usable(seconds)) return;
  const double keep = std::exp(-all / kReadWindow);
  std::lock_guard lock(mutex_);
  if (disk_bytes == 0) {
    Add(host_, double(host_bytes), seconds, keep, now);
  } else if (double(disk_bytes) >= kMostlyDisk * all) {
    // The part from memory is taken away where its rate is known, and else counts as read from the
    // disk: reading it cannot have taken longer.
    const Rate memory = RateOf(host_, now);
    const double rest = memory.known() ? seconds - double(host_bytes) / memory.value : 0;
    Add(disk_, rest > 0 ? double(disk_bytes) : all, rest > 0 ? rest : seconds, keep, now);
  } else {
    return;
  }
  changed_ = true;
}

void MeasuredRates::NoteOpen(double seconds, Clock::time_point now) {
  if (!Usable(seconds)) return;
  std::lock_guard lock(mutex_);
  Add(open_, seconds, 1, kOpenKeep, now);
  changed_ = true;
}

void MeasuredRates::NoteStep(std::string_view tenant, std::string_view model, uint32_t n_tokens,
                             double seconds) {
  if (!Usable(seconds)) return;
  Note({Kind::kStep, tenant, model, LengthClass(n_tokens)}, seconds, 1, kStepWindow);
}

void MeasuredRates::NotePrefill(std::string_view tenant, std::string_view model, double tokens,
                                double seconds) {
  if (!Usable(tokens) || !Usable(seconds)) return;
  // Rates are averaged, not times: an engine that stood still in the middle of one prompt would
  // otherwise count for all of that time.
  Note({Kind::kPrefill, tenant, model, 0}, tokens / seconds, tokens, kPrefillWindow);
}

void MeasuredRates::Note(const KeyView& key, double value, double weight, double window) {
  // Where there is no memory for an entry, the call that it is about is none the worse.
  static_cast<void>(CaptureErrors([&]() -> Status {
    std::lock_guard lock(mutex_);
    Average& average = Entry(key);
    if (average.earlier) average = {};
    average.weight = std::min(average.weight + weight, std::max(window, weight));
    average.value += (value - average.value) * weight / average.weight;
    average.changed = ++clock_;
    changed_ = true;
    return {};
  }));
}

MeasuredRates::Average& MeasuredRates::Entry(const KeyView& key) {
  if (const auto it = entries_.find(key); it != entries_.end()) return it->second;
  if (entries_.size() >= kMaxEntries) {
    entries_.erase(std::ranges::min_element(
        entries_, {}, [](const auto& entry) { return entry.second.changed; }));
  }
  const auto& [kind, tenant, model, length] = key;
  return entries_[Key(kind, tenant, model, length)];
}

Rate MeasuredRates::RateOf(const Sums& sums, Clock::time_point now) {
  if (!sums.known() || now - sums.at > kForgetReads) return {};
  return {sums.amount / sums.weight,
          sums.earlier ? EstimateSource::kEarlier : EstimateSource::kMeasured};
}

Rate MeasuredRates::Host(Clock::time_point now) const {
  std::lock_guard lock(mutex_);
  return RateOf(host_, now);
}

Rate MeasuredRates::Disk(Clock::time_point now) const {
  std::lock_guard lock(mutex_);
  return RateOf(disk_, now);
}

Rate MeasuredRates::Open(Clock::time_point now) const {
  std::lock_guard lock(mutex_);
  return RateOf(open_, now);
}

Rate MeasuredRates::Find(const KeyView& key, EstimateSource own) const {
  std::lock_guard lock(mutex_);
  const auto it = entries_.find(key);
  if (it == entries_.end() || it->second.value <= 0) return {};
  return {it->second.value, it->second.earlier ? EstimateSource::kEarlier : own};
}

Rate MeasuredRates::Step(std::string_view tenant, std::string_view model, uint32_t n_tokens) const {
  return Find({Kind::kStep, tenant, model, LengthClass(n_tokens)}, EstimateSource::kMeasured);
}

Rate MeasuredRates::Prefill(std::string_view tenant, std::string_view model) const {
  return Find({Kind::kPrefill, tenant, model, 0}, EstimateSource::kLearnt);
}

bool MeasuredRates::changed() const {
  std::lock_guard lock(mutex_);
  return changed_;
}

std::string MeasuredRates::Save() {
  std::lock_guard lock(mutex_);
  changed_ = false;
  Json json = {{"version", kVersion}, {"entries", Json::array()}};
  const auto rate = [&](const char* name, const Sums& sums) {
    if (sums.known()) json[name] = sums.amount / sums.weight;
  };
  rate(kHost, host_);
  rate(kDisk, disk_);
  rate(kOpen, open_);
  for (const auto& [key, average] : entries_) {
    const auto& [kind, tenant, model, length] = key;
    json["entries"].push_back({{"step", kind == Kind::kStep},
                               {"tenant", tenant},
                               {"model", model},
                               {"length", length},
                               {"value", average.value}});
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void MeasuredRates::Load(std::string_view text, Clock::time_point now) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || NumberIn(json, "version") != kVersion) return;
  std::lock_guard lock(mutex_);
  const auto rate = [&](const char* name, Sums& sums) {
    const double value = NumberIn(json, name);
    if (value > 0 && !sums.known()) sums = {value, 1, true, now};
  };
  rate(kHost, host_);
  rate(kDisk, disk_);
  rate(kOpen, open_);
  const auto entries = json.find("entries");
  if (entries == json.end() || !entries->is_array()) return;
  for (const Json& entry : *entries) {
    if (!entry.is_object() || NumberIn(entry, "value") == 0) continue;
    const bool step = entry.value("step", Json()) == Json(true);
    const std::string tenant = TextIn(entry, "tenant"), model = TextIn(entry, "model");
    const double length = NumberIn(entry, "length");
    if (length > kMaxLengthClass || entries_.size() >= kMaxEntries) continue;
    Average& average =
        Entry({step ? Kind::kStep : Kind::kPrefill, tenant, model, static_cast<uint32_t>(length)});
    if (average.weight == 0) average = {NumberIn(entry, "value"), 1, true, ++clock_};
  }
}

}  // namespace prefixd
