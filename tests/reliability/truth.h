// What must and what may be in the store, following from the events of the processes that used it.
// Prompts are numbered in order of their puts; each has tokens that no other has, so a segment of
// its own. Rows follow from the tokens, blobs from (prompt, name, version).
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

#include "storage/prefix_store.h"
#include "tests/reliability/journal.h"

namespace prefixd::storage::reliability {

using Tokens = std::vector<uint32_t>;

enum class Presence : uint8_t { kSure, kMaybe, kGone };

struct SpoiledByte {
  SegmentId id;
  uint32_t offset = 0;
  uint8_t right = 0;
};

struct Prompt {
  uint32_t tenant = 0;
  Tokens tokens;
  Presence presence = Presence::kMaybe;
  bool removing = false;                         // a removal began and was not refused
  std::map<uint32_t, std::set<uint32_t>> blobs;  // versions that may be found; 0: none
  std::optional<SpoiledByte> spoiled;
  std::optional<SegmentId> id;

  bool sure() const { return presence == Presence::kSure && !removing; }
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
  // Those certainly there.
  std::vector<uint32_t> Sure() const;
  std::vector<uint32_t> Spoiled() const;
  // The prompt with these tokens, if it was ever put.
  std::optional<uint32_t> Find(uint32_t tenant, const Tokens& tokens) const;

 private:
  std::map<uint32_t, Prompt> prompts_;
  std::map<std::pair<uint32_t, Tokens>, uint32_t> by_tokens_;
  bool model_ = false;
  uint32_t next_ = 1, version_ = 0;
};

std::string TenantName(uint32_t tenant);
std::string BlobName(uint32_t name);
std::string BlobProducer(uint32_t name);
std::vector<std::byte> BlobBytes(uint32_t prompt, uint32_t name, uint32_t version);

std::vector<uint32_t> IdWords(const SegmentId& id);

}  // namespace prefixd::storage::reliability
