#include "bench/attention/layers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <string>

namespace prefixd::bench {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

FeatureMap RandomMap(std::mt19937_64& rng) {
  std::normal_distribution<float> normal(0, 0.05f);
  const auto fill = [&](std::vector<float>& x, size_t n) {
    x.resize(n);
    for (float& v : x) v = normal(rng);
  };
  FeatureMap map;
  map.in_dim = map.d_emb = kDim;
  map.d_phi = kPhiDim;
  for (auto* w : {&map.w_in, &map.w1, &map.w2, &map.w_out}) fill(*w, kDim * kDim);
  for (auto* b : {&map.b_in, &map.b1, &map.b2, &map.b_out}) fill(*b, kDim);
  map.alpha = 0.5f;
  return map;
}

}  // namespace

size_t LastLevelCacheBytes() {
  long bytes = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  bytes = std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE));
#endif
  return bytes > 0 ? static_cast<size_t>(bytes) : size_t{32} << 20;
}

RowMemory::RowMemory(Team& team, size_t bytes)
    : mapped_((bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage), bytes_(bytes) {
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    std::fprintf(stderr, "cannot map %zu bytes of memory; ask for fewer with --max-tokens\n",
                 mapped_);
    std::exit(1);
  }
  const uintptr_t at = (reinterpret_cast<uintptr_t>(mapping_) + kHugePage - 1) & ~(kHugePage - 1);
  data_ = reinterpret_cast<std::byte*>(at);
#if defined(MADV_HUGEPAGE)
  static_cast<void>(madvise(data_, mapped_ - kHugePage, MADV_HUGEPAGE));
#endif
  // The memory has random rows of unit variance, then copies of them: the content of rows does not
  // change their cost.
  const size_t piece = std::min<size_t>(bytes_, size_t{16} << 20);
  std::vector<uint16_t> table(1 << 16);
  std::mt19937_64 rng(1);
  std::normal_distribution<float> normal;
  for (uint16_t& x : table) x = FloatToBf16(normal(rng));
  for (size_t i = 0; i < piece; i += 2) std::memcpy(data_ + i, &table[rng() >> 48], 2);
  team.ForEach((bytes_ - piece + piece - 1) / piece, [&](size_t p) {
    const size_t begin = (p + 1) * piece;
    std::memcpy(data_ + begin, data_, std::min(piece, bytes_ - begin));
  });
}

RowMemory::~RowMemory() { munmap(mapping_, mapped_); }

double RowMemory::huge_share() const {
  std::ifstream in("/proc/self/smaps_rollup");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("AnonHugePages:", 0) != 0) continue;
    std::istringstream words(line.substr(14));
    double kib = 0;
    words >> kib;
    return std::min(1.0, kib * 1024 / static_cast<double>(bytes_));
  }
  return 0;
}

Layers::Layers(const RowMemory& memory, uint32_t n_tokens)
    : memory_(memory), n_tokens_(n_tokens), count_(memory.bytes() / bytes()) {}

RowsView Layers::Head(size_t layer, size_t h) const {
  return {memory_.data() + (layer * kKvHeads + h) * head_bytes(), n_tokens_, kRow.bytes(), kRow};
}

Model MakeModel(const Layers& layers) {
  Model model;
  std::mt19937_64 rng(2);
  std::normal_distribution<float> normal;
  model.queries.resize(size_t{kKvHeads} * kGroup * kDim);
  for (float& x : model.queries) x = normal(rng);
  for (size_t h = 0; h < kKvHeads; ++h) {
    const RowsView some = layers.Head(0, h).Sub(kSinks, kSummarised);
    MomentSummary full(kDim, kDim, true), mean(kDim, kDim, false);
    full.Add(some);
    mean.Add(some);
    model.mean.push_back(mean);
    model.rank8.push_back(full.Factored(8, {}));
    model.full.push_back(std::move(full));
    model.phi_k.push_back(RandomMap(rng));
    model.phi.emplace_back(kPhiDim, kDim);
    model.phi.back().Add(some, model.phi_k.back());
    for (uint32_t g = 0; g < kGroup; ++g) model.phi_q.push_back(RandomMap(rng));
  }
  model.codes.assign(size_t{kSummarised} * kPhiDim, std::byte{3});
  return model;
}

}  // namespace prefixd::bench
