#include "runtime/store/store_lists.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/derived/blob_names.h"
#include "runtime/indexes/index_recall.h"
#include "runtime/indexes/indexes.h"
#include "runtime/store/lookup.h"
#include "runtime/store/store_reports.h"
#include "runtime/summaries/head_choice.h"

namespace prefixd {
namespace {

// A page of prefixes ends with the id and the tenant of its last one.
std::string PlaceName(const storage::PrefixInfo& last) {
  return last.id.ToString() + ":" + last.tenant;
}

Result<storage::PrefixesAfter> PlaceOf(const ListSpec& spec) {
  storage::PrefixesAfter after;
  after.one_tenant = spec.tenant.has_value();
  after.tenant = spec.tenant.value_or("");
  if (spec.after.empty()) return after;
  const size_t colon = spec.after.find(':');
  const auto id = storage::SegmentId::Parse(std::string_view(spec.after).substr(0, colon));
  const std::string tenant = colon == std::string::npos ? "" : spec.after.substr(colon + 1);
  if (!id.ok() || colon == std::string::npos || (spec.tenant && *spec.tenant != tenant)) {
    return InvalidArgument("'after' is what the page before returned as 'next', or empty");
  }
  after.id = *id;
  after.tenant = tenant;
  return after;
}

// With room for what the numbers of a summary take.
uint64_t TextBytes(const PrefixSummary& s) {
  return sizeof(s) + s.model.size() + s.tenant.size() + s.label.size() + s.quarantine.size() +
         s.ingest_error.size();
}

}  // namespace

size_t PageLimit(const ListSpec& spec) {
  return spec.limit == 0 ? kMaxListItems : std::min(spec.limit, kMaxListItems);
}

Result<PrefixPage> PrefixPageOf(const Core& core, const ListSpec& spec) {
  PREFIXD_ASSIGN(storage::PrefixesAfter after, PlaceOf(spec));
  const size_t limit = PageLimit(spec);
  after.limit = limit + 1;  // one more says whether there is another page
  const auto infos = core.storage->ListPrefixes(after);
  std::vector<storage::SegmentId> segments;
  for (const storage::PrefixInfo& info : infos) segments.push_back(info.chain.back());
  core.resumption->LookAt(segments);  // together, rather than one by one below
  PrefixPage page;
  uint64_t bytes = 0;
  for (size_t i = 0; i < infos.size(); ++i) {
    PrefixSummary summary = SummaryOf(core, infos[i]);
    bytes += TextBytes(summary);
    if (i > 0 && (i == limit || bytes > kMaxPageBytes)) {
      page.next = PlaceName(infos[i - 1]);
      break;
    }
    page.prefixes.push_back(std::move(summary));
  }
  return page;
}

Result<PrefixDetail> PrefixDetailOf(const Core& core, std::string_view prefix) {
  PREFIXD_ASSIGN(const auto info, FindPrefix(core, prefix));
  PrefixDetail detail;
  detail.summary = SummaryOf(core, info);
  for (const storage::SegmentId& id : info.chain) detail.chain.push_back(id.ToString());
  detail.blobs = core.storage->ListBlobs(info.chain.back());
  if (const auto model = core.models.Find(info.model); model.ok()) {
    const auto blob = core.storage->GetBlob(info.chain.back(), kChoiceBlob,
                                            ChoiceProducer(core.options, **model));
    if (blob.ok()) {  // malformed choices are ignored, as PreparedPrefix::Choices does
      if (auto choices = DeserializeChoices(*blob); choices.ok()) {
        detail.choices = *std::move(choices);
      }
    }
    for (const index::IndexKind kind : BuiltIndexes(core.options)) {
      const auto recalls = LoadRecalls(core.derived, info.chain.back(), kind);
      if (!recalls.ok()) continue;
      detail.indexes.insert(detail.indexes.end(), recalls->begin(), recalls->end());
    }
  }
  return detail;
}

}  // namespace prefixd
