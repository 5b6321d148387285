// A case of the Top-K through LaunchTopK, on the device that there is, emulated or not.
#pragma once

#include <algorithm>
#include <vector>

#include "gpu/device/launch_memory.h"
#include "gpu/device/upload.h"
#include "gpu/topk/topk_layout.h"
#include "tests/gpu/launcher.h"
#include "tests/gpu/topk_cases.h"

namespace prefixd::gpu::testing {

inline Result<TopKResult> RunTopK(const TopKCase& c, const Launcher& launch) {
  PREFIXD_ASSIGN(const TopKPlan plan, PlanTopK(c.shape));
  PREFIXD_ASSIGN(OwnedStream stream, OwnedStream::Create());
  TopKArgs args;
  const auto pack = [&](internal::HostImage& image) {
    args.queries = image.Add<float>(c.queries);
    args.sources = PackTopK(c, image);
  };
  PREFIXD_ASSIGN(const auto input, internal::UploadImage(pack, stream.get()));
  PREFIXD_ASSIGN(const auto memory, internal::AllocateFor(plan, args));
  const size_t n = c.shape.n_groups, G = c.shape.group;
  PREFIXD_TRY(Poison(args.ids, n * c.shape.max_k, stream.get()));
  PREFIXD_TRY(Poison(args.counts, n, stream.get()));
  PREFIXD_TRY(Poison(args.cuts, n * G, stream.get()));
  PREFIXD_TRY(launch(stream.get(), [&] { return LaunchTopK(plan, args, stream.get()); }));

  std::vector<uint32_t> ids(n * c.shape.max_k), counts(n), errors(n);
  std::vector<Cut> cuts(n * G);
  PREFIXD_TRY(Fetch(ids, args.ids, stream.get()));
  PREFIXD_TRY(Fetch(counts, args.counts, stream.get()));
  PREFIXD_TRY(Fetch(errors, args.errors, stream.get()));
  PREFIXD_TRY(Fetch(cuts, args.cuts, stream.get()));
  PREFIXD_TRY(Synchronize(stream.get()));
  TopKResult out{{}, errors, {}};
  const internal::TopKLayout layout(c.shape);
  for (uint32_t g = 0; g < n; ++g) {
    Selection selection;
    const uint32_t* first = ids.data() + size_t{g} * c.shape.max_k;
    selection.ids.assign(first, first + std::min(counts[g], c.shape.max_k));
    selection.cuts.assign(cuts.data() + g * G, cuts.data() + (g + 1) * G);
    out.groups.push_back(std::move(selection));
    const TopKCase::Group& group = c.groups[g];
    for (uint32_t h = 0; h < G && c.shape.codes; ++h) {
      CodesSeen& seen = out.seen.emplace_back();
      if (group.candidates() == 0 || errors[g] != kGroupOk) continue;
      // Only what was written.
      const auto* words = memory.workspace.as<const uint32_t>();
      std::vector<internal::CodeNumbers> of(1);
      seen.values.resize(group.candidates());
      PREFIXD_TRY(
          Fetch(of, reinterpret_cast<const internal::CodeNumbers*>(words + layout.code_at(g, h)),
                stream.get()));
      PREFIXD_TRY(Fetch(
          seen.values, reinterpret_cast<const int16_t*>(words + layout.score_at(g, h)) + group.skip,
          stream.get()));
      PREFIXD_TRY(Synchronize(stream.get()));
      seen.mul = of[0].mul;
      seen.add = of[0].add;
      seen.mean_mul = of[0].mul * of[0].units_of_mean;
    }
  }
  return out;
}

}  // namespace prefixd::gpu::testing
