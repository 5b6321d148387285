// Keeps the scorers that sessions rank their own tokens by, as the operator has put them down
// (RuntimeOptions::scorers), in memory while any session uses them. A file that is written anew is
// read once nobody uses the old one.
//
// Thread-safety: all methods may be called concurrently; none waits for another's read.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/memory_budget.h"
#include "prefixd/model.h"
#include "prefixd/result.h"
#include "runtime/retention/token_scorer.h"

namespace prefixd {

struct ShelvedScorers {
  std::vector<TokenScorer> heads;  // in HeadIndex's order
  MemoryCharge memory;
};

class ScorerShelf {
 public:
  // path: a file of scorers, or a folder of such files, whose names end with .safetensors; empty:
  // there are none. Of a folder the file counts that names the digest of the model's weights.
  ScorerShelf(std::filesystem::path path, MemoryAccount account)
      : path_(std::move(path)), account_(std::move(account)) {}

  // kFailedPrecondition: there are none for this model. What is wrong with the files is logged: who
  // asks may be a tenant.
  Result<std::shared_ptr<const ShelvedScorers>> For(const ModelSpec& spec);

 private:
  using Scorers = std::shared_ptr<const ShelvedScorers>;
  Result<Scorers> Load(const ModelSpec& spec) const;
  Result<Scorers> LoadFile(const std::filesystem::path& path, const ModelSpec& spec) const;

  const std::filesystem::path path_;
  const MemoryAccount account_;
  struct Shelved {
    ModelSpec spec;
    std::weak_ptr<const ShelvedScorers> scorers;
  };
  std::mutex mutex_;
  std::map<std::string, Shelved> shelved_;  // by the model's name
  std::string last_logged_;
};

}  // namespace prefixd
