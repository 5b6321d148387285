// Computes what must and what may be in the store from the events of the processes that used it.
// Prompts are numbered in order of their puts; each has tokens that no other has, so a segment of
// its own, until that is compacted with the one it continues. Rows follow from the tokens, blobs
// from (name, version).
//
// Thread-safety: a plain value.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "storage/store/prefix_store.h"
#include "tests/reliability/workload/journal.h"

namespace prefixd::storage::reliability {

using Tokens = std::vector<uint32_t>;

enum class Presence : uint8_t { kSure, kMaybe, kGone };

struct SpoiledByte {
  SegmentId id;
  uint32_t offset = 0;
  uint8_t right = 0;
};

struct Kept {
  bool pinned = false;
  int64_t expires_unix_ms = 0;
  auto operator<=>(const Kept&) const = default;
};

// Blobs of a segment, by name: the versions that may be found; 0: none.
using Blobs = std::map<uint32_t, std::set<uint32_t>>;

struct Prompt {
  uint32_t tenant = 0;
  Tokens tokens;
  Presence presence = Presence::kMaybe;
  bool removing = false;   // a removal began and was not refused
  bool evictable = false;  // an eviction may have taken it: it was not pinned
  // How often its segment was to be joined with another, with an unknown outcome; `staged` are the
  // blobs that the joined segment may have.
  int compacting = 0;
  std::map<uint32_t, std::set<uint32_t>> staged;
  std::set<Kept> kept{Kept{}};       // possible lifetimes
  std::set<bool> compressed{false};  // whether some rows of its segment may be gone
  std::optional<SpoiledByte> spoiled;
  std::optional<SegmentId> id;  // its name
  // The segment in which it ends; the name, until segments are compacted.
  std::optional<SegmentId> segment;
  std::optional<SegmentId> perhaps;  // or this one, whose commit is uncertain

  bool sure() const { return presence == Presence::kSure && !removing && !evictable; }
  bool pinned() const {
    for (const Kept& k : kept) {
      if (!k.pinned) return false;
    }
    return true;
  }
  bool possible() const { return presence != Presence::kGone; }
};

class Truth {
 public:
  void Apply(const Event& event);

  const std::map<uint32_t, Prompt>& prompts() const { return prompts_; }
  const Prompt& at(uint32_t number) const { return prompts_.at(number); }
  bool model() const { return model_; }
  uint32_t next_prompt() const { return next_; }
  uint32_t next_version() const { return version_ + 1; }
  // Returns the prompts that are certainly there.
  std::vector<uint32_t> Sure() const;
  std::vector<uint32_t> Spoiled() const;
  // Returns all prompts that may be in the segment.
  std::vector<uint32_t> In(const SegmentId& segment) const;
  const Blobs& BlobsOf(const SegmentId& segment) const;
  // Returns whether such a blob was committed by a compaction, not put.
  bool CameWithMerge(uint32_t version) const { return staged_.contains(version); }
  // Returns the prompt with these tokens, if it was ever put.
  std::optional<uint32_t> Find(uint32_t tenant, const Tokens& tokens) const;

 private:
  void Moved(uint32_t number, const SegmentId& segment);
  void Overheard(const Event& event);

  std::map<uint32_t, Prompt> prompts_;
  std::map<std::pair<uint32_t, Tokens>, uint32_t> by_tokens_;
  std::map<SegmentId, Blobs> blobs_;
  std::set<uint32_t> staged_;  // versions
  bool model_ = false;
  uint32_t next_ = 1, version_ = 0;
};

// The number of names that blobs have.
constexpr uint32_t kBlobNames = 2;

std::string TenantName(uint32_t tenant);
std::string BlobName(uint32_t name);
std::string BlobProducer(uint32_t name);
std::vector<std::byte> BlobBytes(uint32_t name, uint32_t version);

std::vector<uint32_t> IdWords(const SegmentId& id);

}  // namespace prefixd::storage::reliability
