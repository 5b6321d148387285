#include "runtime/session/seen_queries.h"

#include <algorithm>

namespace prefixd {
namespace {

size_t Floats(const KvGeometry& geometry, uint32_t layer) {
  const LayerShape shape = geometry.layer(layer);
  return size_t{shape.group_size()} * shape.key_dim;
}

}  // namespace

SeenQueries::SeenQueries(const KvGeometry& geometry) {
  const HeadIndex index = geometry.heads();
  heads_.resize(index.count());
  for (size_t head = 0; head < heads_.size(); ++head) {
    heads_[head].own.resize(kObservedQueries);
    heads_[head].q.resize(kObservedQueries * Floats(geometry, index.layer_of(head)));
  }
}

uint64_t SeenQueries::Bytes(const KvGeometry& geometry) {
  const HeadIndex index = geometry.heads();
  uint64_t bytes = 0;
  for (size_t head = 0; head < index.count(); ++head) {
    bytes += sizeof(Head) +
             kObservedQueries *
                 (sizeof(uint32_t) + sizeof(float) * Floats(geometry, index.layer_of(head)));
  }
  return bytes;
}

void SeenQueries::Note(size_t head, uint32_t own, std::span<const float> q) {
  std::lock_guard lock(mutex_);
  Head& of = heads_[head];
  if (of.count == kObservedQueries) {
    of.begin = of.at(1);
  } else {
    ++of.count;
  }
  const uint32_t at = of.at(of.count - 1);
  of.own[at] = own;
  std::ranges::copy(q, of.q.begin() + static_cast<ptrdiff_t>(at * of.each()));
}

std::vector<SeenQueries::Query> SeenQueries::Of(size_t head, uint32_t own) const {
  std::vector<Query> queries;
  std::lock_guard lock(mutex_);
  const Head& of = heads_[head];
  for (uint32_t i = 0; i < of.count; ++i) {
    const uint32_t at = of.at(i);
    if (of.own[at] > own) continue;
    const auto begin = of.q.begin() + static_cast<ptrdiff_t>(at * of.each());
    queries.push_back({of.own[at], {begin, begin + static_cast<ptrdiff_t>(of.each())}});
  }
  std::ranges::stable_sort(queries, {}, &Query::own);
  return queries;
}

void SeenQueries::Truncate(uint32_t n) {
  std::lock_guard lock(mutex_);
  for (Head& head : heads_) {
    uint32_t left = 0;
    for (uint32_t i = 0; i < head.count; ++i) {
      const uint32_t from = head.at(i), to = head.at(left);
      if (head.own[from] > n) continue;
      ++left;
      if (from == to) continue;
      head.own[to] = head.own[from];
      std::copy_n(head.q.begin() + static_cast<ptrdiff_t>(from * head.each()), head.each(),
                  head.q.begin() + static_cast<ptrdiff_t>(to * head.each()));
    }
    head.count = left;
  }
}

void SeenQueries::CopyFrom(const SeenQueries& other) {
  std::scoped_lock lock(mutex_, other.mutex_);
  heads_ = other.heads_;
}

}  // namespace prefixd
