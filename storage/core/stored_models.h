// Keeps the models of a store by name: the catalog's rows in memory.
//
// Thread-safety: all methods may be called concurrently. One mutex guards the table. It is held
// while the catalog writes a model, so that catalog and table change together, and while the tree
// counts a model's segments: it comes before the tree's, and no method takes another one.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "storage/catalog/catalog.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/segment/segment_format.h"

namespace prefixd::storage {

// A RequestScope holds what a request refers to, resolved once.
struct RequestScope {
  ModelRecord model;
  std::string tenant;
  BlockHash id{};
};

// While it lives, the model is not removed: whoever commits a segment of it holds one.
using ModelHold = std::shared_ptr<const void>;

class StoredModels {
 public:
  // Borrows both.
  StoredModels(Catalog& catalog, const PrefixTree& tree) : catalog_(catalog), tree_(tree) {}

  // Takes over what the catalog has stored.
  void Load(std::vector<ModelRecord> models);
  Result<RequestScope> Resolve(std::string_view model, std::string_view tenant) const;
  Status Put(const ModelRecord& model);
  std::vector<ModelRecord> List() const;
  Status Remove(std::string_view name);
  Result<ModelHold> Hold(std::string_view name);
  bool Knows(std::string_view name) const;
  // Returns the scope of a segment's rows, zero where the model is unknown.
  BlockHash ScopeOf(const SegmentRecord& record) const;
  // Returns kCorrupt when a file holds rows of another model or geometry than its record says.
  Status Check(const SegmentRecord& record, const SegmentHeader& header) const;

 private:
  Catalog& catalog_;
  const PrefixTree& tree_;
  mutable std::mutex mutex_;  // guards what follows
  std::map<std::string, ModelRecord, std::less<>> models_;
  std::map<std::string, std::weak_ptr<const void>, std::less<>> held_;
};

}  // namespace prefixd::storage
