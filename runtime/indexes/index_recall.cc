#include "runtime/indexes/index_recall.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/derived/unread.h"
#include "runtime/indexes/indexes.h"

namespace prefixd {
namespace {

using Json = nlohmann::json;

const Error kMalformed{Code::kCorrupt, "the stored recall of indexes is malformed"};

Result<IndexRecall> RecallFrom(const Json& item) {
  if (!item.is_object()) return kMalformed;
  bool good = true;
  const auto number = [&](const char* key, double low, double high) {
    const auto it = item.find(key);
    const double x = it != item.end() && it->is_number() ? it->get<double>() : std::nan("");
    good &= x >= low && x <= high;
    return good ? x : low;
  };
  IndexRecall r;
  r.layer = static_cast<uint32_t>(number("layer", 0, 4095));
  r.kv_head = static_cast<uint32_t>(number("kv_head", 0, 4095));
  r.queries = static_cast<uint32_t>(number("queries", 0, 1e6));
  r.k = static_cast<uint32_t>(number("k", 0, 4294967295.0));
  r.recall = number("recall", 0, 1);
  r.mass = number("mass", 0, 2);
  r.effort = number("effort", 0, 1e6);
  const auto name = item.find("index");
  if (!good || name == item.end() || !name->is_string()) return kMalformed;
  r.index = name->get<std::string>();
  if (!index::IndexFromName(r.index).ok()) return kMalformed;
  return r;
}

}  // namespace

std::string RecallBlobName(index::IndexKind kind) {
  return "recall." + std::string(index::IndexName(kind));
}

std::string RecallProducer(index::IndexKind kind, const RuntimeOptions& options) {
  return IndexProducer(kind, options.anchors) +
         " recall/2 target=" + std::to_string(options.recall_target);
}

bool MeetsTarget(uint32_t queries, double recall, const RuntimeOptions& options) {
  return queries == 0 || recall >= options.recall_target;
}

std::vector<std::byte> SerializeRecalls(std::span<const IndexRecall> recalls) {
  Json json = Json::array();
  for (const IndexRecall& r : recalls) {
    json.push_back({{"layer", r.layer},
                    {"kv_head", r.kv_head},
                    {"index", r.index},
                    {"queries", r.queries},
                    {"k", r.k},
                    {"recall", r.recall},
                    {"mass", r.mass},
                    {"effort", r.effort}});
  }
  const std::string text = json.dump();
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

Result<std::vector<IndexRecall>> DeserializeRecalls(std::span<const std::byte> bytes,
                                                    const RuntimeOptions& options) {
  const Json json =
      Json::parse(reinterpret_cast<const char*>(bytes.data()),
                  reinterpret_cast<const char*>(bytes.data()) + bytes.size(), nullptr, false);
  if (!json.is_array()) return kMalformed;
  std::vector<IndexRecall> recalls;
  for (const Json& item : json) {
    PREFIXD_ASSIGN(IndexRecall recall, RecallFrom(item));
    recall.used = MeetsTarget(recall.queries, recall.recall, options);
    recalls.push_back(std::move(recall));
  }
  return recalls;
}

Result<std::vector<IndexRecall>> LoadRecalls(const DerivedContext& context,
                                             const storage::SegmentId& id, index::IndexKind kind) {
  const auto blob =
      context.segments.GetBlob(id, RecallBlobName(kind), RecallProducer(kind, context.options));
  if (!blob.ok() && Unread(blob.error())) return blob.error();
  if (!blob.ok()) return std::vector<IndexRecall>{};
  auto recalls = DeserializeRecalls(*blob, context.options);
  return recalls.ok() ? std::move(recalls).value() : std::vector<IndexRecall>{};
}

}  // namespace prefixd
