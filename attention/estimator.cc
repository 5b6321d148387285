#include "attention/estimator.h"

#include <cassert>
#include <string>

#include "attention/byte_codec.h"

namespace prefixd {
namespace {

// Envelope, little-endian: magic u32, version u16, kind u8, zero u8, producer bytes u32, zero u32;
// producer; payload (the summary's own format, nothing for kNone).
constexpr uint32_t kMagic = 0x53455850;  // "PXES"
constexpr uint16_t kVersion = 1;
constexpr size_t kHeaderBytes = 16;

ClusterContents ContentsOf(EstimatorKind kind) {
  return kind == EstimatorKind::kClusterMoment ? ClusterContents::kMoments
         : kind == EstimatorKind::kCentroid    ? ClusterContents::kCentroids
                                               : ClusterContents::kValues;
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
    case EstimatorKind::kMoment:
      return {};
    case EstimatorKind::kPhi:
      if (phi_k != nullptr && phi_k->in_dim == key_dim) return {};
      return InvalidArgument("estimator 'phi' needs the feature map of its keys");
    case EstimatorKind::kCentroid:
    case EstimatorKind::kClusterMoment:
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
    case EstimatorKind::kClusterMoment:
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
  WithSummary(held_, [&](auto& summary) {
    summary.Merge(std::get<std::decay_t<decltype(summary)>>(other.held_));
  });
  return {};
}

void EstimatorSummary::Factor(uint32_t rank, std::span<const float> query_rms) {
  auto& moment = std::get<MomentSummary>(held_);
  moment = moment.Factored(rank, query_rms);
}

void EstimatorSummary::RoundToBf16() {
  auto& phi = std::get<PhiCache>(held_);
  phi = phi.RoundedToBf16();
}

size_t EstimatorSummary::bytes() const {
  size_t bytes = 0;
  WithSummary(held_, [&](const auto& summary) { bytes = summary.bytes(); });
  return bytes;
}

double EstimatorSummary::Tokens(const RowShape& row) const {
  return static_cast<double>(bytes()) / static_cast<double>(row.bytes());
}

std::vector<std::byte> EstimatorSummary::Serialize(std::string_view producer) const {
  ByteWriter out;
  out.Put(kMagic);
  out.Put(kVersion);
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
  const auto corrupt = [](const std::string& what) {
    return Error{Code::kCorrupt, "estimator summary: " + what};
  };
  PREFIXD_ASSIGN(EstimatorSummary summary, Create(spec));
  ByteReader in(bytes);
  if (in.remaining() < kHeaderBytes) return corrupt("shorter than its header");
  if (in.Get<uint32_t>() != kMagic) return corrupt("not an estimator summary");
  const uint16_t version = in.Get<uint16_t>();
  if (version != kVersion) return corrupt("unknown version " + std::to_string(version));
  const uint8_t kind = in.Get<uint8_t>(), zero = in.Get<uint8_t>();
  const uint32_t producer_bytes = in.Get<uint32_t>();
  if (zero != 0 || in.Get<uint32_t>() != 0 || producer_bytes > in.remaining()) {
    return corrupt("malformed header");
  }
  const auto name = bytes.subspan(kHeaderBytes, producer_bytes);
  const std::string_view made_by(reinterpret_cast<const char*>(name.data()), name.size());
  if (kind != static_cast<uint8_t>(spec.kind) || made_by != producer) {
    return Error{Code::kFailedPrecondition, "the stored summary was made by '" +
                                                std::string(made_by) + "', not by '" +
                                                std::string(producer) + "'; build it again"};
  }
  const auto payload = bytes.subspan(kHeaderBytes + producer_bytes);
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
    if constexpr (requires { held.d_phi(); }) fits = fits && held.d_phi() == spec.phi_k->d_phi;
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
