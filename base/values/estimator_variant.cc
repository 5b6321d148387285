#include "prefixd/estimator_variant.h"

#include <algorithm>
#include <charconv>
#include <string>

namespace prefixd {

std::string_view EstimatorName(EstimatorKind kind) {
  if (kind == EstimatorKind::kAuto) return "auto";
  const auto number = static_cast<size_t>(kind);
  return number < kEstimatorKinds ? kEstimatorNames[number] : "unknown";
}

Result<EstimatorKind> EstimatorFromName(std::string_view name) {
  for (EstimatorKind kind :
       {EstimatorKind::kNone, EstimatorKind::kPhi, EstimatorKind::kMoment, EstimatorKind::kCentroid,
        EstimatorKind::kScan, EstimatorKind::kAuto}) {
    if (EstimatorName(kind) == name) return kind;
  }
  return InvalidArgument("unknown estimator '" + std::string(name) +
                         "'; known: none, phi, moment, centroid, scan, auto");
}

namespace {

constexpr std::string_view kKnown =
    "none, moment[/rR | /full][/cov], phi[/per_feature][/bf16], centroid, scan, auto";

// Parses "r8" as 8; returns 0 for anything else.
uint32_t RankFrom(std::string_view option) {
  uint32_t rank = 0;
  if (option.size() < 2 || option[0] != 'r') return 0;
  const auto [end, error] = std::from_chars(option.data() + 1, option.data() + option.size(), rank);
  return error == std::errc() && end == option.data() + option.size() && rank <= 1024 ? rank : 0;
}

bool SetMomentOption(EstimatorVariant& v, std::string_view option) {
  if (const uint32_t rank = RankFrom(option); rank > 0 && v.rank == 0) {
    v.rank = rank;
  } else if (option == "full" && v.rank == 0) {
    v.rank = EstimatorVariant::kFullRank;
  } else if (option == "cov" && !v.covariance) {
    v.covariance = true;
  } else {
    return false;
  }
  return true;
}

bool SetOption(EstimatorVariant& v, std::string_view option) {
  switch (v.kind) {
    case EstimatorKind::kMoment:
      return SetMomentOption(v, option);
    case EstimatorKind::kPhi:
      if (option == "per_feature" && v.phi_form == PhiForm::kSigned) {
        v.phi_form = PhiForm::kPerFeature;
        return true;
      }
      if (option != "bf16" || v.bf16) return false;
      return v.bf16 = true;
    default:
      return false;
  }
}

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

}  // namespace

std::string EstimatorVariant::Name() const {
  std::string name(EstimatorName(kind));
  if (rank == kFullRank) name += "/full";
  if (rank > 0 && rank != kFullRank) name += "/r" + std::to_string(rank);
  if (covariance) name += "/cov";
  if (phi_form == PhiForm::kPerFeature) name += "/per_feature";
  if (bf16) name += "/bf16";
  return name;
}

Result<EstimatorVariant> EstimatorVariant::Parse(std::string_view name) {
  const Error unknown = InvalidArgument("unknown estimator '" + std::string(name) +
                                        "'; known: " + std::string(kKnown));
  const size_t slash = std::min(name.find('/'), name.size());
  const auto kind = EstimatorFromName(name.substr(0, slash));
  if (!kind.ok()) return unknown;
  EstimatorVariant variant(*kind);
  for (std::string_view rest = name.substr(slash); !rest.empty();) {
    rest.remove_prefix(1);
    const size_t end = std::min(rest.find('/'), rest.size());
    if (!SetOption(variant, rest.substr(0, end))) return unknown;
    rest.remove_prefix(end);
  }
  return variant;
}

EstimatorVariant EstimatorVariant::Kept() const {
  EstimatorVariant kept = *this;
  kept.phi_form = PhiForm::kSigned;
  return kept;
}

Result<std::vector<EstimatorVariant>> ParseVariants(std::string_view list) {
  std::vector<EstimatorVariant> variants;
  while (true) {
    const size_t comma = std::min(list.find(','), list.size());
    const std::string_view name = Trimmed(list.substr(0, comma));
    PREFIXD_ASSIGN(const auto variant, EstimatorVariant::Parse(name));
    if (variant.kind == EstimatorKind::kAuto) {
      return InvalidArgument("a list of estimators names them one by one; 'auto' is none of them");
    }
    if (std::ranges::find(variants, variant) != variants.end()) {
      return InvalidArgument("estimator '" + variant.Name() + "' is in the list twice");
    }
    variants.push_back(variant);
    if (comma == list.size()) return variants;
    list.remove_prefix(comma + 1);
  }
}

std::string VariantNames(std::span<const EstimatorVariant> variants) {
  std::string names;
  for (const EstimatorVariant& v : variants) names += (names.empty() ? "" : ", ") + v.Name();
  return names;
}

}  // namespace prefixd
