// Restates plainly which steps share a retrieved set, and makes queries that share them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/policy.h"
#include "tests/support/random_kv.h"

namespace prefixd::testing {

inline double Cosine(std::span<const float> a, std::span<const float> b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += double{a[i]} * b[i], aa += double{a[i]} * a[i], bb += double{b[i]} * b[i];
  }
  return ab / std::sqrt(aa * bb);
}

// Returns the least cosine over a group's heads.
inline double Alike(std::span<const float> a, std::span<const float> b, uint32_t group) {
  double least = 1;
  const size_t dim = a.size() / group;
  for (uint32_t g = 0; g < group; ++g) {
    least = std::min(least, Cosine(a.subspan(g * dim, dim), b.subspan(g * dim, dim)));
  }
  return least;
}

// Makes queries that wander: neighbours in time are alike, and now and then one is not.
inline std::vector<std::vector<float>> Wander(Random& random, size_t n, size_t size) {
  std::vector<std::vector<float>> out;
  std::vector<float> q = random.Normals(size);
  for (size_t i = 0; i < n; ++i) {
    const float step = i % 11 == 10 ? 3.0f : 0.25f;
    const std::vector<float> noise = random.Normals(size);
    for (size_t j = 0; j < size; ++j) q[j] += step * noise[j];
    out.push_back(q);
  }
  return out;
}

// Returns for each step t the step that retrieved the set it uses, by the words of the spec.
inline std::vector<size_t> PlainSharing(const std::vector<std::vector<float>>& queries,
                                        uint32_t group, const StepPolicy::Sharing& sharing) {
  std::vector<size_t> from;
  for (size_t t = 0; t < queries.size(); ++t) {
    const size_t begin = t - t % sharing.block;
    size_t found = t;
    if (t == begin) {
      if (sharing.across && t > 0 &&
          Alike(queries[t], queries[from[t - 1]], group) > sharing.similarity) {
        found = from[t - 1];
      }
    } else {
      for (size_t j = t; j-- > begin && found == t;) {
        if (Alike(queries[t], queries[j], group) > sharing.similarity) found = from[j];
      }
    }
    from.push_back(found);
  }
  return from;
}

}  // namespace prefixd::testing
