#include "attention/estimators/estimator.h"

#include <algorithm>
#include <cassert>
#include <string>

#include "attention/estimators/byte_codec.h"

namespace prefixd {
namespace {

// Envelope, little-endian: magic u32, version u16, kind u8, zero u8, producer bytes u32, zero u32;
// producer; payload (the summary's own format, nothing for kNone).
constexpr uint32_t kSummaryMagic = 0x53455850;  // "PXES"
constexpr uint16_t kSummaryVersion = 1;
constexpr size_t kSummaryHeaderBytes = 16;

ClusterContents ContentsOf(EstimatorKind kind) {
  return kind == EstimatorKind::kCentroid ? ClusterContents::kCentroids : ClusterContents::kValues;
}

// Calls visit(summary) unless there is none.
template <typename Held, typename Visit>
void WithSummary(Held& held, Visit visit) {
  std::visit(
      [&](auto& summary) {
        if constexpr (!std::is_same_v<std::decay_t<decltype(summary)>, std::monostate>) {
          visit(summary);
        }
      },
      held);
}

}  // namespace

Status EstimatorSpec::Validate() const {
  const std::string name(EstimatorName(kind));
  if (key_dim == 0 || value_dim == 0) {
    return InvalidArgument("an estimator needs the dimensions of keys and values");
  }
  switch (kind) {
    case EstimatorKind::kNone:
      return {};
    case EstimatorKind::kMoment:
      if (rank == 0 || (!cross && rank < std::min(key_dim, value_dim))) return {};
      return InvalidArgument("a factor of the cross moment has a rank below its dimensions");
    case EstimatorKind::kPhi:
      if (phi_k != nullptr && phi_k->in_dim == key_dim) return {};
      return InvalidArgument("estimator 'phi' needs the feature map of its keys");
    case EstimatorKind::kCentroid:
    case EstimatorKind::kScan:
      if (clustering != nullptr && clustering->dim() == key_dim) return {};
      return InvalidArgument("estimator '" + name + "' needs a clustering of its keys");
    case EstimatorKind::kAuto:
      break;
  }
  return InvalidArgument("estimator '" + name + "' must be resolved before anything is built");
}

Result<EstimatorSummary> EstimatorSummary::Create(const EstimatorSpec& spec) {
  PREFIXD_TRY(spec.Validate());
  Held held;
  switch (spec.kind) {
    case EstimatorKind::kMoment:
      held = MomentSummary(spec.key_dim, spec.value_dim, spec.cross, spec.covariance);
      break;
    case EstimatorKind::kPhi:
      held = PhiCache(spec.phi_k->d_phi, spec.value_dim);
      break;
    case EstimatorKind::kCentroid:
    case EstimatorKind::kScan:
      held = ClusterSummary(spec.clustering->size(), spec.key_dim, spec.value_dim,
                            ContentsOf(spec.kind));
      break;
    default:
      break;
  }
  return EstimatorSummary(spec, std::move(held));
}

uint64_t EstimatorSummary::count() const {
  uint64_t count = 0;
  WithSummary(held_, [&](const auto& summary) { count = summary.count(); });
  return count;
}

void EstimatorSummary::Add(const RowsView& rows) {
  if (auto* moment = std::get_if<MomentSummary>(&held_)) moment->Add(rows);
  if (auto* phi = std::get_if<PhiCache>(&held_)) phi->Add(rows, *spec_.phi_k);
  if (auto* clusters = std::get_if<ClusterSummary>(&held_)) {
    clusters->Add(rows, spec_.clustering->Assign(rows));
  }
}

Status EstimatorSummary::Merge(const EstimatorSummary& other) {
  if (spec_.kind != other.spec_.kind || spec_.key_dim != other.spec_.key_dim ||
      spec_.value_dim != other.spec_.value_dim || spec_.cross != other.spec_.cross ||
      spec_.covariance != other.spec_.covariance || spec_.phi_k != other.spec_.phi_k ||
      spec_.clustering != other.spec_.clustering) {
    return InvalidArgument("summaries of different estimators do not merge");
  }
  if (spec_.rank + other.spec_.rank > 0 || spec_.bf16 || other.spec_.bf16) {
    return InvalidArgument("summaries that were reduced for reading do not merge");
  }
  WithSummary(held_, [&](auto& summary) {
    summary.Merge(std::get<std::decay_t<decltype(summary)>>(other.held_));
  });
  return {};
}

Result<EstimatorSummary> EstimatorSummary::Keep(const EstimatorVariant& variant,
                                                std::span<const float> query_rms,
                                                const EstimatorSummary* alike) const {
  const auto too_little = [&] {
    return InvalidArgument("what was gathered is too little for estimator '" + variant.Name() +
                           "'");
  };
  EstimatorSummary out = *this;
  out.spec_.kind = variant.kind;
  if (const MomentSummary* all = moment(); all && variant.kind == EstimatorKind::kMoment) {
    const bool factored =
        variant.rank > 0 && variant.rank < std::min(spec_.key_dim, spec_.value_dim);
    const bool whole = variant.rank > 0 && !factored;
    if ((variant.rank > 0 && !all->has_cross()) || (variant.covariance && !all->has_covariance())) {
      return too_little();
    }
    out.spec_.cross = whole;
    out.spec_.covariance = variant.covariance;
    out.spec_.rank = factored ? variant.rank : 0;
    MomentSummary kept = all->Reduced(variant.rank > 0, variant.covariance);
    if (factored) {
      const MomentSummary* like = alike ? alike->moment() : nullptr;
      const bool directions = like && like->cross_rank() == variant.rank;
      kept = directions ? kept.FactoredAlong(like->value_factor())
                        : kept.Factored(variant.rank, query_rms);
    }
    out.held_ = std::move(kept);
    return out;
  }
  if (const PhiCache* cache = phi(); cache && variant.kind == EstimatorKind::kPhi) {
    out.spec_.bf16 = variant.bf16;
    if (variant.bf16) out.held_ = cache->RoundedToBf16();
    return out;
  }
  if (const ClusterSummary* all = clusters(); all && variant.clustered()) {
    if (ContentsOf(variant.kind) > all->contents()) return too_little();
    out.held_ = all->Reduced(ContentsOf(variant.kind));
    return out;
  }
  if (variant.kind == EstimatorKind::kNone) {
    out.held_ = std::monostate();
    return out;
  }
  return too_little();
}

Status EstimatorSummary::Coarsen(std::span<const uint16_t> to, const Clustering* into) {
  const ClusterSummary* all = clusters();
  const auto beyond = [&](uint16_t c) { return c >= into->size(); };
  if (all == nullptr || to.size() != all->size() || std::ranges::any_of(to, beyond)) {
    return InvalidArgument("these are not the clusters to put together");
  }
  held_ = all->Coarsened(to, into->size());
  spec_.clustering = into;
  return {};
}

size_t EstimatorSummary::bytes() const {
  size_t bytes = 0;
  WithSummary(held_, [&](const auto& summary) { bytes = summary.bytes(); });
  return bytes;
}

size_t EstimatorSummary::memory_bytes() const {
  size_t bytes = sizeof(*this);
  const auto add = [&](const auto&... parts) { ((bytes += parts.size_bytes()), ...); };
  if (const MomentSummary* m = moment()) {
    add(m->mean_key(), m->key_m2(), m->mean_value(), m->cross(), m->covariance(), m->key_factor(),
        m->value_factor());
  }
  if (const PhiCache* p = phi()) {
    add(p->m(), p->u(), p->t());
    bytes += p->apart_bytes();
  }
  if (const ClusterSummary* c = clusters()) {
    add(c->counts(), c->mean_keys(), c->spreads(), c->mean_values());
  }
  return bytes;
}

double EstimatorSummary::Tokens(const RowShape& row) const {
  return static_cast<double>(bytes()) / static_cast<double>(row.bytes());
}

std::vector<std::byte> EstimatorSummary::Serialize(std::string_view producer) const {
  ByteWriter out;
  out.Put(kSummaryMagic);
  out.Put(kSummaryVersion);
  out.Put(static_cast<uint8_t>(spec_.kind));
  out.Put(uint8_t{0});
  out.Put(static_cast<uint32_t>(producer.size()));
  out.Put(uint32_t{0});
  std::vector<std::byte> bytes = out.Take();
  const auto name = std::as_bytes(std::span(producer));
  bytes.insert(bytes.end(), name.begin(), name.end());
  WithSummary(held_, [&](const auto& summary) {
    const std::vector<std::byte> payload = summary.Serialize();
    bytes.insert(bytes.end(), payload.begin(), payload.end());
  });
  return bytes;
}

Result<EstimatorSummary> EstimatorSummary::Deserialize(const EstimatorSpec& spec,
                                                       std::string_view producer,
                                                       std::span<const std::byte> bytes) {
  constexpr const char* kName = "estimator summary";
  const auto corrupt = [](const std::string& what) {
    return Error{Code::kCorrupt, std::string(kName) + ": " + what};
  };
  PREFIXD_ASSIGN(EstimatorSummary summary, Create(spec));
  PREFIXD_ASSIGN(ByteReader in,
                 ReadHead(bytes, kSummaryHeaderBytes, kSummaryMagic, kSummaryVersion, kName));
  const uint8_t kind = in.Get<uint8_t>(), zero = in.Get<uint8_t>();
  const uint32_t producer_bytes = in.Get<uint32_t>();
  if (zero != 0 || in.Get<uint32_t>() != 0 || producer_bytes > in.remaining()) {
    return corrupt("malformed header");
  }
  const auto name = bytes.subspan(kSummaryHeaderBytes, producer_bytes);
  const std::string_view made_by(reinterpret_cast<const char*>(name.data()), name.size());
  if (kind != static_cast<uint8_t>(spec.kind) || made_by != producer) {
    return Error{Code::kFailedPrecondition, "the stored summary was made by '" +
                                                std::string(made_by) + "', not by '" +
                                                std::string(producer) + "'; build it again"};
  }
  const auto payload = bytes.subspan(kSummaryHeaderBytes + producer_bytes);
  Status status;
  bool fits = true;
  WithSummary(summary.held_, [&](auto& held) {
    auto read = std::decay_t<decltype(held)>::Deserialize(payload);
    if (!read.ok()) {
      status = Status(read.error());
      return;
    }
    held = std::move(read).value();
    fits = held.value_dim() == spec.value_dim;
    if constexpr (requires { held.key_dim(); }) fits = fits && held.key_dim() == spec.key_dim;
    if constexpr (requires { held.d_phi(); }) {
      fits = fits && held.d_phi() == spec.phi_k->d_phi &&
             held.dtype() == (spec.bf16 ? DType::kBf16 : DType::kF32) &&
             (held.apart().empty() || held.apart().front().key.size() == spec.key_dim);
    }
    if constexpr (requires { held.has_cross(); }) {
      fits = fits && held.has_cross() == spec.cross && held.cross_rank() == spec.rank &&
             held.has_covariance() == spec.covariance;
    }
    if constexpr (requires { held.contents(); }) {
      fits = fits && held.size() == spec.clustering->size() &&
             held.contents() == ContentsOf(spec.kind);
    }
  });
  PREFIXD_TRY(status);
  if (!fits) return corrupt("its shape is not the model's");
  return summary;
}

void EstimatorSummary::AttachTo(GroupStepInput& in) const {
  in.estimator = spec_.kind;
  if (const auto* moment = std::get_if<MomentSummary>(&held_)) in.moment = moment;
  if (const auto* phi = std::get_if<PhiCache>(&held_)) {
    in.phi = phi;
    in.phi_k = spec_.phi_k;
  }
  if (const auto* clusters = std::get_if<ClusterSummary>(&held_)) {
    in.clusters = clusters;
    in.clustering = spec_.clustering;
  }
}

}  // namespace prefixd
