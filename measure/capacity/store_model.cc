#include "measure/capacity/store_model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "storage/catalog/eviction.h"
#include "storage/catalog/use_history.h"

namespace prefixd::bench {
namespace {

using storage::EvictionNode;

class StoreModel {
 public:
  StoreModel(const RequestLog& log, const StoreShape& shape) : log_(log), shape_(shape) {}

  CacheHits Run() {
    for (const Request& request : log_.requests) Serve(request);
    return hits_;
  }

 private:
  static constexpr uint64_t kNone = 0;  // the parent of a root

  struct Segment {
    uint64_t parent = kNone;
    size_t first_block = 0;
    std::vector<uint64_t> blocks;
    TokenRange tokens;
    uint64_t bytes = 0;
    float heat = 0;
    int64_t used_ms = 0;
  };
  // Where a prompt is stored up to: in which segment, and how many of its blocks.
  struct Place {
    uint64_t segment = kNone;
    size_t blocks = 0;
  };
  using ChildKey = std::tuple<uint64_t, size_t, uint64_t>;  // parent, place, first block

  Place Find(const Request& request) const {
    Place place;
    while (place.blocks < request.blocks.size()) {
      const auto at = children_.find({place.segment, place.blocks, request.blocks[place.blocks]});
      if (at == children_.end()) break;
      const Segment& segment = segments_.at(at->second);
      place.segment = at->second;
      for (const uint64_t id : segment.blocks) {
        if (place.blocks == request.blocks.size() || request.blocks[place.blocks] != id) break;
        ++place.blocks;
      }
    }
    return place;
  }

  void Serve(const Request& request) {
    ++hits_.requests;
    hits_.input_tokens += request.input_tokens;
    now_ms_ = static_cast<int64_t>(request.seconds * 1000);
    const Place place = Find(request);
    const uint64_t matched = Tokens(request, place.blocks);
    hits_.Hit(HitTokens(request, matched));
    hits_.requests_hit += place.blocks > 0;
    if (place.blocks > 0) Touch(place.segment);
    if (place.blocks == request.blocks.size()) return Touch(place.segment);
    Put(request, place);
  }

  uint64_t Tokens(const Request& request, size_t blocks) const {
    return std::min<uint64_t>(uint64_t{blocks} * log_.block_tokens, request.input_tokens);
  }

  void Put(const Request& request, const Place& place) {
    Segment segment;
    segment.parent = place.segment;
    segment.first_block = place.blocks;
    segment.blocks.assign(request.blocks.begin() + static_cast<ptrdiff_t>(place.blocks),
                          request.blocks.end());
    segment.tokens = {static_cast<uint32_t>(Tokens(request, place.blocks)), request.input_tokens};
    segment.bytes =
        static_cast<uint64_t>(shape_.segment_bytes + shape_.token_bytes * segment.tokens.size());
    if (!MakeRoom(segment.bytes, place.segment)) return;
    bytes_ += segment.bytes;
    hits_.stored_tokens += segment.tokens.size();
    for (size_t i = 0; i < segment.blocks.size(); ++i) {
      if (!seen_.insert(segment.blocks[i]).second) continue;
      hits_.distinct_tokens +=
          Tokens(request, place.blocks + i + 1) - Tokens(request, place.blocks + i);
    }
    const uint64_t id = ++last_id_;
    children_[{segment.parent, segment.first_block, segment.blocks.front()}] = id;
    if (const auto past = past_uses_.Recall(segment.blocks.front())) {
      segment.heat = past->heat;
      segment.used_ms = past->last_used_unix_ms;
    }
    segments_.emplace(id, std::move(segment));
    Touch(id);
  }

  void Touch(uint64_t id) {
    for (; id != kNone; id = segments_.at(id).parent) {
      Segment& s = segments_.at(id);
      s.heat = storage::DecayedHeat(s.heat, now_ms_ - s.used_ms) + 1;
      s.used_ms = now_ms_;
    }
  }

  static storage::SegmentId Named(uint64_t id) {
    storage::SegmentId out;
    std::memcpy(out.bytes.data(), &id, sizeof(id));
    return out;
  }

  // Frees a 32nd of the quota beyond what is needed, as a store does (kHeadroomParts of
  // storage/files/space.cc): a plan looks at all segments, and serves for many puts.
  bool MakeRoom(uint64_t bytes, uint64_t held) {
    if (shape_.quota_bytes == 0 || bytes_ + bytes <= shape_.quota_bytes) return true;
    std::vector<EvictionNode> nodes;
    nodes.reserve(segments_.size());
    for (const auto& [id, s] : segments_) {
      EvictionNode& node = nodes.emplace_back();
      node.id = Named(id);
      if (s.parent != kNone) node.parent = Named(s.parent);
      node.bytes = s.bytes;
      node.tokens = s.tokens;
      node.idle_ms = now_ms_ - s.used_ms;
      node.heat = storage::DecayedHeat(s.heat, node.idle_ms);
      node.named = true;
      node.held = id == held;
    }
    storage::EvictionPlan plan(std::move(nodes));
    const uint64_t needed = bytes_ + bytes - shape_.quota_bytes;
    const uint64_t with_headroom = needed + shape_.quota_bytes / 32;
    if (!plan.Free(needed, nullptr)) return false;
    if (plan.freed() < with_headroom) {  // as far as there is any
      static_cast<void>(plan.Free(with_headroom - plan.freed(), nullptr));
    }
    for (const EvictionNode& victim : plan.victims()) {
      uint64_t id = 0;
      std::memcpy(&id, victim.id.bytes.data(), sizeof(id));
      const Segment& s = segments_.at(id);
      bytes_ -= s.bytes;
      past_uses_.Remember(s.blocks.front(), {s.heat, s.used_ms});
      children_.erase({s.parent, s.first_block, s.blocks.front()});
      segments_.erase(id);
    }
    return true;
  }

  const RequestLog& log_;
  const StoreShape shape_;
  CacheHits hits_;
  int64_t now_ms_ = 0;
  uint64_t last_id_ = 0, bytes_ = 0;
  std::unordered_map<uint64_t, Segment> segments_;
  std::map<ChildKey, uint64_t> children_;
  std::unordered_set<uint64_t> seen_;
  storage::UseHistory past_uses_;
};

}  // namespace

CacheHits ReplayInModel(const RequestLog& log, const StoreShape& shape) {
  return StoreModel(log, shape).Run();
}

}  // namespace prefixd::bench
