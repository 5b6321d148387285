// Fuzzes how the daemon reads what a client left in a slot of its ring, and how a client reads the
// answer.
#include "prefixd/session_info.h"
#include "protocol/frame.h"
#include "protocol/step_frame.h"
#include "tests/fuzz/fuzz.h"

namespace prefixd::fuzz {
namespace {

using namespace prefixd::wire;

// A request that passes lies within the slot, with all its tensors; written anew it is the same.
void CheckRequest(std::span<const std::byte> slot) {
  if (slot.size() < kStepHeaderBytes) return;
  const auto header = DecodeStepHeader(slot.first<kStepHeaderBytes>(), slot.size());
  if (!header.ok()) return;
  FUZZ_EXPECT(header->bytes <= slot.size() && header->n_steps <= kMaxStepsPerFrame);
  const auto request = slot.first(header->bytes);
  std::vector<StepEntry> entries(header->n_steps);
  if (!DecodeStepEntries(request, *header, slot.size(), entries).ok()) return;
  std::array<std::byte, kStepHeaderBytes> head;
  EncodeStepHeader(*header, head);
  const auto again = DecodeStepHeader(head, slot.size());
  FUZZ_EXPECT(again.ok() && *again == *header);
  StepLayout layout(header->n_steps);
  for (size_t i = 0; i < entries.size(); ++i) {
    const StepEntry& e = entries[i];
    std::array<std::byte, kStepEntryBytes> bytes;
    EncodeStepEntry(e, bytes);
    FUZZ_EXPECT(std::ranges::equal(
        bytes, request.subspan(kStepHeaderBytes + i * kStepEntryBytes, kStepEntryBytes)));
    const auto places = layout.Add(e);
    FUZZ_EXPECT(places.q + uint64_t{e.q_size} * 4 <= request.size());
    FUZZ_EXPECT(places.k + e.k_bytes <= request.size() && places.v + e.v_bytes <= request.size());
    FUZZ_EXPECT(places.y + uint64_t{e.y_size} * 4 <= slot.size());
    FUZZ_EXPECT(places.lse + uint64_t{e.lse_size} * 4 <= slot.size());
    FUZZ_EXPECT(places.tail + e.tail_bytes <= slot.size());
    FUZZ_EXPECT(places.q % kTensorAlignment == 0 && places.y % kTensorAlignment == 0);
  }
}

void CheckAnswer(std::span<const std::byte> slot) {
  if (slot.size() < kStepHeaderBytes) return;
  const auto outcome = DecodeAnswer(slot.first<kStepHeaderBytes>(), 2);
  if (!outcome.ok() || outcome->ok()) return;
  const Error error = DecodeError(*outcome, slot.subspan(kStepHeaderBytes));
  FUZZ_EXPECT(error.message.size() <= slot.size());
  FUZZ_EXPECT(static_cast<uint32_t>(error.code) + 1 == outcome->code);
}

// What passes is the same when it is written anew.
void CheckInfo(std::span<const std::byte> bytes) {
  StepInfo info;
  if (!DecodeStepInfo(bytes, &info).ok()) return;
  Bytes again(bytes.size());
  const auto written = EncodeStepInfo(info, again);
  FUZZ_EXPECT(written.ok() && *written == bytes.size());
  StepInfo back;
  FUZZ_EXPECT(DecodeStepInfo(again, &back).ok());
  FUZZ_EXPECT(back.k == info.k && back.k_per_head == info.k_per_head &&
              back.missing.size() == info.missing.size());
  Bytes small(bytes.size() - 1);
  FUZZ_EXPECT(!EncodeStepInfo(info, small).ok());
}

}  // namespace

void RunOne(FuzzedDataProvider& in) {
  switch (Whole<uint8_t>(in) % 4) {
    case 0:
      CheckRequest(Rest(in));
      break;
    case 1:
      CheckAnswer(Rest(in));
      break;
    case 2:
      CheckInfo(Rest(in));
      break;
    case 3: {  // a request of some steps, damaged
      const auto n = in.ConsumeIntegralInRange<uint32_t>(1, 4);
      std::vector<StepEntry> entries;
      StepLayout layout(n);
      for (uint32_t i = 0; i < n; ++i) {
        const auto size = [&] { return in.ConsumeIntegralInRange<uint32_t>(0, 40); };
        entries.push_back(
            {Whole<uint64_t>(in), size(), in.ConsumeBool(), size(), size(), size(), size()});
        entries.back().append = in.ConsumeBool();
        if (entries.back().append) entries.back().k_bytes = size(), entries.back().v_bytes = size();
        layout.Add(entries.back());
      }
      Bytes slot(std::max(layout.request_bytes(), layout.answer_bytes()));
      const std::span bytes(slot);
      EncodeStepHeader({n, static_cast<uint32_t>(layout.request_bytes()), Whole<uint32_t>(in), 0},
                       bytes.first<kStepHeaderBytes>());
      for (uint32_t i = 0; i < n; ++i) {
        EncodeStepEntry(
            entries[i],
            bytes.subspan(kStepHeaderBytes + i * kStepEntryBytes).first<kStepEntryBytes>());
      }
      const auto header = DecodeStepHeader(bytes.first<kStepHeaderBytes>(), slot.size());
      FUZZ_EXPECT(header.ok());
      std::vector<StepEntry> back(n);
      FUZZ_EXPECT(DecodeStepEntries(bytes.first(header->bytes), *header, slot.size(), back).ok());
      FUZZ_EXPECT(back == entries);
      Damage(in, slot);
      CheckRequest(slot);
      break;
    }
  }
}

}  // namespace prefixd::fuzz
