#include "runtime/store/store_lists.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/store/store_reports.h"

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

}  // namespace prefixd
