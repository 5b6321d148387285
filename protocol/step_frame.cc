#include "protocol/step_frame.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/tables/statistics.h"
#include "protocol/frame.h"

namespace prefixd::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors travel as they lie in memory");
static_assert(static_cast<uint32_t>(Code::kInternal) == 11,
              "codes travel by their place: raise kStepFrameVersion, mend docs/protocol.md");

constexpr uint32_t kInfoWanted = 1, kAppends = 2;
constexpr uint32_t kCodes = static_cast<uint32_t>(Code::kInternal) + 1;

constexpr uint64_t Aligned(uint64_t n) {
  return (n + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

template <typename T>
void StoreRaw(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof(value));
}
template <typename T>
T LoadRaw(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

// Visits every number of a ledger, in the order of its table.
template <typename L, typename F>
void ForEachNumber(L& ledger, const F& f) {
  ForEachStatistic<Ledger>([&](const auto& statistic) {
    auto& member = ledger.*statistic.member;
    if constexpr (requires { member.size(); }) {
      for (auto& part : member) f(part);
    } else {
      f(member);
    }
  });
}
constexpr uint32_t kLedgerNumbers = sizeof(Ledger) / sizeof(uint64_t);
static_assert(kLedgerNumbers == 21 + kEstimatorKinds + kTierCount - 1,
              "raise kStepFrameVersion when Ledger changes");

// k, the three counts, and the ledger.
constexpr size_t kInfoHead = 4 * sizeof(uint32_t) + kLedgerNumbers * sizeof(uint64_t);
constexpr size_t kMissingBytes = 16;

uint64_t InfoBytes(uint64_t heads, uint64_t shares, uint64_t missing) {
  return kInfoHead + heads * sizeof(uint32_t) + shares * sizeof(float) + missing * kMissingBytes;
}

Error NoAnswer(const char* why) {
  return {Code::kUnavailable, std::string("the daemon sent a malformed answer to a step: ") + why};
}

}  // namespace

StepLayout::StepLayout(uint32_t n_steps)
    : request_(Aligned(kStepHeaderBytes + uint64_t{n_steps} * kStepEntryBytes)),
      answer_(Aligned(kStepHeaderBytes + uint64_t{n_steps} * kStepResultBytes)) {}

StepLayout::Places StepLayout::Add(const StepEntry& entry) {
  const auto take = [](uint64_t* end, uint64_t bytes) {
    const uint64_t at = *end;
    *end += Aligned(bytes);
    return at;
  };
  Places places;
  places.q = take(&request_, uint64_t{entry.q_size} * sizeof(float));
  places.k = take(&request_, entry.k_bytes);
  places.v = take(&request_, entry.v_bytes);
  places.y = take(&answer_, uint64_t{entry.y_size} * sizeof(float));
  places.lse = take(&answer_, uint64_t{entry.lse_size} * sizeof(float));
  places.tail = take(&answer_, entry.tail_bytes);
  return places;
}

void EncodeStepHeader(const StepHeader& header, std::span<std::byte, kStepHeaderBytes> at) {
  std::ranges::fill(at, std::byte{0});
  StoreRaw(&at[0], kStepFrameVersion);
  StoreRaw(&at[4], uint32_t{0});  // flags
  StoreRaw(&at[8], header.n_steps);
  StoreRaw(&at[12], header.bytes);
  StoreRaw(&at[16], header.deadline_ms);
  StoreRaw(&at[20], header.spin_us);
}

void EncodeStepEntry(const StepEntry& entry, std::span<std::byte, kStepEntryBytes> at) {
  StoreRaw(&at[0], entry.session);
  StoreRaw(&at[8], entry.layer);
  StoreRaw(&at[12], (entry.info ? kInfoWanted : 0u) | (entry.append ? kAppends : 0u));
  StoreRaw(&at[16], entry.q_size);
  StoreRaw(&at[20], entry.y_size);
  StoreRaw(&at[24], entry.lse_size);
  StoreRaw(&at[28], entry.tail_bytes);
  StoreRaw(&at[32], entry.heads.first);
  StoreRaw(&at[36], entry.heads.n);
  StoreRaw(&at[40], entry.k_bytes);
  StoreRaw(&at[44], entry.v_bytes);
}

Result<StepHeader> DecodeStepHeader(std::span<const std::byte, kStepHeaderBytes> bytes,
                                    uint64_t slot_bytes) {
  if (LoadRaw<uint32_t>(&bytes[0]) != kStepFrameVersion) {
    return InvalidArgument("frame of steps of another version");
  }
  if (LoadRaw<uint32_t>(&bytes[4]) != 0) return InvalidArgument("a call with unknown flags");
  StepHeader header;
  header.n_steps = LoadRaw<uint32_t>(&bytes[8]);
  header.bytes = LoadRaw<uint32_t>(&bytes[12]);
  header.deadline_ms = LoadRaw<uint32_t>(&bytes[16]);
  header.spin_us = LoadRaw<uint32_t>(&bytes[20]);
  if (header.n_steps < 1 || header.n_steps > kMaxStepsPerFrame) {
    return InvalidArgument("a frame has 1 to " + std::to_string(kMaxStepsPerFrame) + " steps");
  }
  if (header.bytes > slot_bytes || header.bytes < StepLayout(header.n_steps).request_bytes()) {
    return InvalidArgument("frame of " + std::to_string(header.bytes) + " bytes for " +
                           std::to_string(header.n_steps) + " steps in a slot of " +
                           std::to_string(slot_bytes));
  }
  return header;
}

Status DecodeStepEntries(std::span<const std::byte> request, const StepHeader& header,
                         uint64_t slot_bytes, std::span<StepEntry> entries) {
  if (request.size() != header.bytes || entries.size() != header.n_steps) {
    return InvalidArgument("frame of steps of another size than its header says");
  }
  StepLayout layout(header.n_steps);
  if (header.bytes < layout.request_bytes()) return InvalidArgument("frame of steps too short");
  for (uint32_t i = 0; i < header.n_steps; ++i) {
    const std::byte* at = &request[kStepHeaderBytes + i * kStepEntryBytes];
    StepEntry& e = entries[i];
    e.session = LoadRaw<uint64_t>(at);
    e.layer = LoadRaw<uint32_t>(at + 8);
    const auto flags = LoadRaw<uint32_t>(at + 12);
    if ((flags & ~(kInfoWanted | kAppends)) != 0) {
      return InvalidArgument("a step with unknown flags");
    }
    e.info = (flags & kInfoWanted) != 0;
    e.append = (flags & kAppends) != 0;
    e.q_size = LoadRaw<uint32_t>(at + 16);
    e.y_size = LoadRaw<uint32_t>(at + 20);
    e.lse_size = LoadRaw<uint32_t>(at + 24);
    e.tail_bytes = LoadRaw<uint32_t>(at + 28);
    e.heads = {LoadRaw<uint32_t>(at + 32), LoadRaw<uint32_t>(at + 36)};
    e.k_bytes = LoadRaw<uint32_t>(at + 40);
    e.v_bytes = LoadRaw<uint32_t>(at + 44);
    if (!e.append && (e.k_bytes != 0 || e.v_bytes != 0)) {
      return InvalidArgument("a step that brings a row and does not append it");
    }
    layout.Add(e);
  }
  if (layout.request_bytes() != header.bytes || layout.answer_bytes() > slot_bytes) {
    return InvalidArgument("the tensors of a frame of steps do not fit it");
  }
  return {};
}

void EncodeAnswer(uint32_t n_steps, const StepOutcome& outcome,
                  std::span<std::byte, kStepHeaderBytes> at) {
  std::ranges::fill(at, std::byte{0});
  StoreRaw(&at[0], kStepFrameVersion);
  StoreRaw(&at[8], n_steps);
  EncodeOutcome(outcome, at.subspan<16, kStepResultBytes>());
}

Result<StepOutcome> DecodeAnswer(std::span<const std::byte, kStepHeaderBytes> bytes,
                                 uint32_t n_steps) {
  const StepOutcome outcome = DecodeOutcome(bytes.subspan<16, kStepResultBytes>());
  if (LoadRaw<uint32_t>(&bytes[0]) != kStepFrameVersion || outcome.code > kCodes ||
      (outcome.ok() && LoadRaw<uint32_t>(&bytes[8]) != n_steps)) {
    return NoAnswer("its header");
  }
  return outcome;
}

void EncodeOutcome(const StepOutcome& outcome, std::span<std::byte, kStepResultBytes> at) {
  StoreRaw(&at[0], outcome.code);
  StoreRaw(&at[4], outcome.retry_after_ms);
  StoreRaw(&at[8], outcome.tail_bytes);
  StoreRaw(&at[12], uint32_t{0});
}

StepOutcome DecodeOutcome(std::span<const std::byte, kStepResultBytes> bytes) {
  return {LoadRaw<uint32_t>(&bytes[0]), LoadRaw<uint32_t>(&bytes[4]), LoadRaw<uint32_t>(&bytes[8])};
}

StepOutcome EncodeError(const Error& error, std::span<std::byte> room) {
  const auto n = static_cast<uint32_t>(std::min(error.message.size(), room.size()));
  if (n > 0) std::memcpy(room.data(), error.message.data(), n);
  return {static_cast<uint32_t>(error.code) + 1, error.retry_after_ms, n};
}

Error DecodeError(const StepOutcome& outcome, std::span<const std::byte> tail) {
  Error error;
  if (outcome.code >= 1 && outcome.code <= kCodes) error.code = static_cast<Code>(outcome.code - 1);
  const size_t n = std::min<size_t>(outcome.tail_bytes, tail.size());
  error.message.assign(reinterpret_cast<const char*>(tail.data()), n);
  error.retry_after_ms = outcome.retry_after_ms;
  return error;
}

uint32_t StepInfoRoom(uint32_t n_kv_heads, uint32_t n_q_heads) {
  return static_cast<uint32_t>(
      std::min<uint64_t>(InfoBytes(n_kv_heads, n_q_heads, n_q_heads), UINT32_MAX));
}

Result<uint32_t> EncodeStepInfo(const StepInfo& info, std::span<std::byte> room) {
  const uint64_t bytes = InfoBytes(info.k_per_head.size(), info.rho_z.size(), info.missing.size());
  if (bytes > room.size()) {
    return Error{Code::kInternal, "the report of a step is larger than the room for it"};
  }
  std::byte* at = room.data();
  const auto put = [&at](auto value) {
    StoreRaw(at, value);
    at += sizeof(value);
  };
  put(info.k);
  put(static_cast<uint32_t>(info.k_per_head.size()));
  put(static_cast<uint32_t>(info.rho_z.size()));
  put(static_cast<uint32_t>(info.missing.size()));
  ForEachNumber(info.ledger, [&](const auto& number) {
    static_assert(sizeof(number) == sizeof(uint64_t));
    put(number);
  });
  for (const uint32_t k : info.k_per_head) put(k);
  for (const float share : info.rho_z) put(share);
  for (const MissingMass& m : info.missing) {
    put(static_cast<double>(m.delta));
    put(uint64_t{m.certified});
  }
  return static_cast<uint32_t>(bytes);
}

Status DecodeStepInfo(std::span<const std::byte> bytes, StepInfo* info) {
  if (bytes.size() < kInfoHead) return NoAnswer("its report");
  const std::byte* at = bytes.data();
  const auto get = [&at]<typename T>(T& value) {
    value = LoadRaw<T>(at);
    at += sizeof(T);
  };
  uint32_t heads, shares, missing;
  get(info->k);
  get(heads), get(shares), get(missing);
  if (InfoBytes(heads, shares, missing) != bytes.size()) return NoAnswer("its report");
  ForEachNumber(info->ledger, get);
  info->k_per_head.resize(heads);
  for (uint32_t& k : info->k_per_head) get(k);
  info->rho_z.resize(shares);
  for (float& share : info->rho_z) get(share);
  info->missing.resize(missing);
  for (MissingMass& m : info->missing) {
    double delta;
    uint64_t certified;
    get(delta), get(certified);
    m.delta = static_cast<decltype(m.delta)>(delta);
    m.certified = certified != 0;
  }
  return {};
}

}  // namespace prefixd::wire
