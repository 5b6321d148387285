#include "runtime/store/explain.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <string>
#include <utility>

#include "base/call_scope.h"
#include "runtime/store/estimate.h"
#include "runtime/store/lookup.h"

namespace prefixd {
namespace {

// Of other models those that hold the most tokens are named.
constexpr size_t kMaxOtherModels = 8;

std::string Count(uint64_t n) { return std::to_string(n); }

std::string TimeText(int64_t unix_ms) {
  const std::time_t seconds = unix_ms / 1000;
  std::tm tm{};
  char text[40];
  if (::gmtime_r(&seconds, &tm) == nullptr) return "an unknown time";
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &tm)};
}

std::string FieldsText(const std::vector<FieldDifference>& differs) {
  std::string out;
  for (const FieldDifference& d : differs) {
    out += (out.empty() ? "" : ", ") + d.field + " (" + (d.asked.empty() ? "none" : d.asked) +
           ", stored: " + (d.stored.empty() ? "none" : d.stored) + ")";
  }
  return out;
}

void DescribeNearest(const storage::MatchExplanation& found, const MatchSpec& spec,
                     std::vector<Miss>* out) {
  const storage::Match& match = found.match;
  Miss miss;
  miss.n_tokens = match.n_tokens;
  if (match.n_tokens == 0) {
    miss.reason = MissReason::kNothingStored;
    miss.text = "nothing that begins like this prompt is stored for model '" + spec.model +
                "' and this tenant";
  } else if (found.stored_token) {
    miss.reason = MissReason::kDiverges;
    miss.prefix = match.id.ToString();
    miss.asked_token = spec.tokens[match.n_tokens];
    miss.stored_token = found.stored_token;
    miss.text = "the nearest stored prefix diverges at token " + Count(match.n_tokens) +
                ": the prompt has " + Count(*miss.asked_token) + " there, it has " +
                Count(*miss.stored_token);
  } else {
    miss.reason = MissReason::kEnds;
    miss.prefix = match.id.ToString();
    miss.text = "the nearest stored prefix ends at token " + Count(match.n_tokens) +
                "; nothing longer that continues it like this prompt is stored";
  }
  out->push_back(std::move(miss));
}

Miss DescribeGone(const storage::GoneRecord& gone, uint32_t n_tokens) {
  Miss miss;
  miss.n_tokens = n_tokens;
  miss.unix_ms = gone.unix_ms;
  if (gone.id != storage::SegmentId{}) miss.prefix = gone.id.ToString();
  const std::string when = " at " + TimeText(gone.unix_ms);
  const std::string held = "at least " + Count(n_tokens) + " tokens were stored and ";
  const auto because = [&](const std::string& what) {
    return gone.why.empty() ? what : what + ": " + gone.why;
  };
  using storage::GoneReason;
  switch (gone.reason) {
    case GoneReason::kExpired:
      miss.reason = MissReason::kExpired;
      miss.text = held + "went" + when + ": their time to live was over";
      break;
    case GoneReason::kEvicted:
      miss.reason = MissReason::kEvicted;
      miss.text =
          held + "were evicted" + when + " " + gone.why +
          "; store.quota_mib and store.min_free_mib say how much may stay, and a pin keeps a "
          "prefix";
      break;
    case GoneReason::kEvictedQuota:
      miss.reason = MissReason::kEvictedQuota;
      miss.text = held + "were evicted" + when + " within the tenant's quota, " + gone.why +
                  "; raise the quota, or pin the prefix";
      break;
    case GoneReason::kDamaged:
      miss.reason = MissReason::kQuarantined;
      miss.text = because(held + "were evicted" + when + ", because they were quarantined");
      break;
    case GoneReason::kRefused:
      miss.reason = MissReason::kPutRefused;
      miss.text = because("a put of at least " + Count(n_tokens) + " tokens was refused" + when);
      break;
    case GoneReason::kRemoved:
    case GoneReason::kModelRemoved:
      miss.reason = MissReason::kRemoved;
      miss.text = because(held + "were removed" + when);
      break;
  }
  return miss;
}

void DescribeRest(const storage::MatchExplanation& found, std::vector<Miss>* out) {
  if (found.derived_tokens > 0) {
    Miss miss;
    miss.reason = MissReason::kDerived;
    miss.n_tokens = found.derived_tokens;
    miss.text = Count(found.derived_tokens) +
                " tokens match when derived rows are taken (accept_approximate, or the lineage "
                "that their put returned)";
    out->push_back(std::move(miss));
  }
  if (found.compressed_tokens > 0) {
    Miss miss;
    miss.reason = MissReason::kCompressed;
    miss.n_tokens = found.compressed_tokens;
    miss.prefix = found.compressed.ToString();
    miss.text = Count(found.compressed_tokens) +
                " tokens match when compressed prefixes are taken (accept_compressed): steps under "
                "a policy read them, and nothing restores them; put the prompt again to have all "
                "rows";
    out->push_back(std::move(miss));
  }
  for (const auto& unusable : found.unusable) {
    Miss miss;
    miss.n_tokens = unusable.n_tokens;
    miss.prefix = unusable.id.ToString();
    miss.unix_ms = unusable.expires_unix_ms;
    const bool damaged = !unusable.quarantine.empty();
    miss.reason = damaged ? MissReason::kQuarantined : MissReason::kExpired;
    miss.text = "at least " + Count(unusable.n_tokens) + " tokens are stored, but " +
                (damaged ? "quarantined: " + unusable.quarantine + "; put the prompt again"
                         : "expired at " + TimeText(unusable.expires_unix_ms));
    out->push_back(std::move(miss));
  }
  if (found.gone) out->push_back(DescribeGone(*found.gone, found.gone_tokens));
}

// Compares the models under which this tenant has stored more of these tokens. `asked` may lack a
// geometry, and be null.
Status DescribeOtherModels(const Core& core, const ExplainSpec& spec, const ModelSpec* asked,
                           uint32_t matched, std::vector<Miss>* out) {
  std::vector<Miss> others;
  for (const storage::ModelRecord& record : core.storage->ListModels()) {
    PREFIXD_TRY(CheckCall());
    if (record.name == spec.match.model) continue;
    const auto match =
        core.storage->LongestMatch(record.name, spec.match.tenant, spec.match.tokens, {true, {}});
    if (!match.ok() && match.error().code != Code::kNotFound) return match.error();
    if (!match.ok() || match->n_tokens <= matched) continue;
    const auto model = core.models.Find(record.name);
    if (!model.ok()) continue;  // removed meanwhile
    Miss miss;
    miss.reason = MissReason::kModelDiffers;
    miss.n_tokens = match->n_tokens;
    miss.model = record.name;
    miss.prefix = match->id.ToString();
    miss.text = Count(match->n_tokens) + " tokens are stored under model '" + record.name + "'";
    if (asked) {
      ModelSpec compared = *asked;
      if (compared.geometry.n_layers == 0) compared.geometry = (*model)->spec.geometry;
      miss.differs = DifferencesOf(compared, (*model)->spec);
    }
    if (!miss.differs.empty()) miss.text += ", which differs in " + FieldsText(miss.differs);
    others.push_back(std::move(miss));
  }
  std::ranges::stable_sort(others, std::ranges::greater(), &Miss::n_tokens);
  if (others.size() > kMaxOtherModels) others.resize(kMaxOtherModels);
  std::ranges::move(others, std::back_inserter(*out));
  return {};
}

}  // namespace

std::vector<FieldDifference> DifferencesOf(const ModelSpec& asked, const ModelSpec& stored) {
  std::map<std::string, FieldDifference> fields;
  const auto identity = [&](const ModelSpec& spec, std::string FieldDifference::*side) {
    for (const auto& [tag, value] : spec.identity) {
      std::string& text = fields[tag].*side;
      text += (text.empty() ? "" : ", ") + value;  // a tag may come twice
    }
  };
  identity(asked, &FieldDifference::asked);
  identity(stored, &FieldDifference::stored);
  const KvGeometry &a = asked.geometry, &b = stored.geometry;
  const auto number = [&](const char* name, uint64_t x, uint64_t y) {
    fields[std::string("geometry.") + name] = {"", Count(x), Count(y)};
  };
  number("n_layers", a.n_layers, b.n_layers);
  number("n_q_heads", a.n_q_heads, b.n_q_heads);
  number("n_kv_heads", a.n_kv_heads, b.n_kv_heads);
  number("key_dim", a.key_dim, b.key_dim);
  number("value_dim", a.value_dim, b.value_dim);
  fields["geometry.dtype"] = {"", std::string(DTypeName(a.dtype)), std::string(DTypeName(b.dtype))};
  const size_t layers = std::min(a.layers.size(), b.layers.size());
  for (size_t l = 0; l < layers; ++l) {
    if (a.layers[l] == b.layers[l]) continue;
    fields["geometry.layers"] = {"", "layer " + Count(l) + " is another", ""};
    break;
  }
  std::vector<FieldDifference> out;
  for (auto& [name, field] : fields) {
    if (field.asked == field.stored) continue;
    field.field = name;
    out.push_back(std::move(field));
  }
  return out;
}

Result<Explanation> ExplainMatch(const Core& core, const ExplainSpec& spec) {
  const MatchSpec& match = spec.match;
  PREFIXD_ASSIGN(const auto accept, AcceptanceOf(match));
  PREFIXD_TRY(CheckEngineSpeed(match.engine));
  Explanation out;
  out.asked_tokens = static_cast<uint32_t>(match.tokens.size());
  if (match.tokens.empty()) return InvalidArgument("explain needs the prompt's tokens");
  const auto model = core.models.Find(match.model);
  ModelSpec asked;
  if (model.ok()) asked = (*model)->spec;
  if (!model.ok()) {
    PREFIXD_ASSIGN(const auto removed, core.storage->ModelRemovedAt(match.model));
    Miss miss;
    miss.reason = MissReason::kNoModel;
    miss.unix_ms = removed.value_or(0);
    miss.text = removed ? "model '" + match.model + "' was removed at " + TimeText(*removed)
                        : model.error().message;
    out.misses.push_back(std::move(miss));
  } else {
    PREFIXD_ASSIGN(const auto found,
                   core.storage->ExplainMatch(match.model, match.tenant, match.tokens, accept));
    const storage::Match& m = found.match;
    if (m.n_tokens > 0) {
      out.match = {m.id.ToString(),
                   m.n_tokens,
                   m.stored_tokens,
                   m.exact_tokens,
                   EstimateReuse(core, match.engine, {asked, match.tenant, m.id, m.n_tokens}),
                   m.compressed};
    }
    if (m.n_tokens < match.tokens.size()) {
      DescribeNearest(found, match, &out.misses);
      DescribeRest(found, &out.misses);
    }
    if (!spec.identity.empty()) {
      ModelSpec given = asked;
      given.identity = spec.identity;
      Miss miss;
      miss.differs = DifferencesOf(given, asked);
      if (!miss.differs.empty()) {
        miss.reason = MissReason::kModelDiffers;
        miss.model = match.model;
        miss.text = "model '" + match.model +
                    "' is registered with another identity: " + FieldsText(miss.differs);
        out.misses.push_back(std::move(miss));
      }
    }
  }
  if (out.match.n_tokens < match.tokens.size()) {
    const bool known = model.ok() || !spec.identity.empty();
    if (!spec.identity.empty()) asked.identity = spec.identity;
    PREFIXD_TRY(
        DescribeOtherModels(core, spec, known ? &asked : nullptr, out.match.n_tokens, &out.misses));
  }
  std::ranges::stable_sort(out.misses, std::ranges::greater(), &Miss::n_tokens);
  return out;
}

}  // namespace prefixd
