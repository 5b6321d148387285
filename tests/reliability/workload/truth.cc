#include "tests/reliability/workload/truth.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "tests/storage/store_fixture.h"

namespace prefixd::storage::reliability {
namespace {

SegmentId IdAt(const Event& event, size_t at) {
  SegmentId id;
  std::memcpy(id.bytes.data(), event.words.data() + at, id.bytes.size());
  return id;
}

struct Compacting {
  std::vector<std::pair<uint32_t, uint32_t>> blobs;  // name, version
  std::span<const uint32_t> prompts;
};

Compacting MergingAt(const Event& event, size_t at) {
  Compacting m;
  const auto words = std::span(event.words).subspan(at);
  for (size_t i = 0; i < words[0]; ++i) m.blobs.emplace_back(words[1 + 2 * i], words[2 + 2 * i]);
  m.prompts = words.subspan(1 + 2 * size_t{words[0]});
  return m;
}

// Returns whether the event is sure only because the store answered so.
bool IsAnswer(EventKind kind) {
  switch (kind) {
    case EventKind::kModel:
    case EventKind::kPutDone:
    case EventKind::kRemoveDone:
    case EventKind::kBlobDone:
    case EventKind::kLifetimeDone:
    case EventKind::kCompactDone:
    case EventKind::kCompacted:
    case EventKind::kCompressDone:
    case EventKind::kEvicted:
    case EventKind::kRoomEnd:
      return true;
    default:
      return false;
  }
}

}  // namespace

void Truth::Apply(const Event& event) {
  // An answer after the power cut reaches no user: the operation may have happened or not.
  if (event.late && IsAnswer(event.kind)) {
    Overheard(event);
    return;
  }
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
    case EventKind::kCompactBegin: {
      const Compacting m = MergingAt(event, 0);
      for (const uint32_t number : m.prompts) {
        Prompt& p = prompts_.at(number);
        if (p.compacting == 0)
          p.staged.clear();  // else the outcome of the earlier compaction is unknown
        ++p.compacting;
        for (const auto& [name, version] : m.blobs) p.staged[name].insert({0, version});
      }
      for (const auto& [name, version] : m.blobs) {
        staged_.insert(version);
        version_ = std::max(version_, version);
      }
      return;
    }
    case EventKind::kCompactRefused:
      for (const uint32_t number : w) --prompts_.at(number).compacting;
      return;
    case EventKind::kCompactDone: {
      const Compacting m = MergingAt(event, 4);
      for (const auto& [name, version] : m.blobs) blobs_[IdAt(event, 0)][name] = {version};
      for (const uint32_t number : m.prompts) Moved(number, IdAt(event, 0));
      return;
    }
    case EventKind::kCompacted:
      for (size_t i = 4; i < w.size(); ++i) {
        // try_emplace keeps entries: another prompt's findings on the same segment are more
        // precise.
        for (const auto& [name, versions] : prompts_.at(w[i]).staged) {
          blobs_[IdAt(event, 0)].try_emplace(name, versions);
        }
        Moved(w[i], IdAt(event, 0));
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
      p.removing = p.evictable = false;
      p.compacting = 0;
      p.perhaps.reset();
      p.presence = Presence::kSure;
      p.id = IdAt(event, 1);
      p.segment = IdAt(event, 5);
      p.kept = {{w[9] != 0, event.Wide(10)}};
      p.compressed = {w[12] != 0};
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
      p.removing = p.evictable = false;
      p.compacting = 0;
      p.spoiled.reset();
      return;
    case EventKind::kCompressBegin:
      p.compressed.insert(true);
      return;
    case EventKind::kCompressRefused:
      p.compressed = {false};
      return;
    case EventKind::kCompressDone:
      p.compressed = {true};
      return;
    case EventKind::kLifetimeBegin:
      p.kept.insert({w[1] != 0, event.Wide(2)});
      return;
    case EventKind::kLifetimeDone:
      p.kept = {{w[1] != 0, event.Wide(2)}};
      return;
    case EventKind::kRemoveBegin:
      p.removing = true;
      return;
    case EventKind::kRemoveRefused:
      p.removing = false;
      return;
    case EventKind::kBlobBegin:
      for (const auto& segment : {p.segment, p.perhaps}) {
        if (!segment) continue;
        auto& allowed = blobs_[*segment][w[1]];
        if (allowed.empty()) allowed.insert(0);
        allowed.insert(w[2]);
      }
      version_ = std::max(version_, w[2]);
      return;
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
      return;  // the operation failed: its possible effects are recorded already
  }
}

// The writing process saw this answer and continued: its later operations may have reached a
// segment that only this answer names.
void Truth::Overheard(const Event& event) {
  if (event.kind == EventKind::kPutDone) {
    Prompt& p = prompts_.at(event.words[0]);
    p.id = p.segment = IdAt(event, 1);
  } else if (event.kind == EventKind::kCompactDone) {
    const Compacting m = MergingAt(event, 4);
    for (const auto& [name, version] : m.blobs) blobs_[IdAt(event, 0)][name] = {0, version};
    for (const uint32_t number : m.prompts) prompts_.at(number).perhaps = IdAt(event, 0);
  }
}

void Truth::Moved(uint32_t number, const SegmentId& segment) {
  Prompt& p = prompts_.at(number);
  p.compacting = 0;
  p.perhaps.reset();
  p.segment = segment;
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
  for (size_t i = 0; i < out.size(); i += sizeof(h)) {
    h = Mix(h);
    std::memcpy(out.data() + i, &h, std::min(sizeof(h), out.size() - i));
  }
  return out;
}

std::vector<uint32_t> IdWords(const SegmentId& id) {
  std::vector<uint32_t> words(id.bytes.size() / 4);
  std::memcpy(words.data(), id.bytes.data(), id.bytes.size());
  return words;
}

}  // namespace prefixd::storage::reliability
