#include "tests/reliability/truth.h"

#include <algorithm>
#include <cstring>

#include "tests/storage/store_fixture.h"

namespace prefixd::storage::reliability {
namespace {

SegmentId IdAt(const Event& event, size_t at) {
  SegmentId id;
  std::memcpy(id.bytes.data(), event.words.data() + at, id.bytes.size());
  return id;
}

// Something that is sure only because the store said so.
bool IsAnswer(EventKind kind) {
  switch (kind) {
    case EventKind::kModel:
    case EventKind::kPutDone:
    case EventKind::kRemoveDone:
    case EventKind::kBlobDone:
    case EventKind::kRetainDone:
    case EventKind::kMergeDone:
    case EventKind::kEvicted:
    case EventKind::kRoomEnd:
      return true;
    default:
      return false;
  }
}

}  // namespace

void Truth::Apply(const Event& event) {
  // Without power nobody hears an answer: what was asked for may have been done or not.
  if (event.late && IsAnswer(event.kind)) return;
  const auto& w = event.words;
  switch (event.kind) {
    case EventKind::kModel:
      model_ = true;
      return;
    case EventKind::kCount:
    case EventKind::kPoint:
    case EventKind::kViolation:
      return;
    case EventKind::kPutBegin: {
      Prompt& p = prompts_[w[0]];
      p.tenant = w[1];
      p.tokens.assign(w.begin() + 2, w.end());
      by_tokens_[{p.tenant, p.tokens}] = w[0];
      next_ = std::max(next_, w[0] + 1);
      return;
    }
    case EventKind::kMergeBegin:
    case EventKind::kMergeRefused:
      for (const uint32_t number : w) {
        prompts_.at(number).merging = event.kind == EventKind::kMergeBegin;
      }
      return;
    case EventKind::kMergeDone:
      for (size_t i = 4; i < w.size(); ++i) {
        Prompt& p = prompts_.at(w[i]);
        p.merging = false;
        p.segment = IdAt(event, 0);
      }
      return;
    case EventKind::kRoomBegin:
    case EventKind::kRoomEnd:
      for (auto& [number, p] : prompts_) {
        p.evictable = event.kind == EventKind::kRoomBegin && p.possible() && !p.pinned();
      }
      return;
    default:
      break;
  }
  Prompt& p = prompts_.at(w[0]);
  switch (event.kind) {
    case EventKind::kSeen:
      p.removing = p.evictable = p.merging = false;
      p.presence = Presence::kSure;
      p.id = IdAt(event, 1);
      p.segment = IdAt(event, 5);
      p.kept = {{w[9] != 0, event.Wide(10)}};
      return;
    case EventKind::kPutDone:
      p.presence = Presence::kSure;
      p.id = p.segment = IdAt(event, 1);
      return;
    case EventKind::kPutDropped:
    case EventKind::kRemoveDone:
    case EventKind::kEvicted:
    case EventKind::kNotSeen:
      p.presence = Presence::kGone;
      p.removing = p.evictable = p.merging = false;
      p.spoiled.reset();
      return;
    case EventKind::kRetainBegin:
      p.kept.insert({w[1] != 0, event.Wide(2)});
      return;
    case EventKind::kRetainDone:
      p.kept = {{w[1] != 0, event.Wide(2)}};
      return;
    case EventKind::kRemoveBegin:
      p.removing = true;
      return;
    case EventKind::kRemoveRefused:
      p.removing = false;
      return;
    case EventKind::kBlobBegin: {
      auto& allowed = blobs_[*p.segment][w[1]];
      if (allowed.empty()) allowed.insert(0);
      allowed.insert(w[2]);
      version_ = std::max(version_, w[2]);
      return;
    }
    case EventKind::kBlobDone:
    case EventKind::kBlobSeen:
      blobs_[*p.segment][w[1]] = {w[2]};
      return;
    case EventKind::kSpoilBegin:
      p.spoiled = SpoiledByte{IdAt(event, 1), w[5], static_cast<uint8_t>(w[6])};
      return;
    case EventKind::kSpoilEnd:
      p.spoiled.reset();
      return;
    default:
      return;  // failed: what may be there is known already
  }
}

std::vector<uint32_t> Truth::Sure() const {
  std::vector<uint32_t> out;
  for (const auto& [number, p] : prompts_) {
    if (p.sure()) out.push_back(number);
  }
  return out;
}

std::vector<uint32_t> Truth::Spoiled() const {
  std::vector<uint32_t> out;
  for (const auto& [number, p] : prompts_) {
    if (p.spoiled) out.push_back(number);
  }
  return out;
}

std::vector<uint32_t> Truth::In(const SegmentId& segment) const {
  std::vector<uint32_t> out;
  for (const auto& [number, p] : prompts_) {
    if (p.possible() && p.segment == segment) out.push_back(number);
  }
  return out;
}

const Blobs& Truth::BlobsOf(const SegmentId& segment) const {
  static const Blobs none;
  const auto it = blobs_.find(segment);
  return it == blobs_.end() ? none : it->second;
}

std::optional<uint32_t> Truth::Find(uint32_t tenant, const Tokens& tokens) const {
  const auto it = by_tokens_.find({tenant, tokens});
  if (it == by_tokens_.end()) return std::nullopt;
  return it->second;
}

std::string TenantName(uint32_t tenant) { return "tenant" + std::to_string(tenant); }
std::string BlobName(uint32_t name) { return "blob" + std::to_string(name); }
std::string BlobProducer(uint32_t name) { return "producer" + std::to_string(name); }

std::vector<std::byte> BlobBytes(uint32_t name, uint32_t version) {
  uint64_t h = Mix(uint64_t{name} << 32 ^ version);
  std::vector<std::byte> out(h % 9000);
  for (std::byte& b : out) b = static_cast<std::byte>(h = Mix(h));
  return out;
}

std::vector<uint32_t> IdWords(const SegmentId& id) {
  std::vector<uint32_t> words(id.bytes.size() / 4);
  std::memcpy(words.data(), id.bytes.data(), id.bytes.size());
  return words;
}

}  // namespace prefixd::storage::reliability
