// A document that is stored once for all ways of reading it, whole and then compressed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "decoder/model/model.h"
#include "demo/prefilled.h"
#include "prefixd/client.h"

namespace prefixd::demo {

// One thread at a time.
class StoredDocument {
 public:
  // Of a registered model; all but the tokens are borrowed.
  StoredDocument(const decoder::Model& model, Store& store, const ModelSpec& spec,
                 std::vector<uint32_t> prompt)
      : model_(model), store_(store), spec_(spec), prompt_(std::move(prompt)) {}

  struct Made {
    bool prefilled = false;
    double prefill_s = 0, ready_s = 0;
  };
  // Prefills and stores it, unless an earlier run has, and waits until it is ready.
  Result<Made> Make();
  // Compresses it. What an earlier call left is replaced by the whole document first.
  Result<CompressReport> Compress(const CompressSpec& spec);
  // A session that reads it, with everything read where it is whole.
  Result<std::shared_ptr<Session>> Attach() const;
  Result<PrefixDetail> Detail() const { return store_.Prefix(prefix_); }
  // Nobody may be attached.
  Status Remove() { return store_.Remove(prefix_); }

 private:
  Status Put();

  const decoder::Model& model_;
  Store& store_;
  const ModelSpec& spec_;
  const std::vector<uint32_t> prompt_;
  std::optional<Prefilled> prefilled_;
  std::string prefix_;
  bool compressed_ = false;
};

}  // namespace prefixd::demo
