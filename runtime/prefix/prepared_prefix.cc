#include "runtime/prefix/prepared_prefix.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "runtime/derived/blob_names.h"
#include "runtime/derived/unread.h"
#include "runtime/indexes/index_recall.h"
#include "runtime/summaries/head_choice.h"

namespace prefixd {

PreparedPrefix::PreparedPrefix(const Services& services, std::shared_ptr<const Model> model,
                               std::shared_ptr<const storage::StoredPrefix> stored,
                               std::vector<SegmentPart> parts, std::shared_ptr<PrefixMemory> memory)
    : services_(services),
      model_(std::move(model)),
      stored_(std::move(stored)),
      parts_(std::move(parts)),
      partition_(Partition::Of(stored_->n_tokens(), services.derived.options.anchors)),
      account_(services.derived.MemoryOf(stored_->info().tenant)),
      exact_(index::MakeExactIndex(partition_.mid)),
      memory_(memory ? std::move(memory) : std::make_shared<PrefixMemory>(HeadCount(*model_))) {
  memory_->kept_rows = stored_->info().kept_rows;
  DropSomeKeys();
}

Result<std::unique_ptr<PreparedPrefix>> PreparedPrefix::Open(const Services& services,
                                                             std::shared_ptr<const Model> model,
                                                             const storage::SegmentId& id,
                                                             uint32_t n_tokens,
                                                             std::shared_ptr<PrefixMemory> memory) {
  PREFIXD_ASSIGN(auto stored, services.derived.segments.OpenPrefix(id, n_tokens));
  PREFIXD_ASSIGN(auto parts,
                 ChainParts(services.derived.segments, stored->info(), stored->n_tokens()));
  if (memory && memory->kept_rows != stored->info().kept_rows) memory = nullptr;
  return std::unique_ptr<PreparedPrefix>(new PreparedPrefix(
      services, std::move(model), std::move(stored), std::move(parts), std::move(memory)));
}

PreparedPrefix::~PreparedPrefix() {
  services_.index_preloader.Forget(*this);
  services_.key_preloader.Forget(*this);
}

bool PreparedPrefix::has_phi_caches() const {
  const FeatureMapSet* set = maps();
  if (!set) return false;
  const std::string prefix = SummaryKind::Phi(*model_, *set, services_.derived.options).prefix();
  return std::all_of(parts_.begin(), parts_.end(), [&](const SegmentPart& part) {
    const auto names = services_.derived.segments.ListBlobs(part.id);
    return part.stored.end <= services_.derived.options.anchors.n_sink ||
           std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return name.starts_with(prefix); });
  });
}

bool PreparedPrefix::has_clusters() const {
  return std::all_of(parts_.begin(), parts_.end(), [&](const SegmentPart& part) {
    return part.stored.end <= services_.derived.options.anchors.n_sink ||
           HasClusterings(services_.derived, part.id);
  });
}

const SegmentPart* PreparedPrefix::LargestPart() const {
  // An index covers its whole segment. Where a branch leaves a segment before its end, the index
  // does not know the branch's own tokens behind: only whole segments count, and the last one.
  const SegmentPart* largest = nullptr;
  for (const SegmentPart& part : parts_) {
    if (part.used.end != part.stored.end && &part != &parts_.back()) continue;
    if (!largest || part.used.size() > largest->used.size()) largest = &part;
  }
  return largest;
}

uint32_t PreparedPrefix::candidates() const {
  if (!compressed()) return partition_.mid.size();
  const uint32_t dropped = stored_->info().own_tokens - stored_->info().kept_rows;
  return partition_.mid.size() - std::min(dropped, partition_.mid.size());
}

Result<std::span<const uint32_t>> PreparedPrefix::KeptMid(size_t head) {
  PrefixMemory::Head& state = memory_->heads[head];
  if (!state.has_kept.load(std::memory_order_acquire)) {
    PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(state.mutex));
    if (!state.has_kept.load(std::memory_order_relaxed)) {
      PREFIXD_ASSIGN(const auto own, stored_->KeptTokens(layer_of(head), kv_head_of(head)));
      const TokenRange mid = partition_.mid;
      PREFIXD_ASSIGN(state.kept_memory,
                     account_.Take(MemoryKind::kKeys, uint64_t{mid.size()} * sizeof(uint32_t)));
      std::vector<uint32_t> kept;
      // The segments before the last have all their rows.
      for (uint32_t t = mid.begin; t < std::min(mid.end, parts_.back().stored.begin); ++t) {
        kept.push_back(t);
      }
      std::ranges::copy_if(own, std::back_inserter(kept),
                           [&](uint32_t t) { return mid.contains(t); });
      kept.shrink_to_fit();
      state.kept_memory.Set(kept.size() * sizeof(uint32_t));
      state.kept = std::move(kept);
      state.has_kept.store(true, std::memory_order_release);
    }
  }
  return std::span<const uint32_t>(state.kept);
}

void PreparedPrefix::DropMissing(size_t head, std::vector<uint32_t>& ids) const {
  if (!compressed()) return;
  const std::vector<uint32_t>& kept = memory_->heads[head].kept;
  std::erase_if(ids, [&](uint32_t id) { return !std::ranges::binary_search(kept, id); });
}

// Indexes were made of all rows, and would return tokens that have none any more.
bool PreparedPrefix::has_index(index::IndexKind kind) const {
  if (compressed()) return false;
  if (kind == index::IndexKind::kCodes) return HasCodes(services_.derived, parts_, partition_.mid);
  const SegmentPart* part = LargestPart();
  if (!part || part->used.size() < partition_.mid.size() / 2) return false;
  const std::string prefix = std::string(index::IndexName(kind)) + ".";
  return std::ranges::any_of(services_.derived.segments.ListBlobs(part->id),
                             [&](const std::string& name) { return name.starts_with(prefix); });
}

Result<std::vector<HeadChoice>> PreparedPrefix::Choices() const {
  const std::string producer = ChoiceProducer(services_.derived.options, *model_);
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    // Choices hold for prompts about as long as the one whose queries made them.
    if (part->used.end < partition_.tail.end - partition_.tail.end / 4) break;
    if (part->used.end < part->stored.end - part->stored.end / 4) continue;
    const auto blob = services_.derived.segments.GetBlob(part->id, kChoiceBlob, producer);
    if (!blob.ok() && Unread(blob.error())) return blob.error();
    if (!blob.ok()) continue;
    auto choices = DeserializeChoices(*blob);
    if (!choices.ok() || choices->empty()) continue;
    for (HeadChoice& choice : *choices) {
      if (compressed()) {
        std::erase_if(choice.errors,
                      [](const EstimatorError& e) { return e.estimator.clustered(); });
      }
    }
    return choices;
  }
  return std::vector<HeadChoice>{};
}

Status PreparedPrefix::CheckStored(const EstimatorVariant& variant) const {
  PREFIXD_TRY(CheckGathered(services_.derived.options, variant));
  const FeatureMapSet* set = maps();
  if (variant.kind == EstimatorKind::kPhi && !set) {
    const std::string why = model_->maps_error.empty()
                                ? "it was registered without feature maps; train them and register "
                                  "the model again, or use estimator moment"
                                : "its feature maps cannot be loaded: " + model_->maps_error;
    return Error{Code::kFailedPrecondition,
                 "no phi caches for model '" + model_->spec.name + "': " + why};
  }
  if (compressed() && variant.clustered()) {
    return Error{Code::kFailedPrecondition,
                 "estimator '" + variant.Name() +
                     "' needs the keys of all tokens, and the prefix is compressed; use estimator "
                     "auto or moment"};
  }
  const bool missing = (variant.kind == EstimatorKind::kPhi && !has_phi_caches()) ||
                       (variant.clustered() && !has_clusters());
  if (!missing) return {};
  return Error{Code::kFailedPrecondition,
               "what estimator '" + variant.Name() +
                   "' reads of this prefix is not built yet; wait until it is ready (WaitReady) or "
                   "use estimator moment"};
}

Result<KeptSummaries> PreparedPrefix::Summaries(const HeadsOfVariants& wanted,
                                                WorkPriority priority,
                                                std::vector<storage::ReadStats>* reads) {
  for (const auto& [variant, heads] : wanted) PREFIXD_TRY(CheckStored(variant));
  KeptSummaries out;
  PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(memory_->summaries_mutex));
  std::erase_if(memory_->summaries, [](const auto& entry) { return entry.second.expired(); });
  for (const bool moments : {true, false}) {
    HeadsOfVariants missing;
    for (const auto& [variant, heads] : wanted) {
      const bool nothing = variant.clustered() && partition_.mid.size() == 0;
      if ((variant.kind == EstimatorKind::kMoment) != moments || nothing) continue;
      for (const size_t head : heads) {
        const auto it = memory_->summaries.find({variant, head});
        auto held = it == memory_->summaries.end() ? nullptr : it->second.lock();
        if (held) {
          out[variant].emplace(head, std::move(held));
        } else {
          missing[variant].push_back(head);
        }
      }
    }
    // Behind the last checkpoint at most one interval and a tail remain to add.
    const uint64_t max_added = moments ? kMomentsOnTheSpot
                                       : uint64_t{services_.derived.options.checkpoint_tokens} +
                                             services_.derived.options.anchors.n_tail;
    PREFIXD_ASSIGN(auto loaded, LoadMaterialised({services_.derived, *model_, *stored_, parts_,
                                                  partition_.mid, maps(), max_added, priority,
                                                  reads, account_, &memory_->clusters},
                                                 missing));
    for (auto& [variant, heads] : loaded) {
      for (const auto& [head, summary] : heads) memory_->summaries[{variant, head}] = summary;
      out[variant].merge(heads);
    }
  }
  return out;
}

Result<AnchorRows> PreparedPrefix::Anchors(size_t head, storage::ReadStats* reads) {
  const RowShape row = this->row(head);
  PrefixMemory::Head& state = memory_->heads[head];
  ChargePreloaded(state, reads);
  const size_t sink_bytes = partition_.sink.size() * row.bytes();
  const size_t tail_bytes = partition_.tail.size() * row.bytes();
  if (!state.has_anchors.load(std::memory_order_acquire)) {
    PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(state.mutex));
    if (!state.has_anchors.load(std::memory_order_relaxed)) {
      PREFIXD_ASSIGN(auto memory, account_.Take(MemoryKind::kKeys, sink_bytes + tail_bytes));
      std::vector<std::byte> bytes(sink_bytes + tail_bytes);
      const auto out = std::span(bytes);
      const uint32_t layer = layer_of(head), kv_head = kv_head_of(head);
      if (sink_bytes > 0) {
        PREFIXD_TRY(
            stored_->ReadRange(layer, kv_head, partition_.sink, out.first(sink_bytes), reads));
      }
      if (tail_bytes > 0) {
        PREFIXD_TRY(
            stored_->ReadRange(layer, kv_head, partition_.tail, out.subspan(sink_bytes), reads));
      }
      state.anchors = std::move(bytes);
      state.anchors_memory = std::move(memory);
      state.has_anchors.store(true, std::memory_order_release);
    }
  }
  return AnchorRows{{state.anchors.data(), partition_.sink.size(), row.bytes(), row},
                    {state.anchors.data() + sink_bytes, partition_.tail.size(), row.bytes(), row}};
}

Status PreparedPrefix::Extend(const PreparedPrefix& shorter, size_t head, index::IndexKind kind,
                              storage::ReadStats* reads) {
  const PreparedPrefix* from = Continues(shorter) ? &shorter : nullptr;
  if (kind != index::IndexKind::kExact) PREFIXD_TRY(LoadIndex(head, kind, from, reads));
  if (!shorter.holds_keys(head)) return {};
  if (from) TakeKeysOf(*from);
  return LoadKeys(head, from, storage::RangeUse::kOwn, nullptr, reads);
}

Status PreparedPrefix::PreloadIndex(size_t head, index::IndexKind kind) {
  if (model_->spec.geometry.layers[layer_of(head)].sliding_window > 0) return {};
  // Beyond the bound only data that steps cannot do without is loaded.
  if (services_.selector_memory.used() >= services_.selector_memory.capacity()) return {};
  storage::ReadStats reads;
  // Index would queue this very load in the background, so it is not called here.
  const Status loaded = [&]() -> Status {
    if (kind != index::IndexKind::kExact) PREFIXD_TRY(LoadIndex(head, kind, nullptr, &reads));
    const auto anchors = Anchors(head, &reads);
    return anchors.ok() ? Status() : Status(anchors.error());
  }();
  NotePreloaded(memory_->heads[head], reads);
  return loaded;
}

void PreparedPrefix::NotePreloaded(PrefixMemory::Head& state, const storage::ReadStats& reads) {
  std::lock_guard lock(state.preloaded_mutex);
  state.ahead += reads;
  state.has_preloaded.store(true, std::memory_order_release);
}

void PreparedPrefix::ChargePreloaded(PrefixMemory::Head& state, storage::ReadStats* reads) {
  if (!reads || !state.has_preloaded.load(std::memory_order_acquire)) return;
  std::lock_guard lock(state.preloaded_mutex);
  *reads += std::exchange(state.ahead, {});
  state.has_preloaded.store(false, std::memory_order_relaxed);
}

Result<IndexSource> PreparedPrefix::Source(size_t head, index::IndexKind kind,
                                           storage::ReadStats* reads) {
  PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(recalls_mutex_));
  auto it = recalls_.find(kind);
  if (it == recalls_.end()) {
    std::vector<std::vector<IndexRecall>> recalls;
    for (const SegmentPart& part : parts_) {
      PREFIXD_ASSIGN(recalls.emplace_back(), LoadRecalls(services_.derived, part.id, kind));
    }
    it = recalls_.emplace(kind, std::move(recalls)).first;
  }
  return IndexSource{services_.derived, services_.rebuild, parts_,           it->second,
                     partition_.mid,    layer_of(head),    kv_head_of(head), reads};
}

Result<const index::KeyIndex*> PreparedPrefix::Index(size_t head, index::IndexKind kind,
                                                     storage::ReadStats* reads) {
  if (kind == index::IndexKind::kExact) return exact_.get();
  PrefixMemory::Head& state = memory_->heads[head];
  const PrefixMemory::LoadedIndex& slot = state.indexes[static_cast<size_t>(kind)];
  if (!slot.loaded.load(std::memory_order_acquire)) {
    services_.index_preloader.Want(*this, kind);
    PREFIXD_TRY(LoadIndex(head, kind, nullptr, reads));
  }
  ChargePreloaded(state, reads);
  return slot.of.index ? slot.of.index.get() : exact_.get();
}

Status PreparedPrefix::LoadIndex(size_t head, index::IndexKind kind, const PreparedPrefix* shorter,
                                 storage::ReadStats* reads) {
  PrefixMemory::Head& state = memory_->heads[head];
  PrefixMemory::LoadedIndex& slot = state.indexes[static_cast<size_t>(kind)];
  PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(state.mutex));
  if (slot.loaded.load(std::memory_order_relaxed)) return {};
  PREFIXD_ASSIGN(IndexSource source, Source(head, kind, reads));
  // Where newer derived data has come for one of its segments, nothing is taken over.
  if (shorter && !shorter->memory_->stale) {
    const PrefixMemory::LoadedIndex& had =
        shorter->memory_->heads[head].indexes[static_cast<size_t>(kind)];
    if (had.loaded.load(std::memory_order_acquire)) source.loaded = had.of.parts;
  }
  source.keep = [&](std::unique_ptr<index::KeyIndex> loaded)
      -> Result<std::shared_ptr<const index::KeyIndex>> {
    struct Kept {
      SelectorMemory::Lease memory;
      std::unique_ptr<index::KeyIndex> index;
    };
    PREFIXD_ASSIGN(auto memory, services_.selector_memory.Charge(account_, loaded->memory_bytes()));
    const auto kept = std::make_shared<Kept>(Kept{std::move(memory), std::move(loaded)});
    return std::shared_ptr<const index::KeyIndex>(kept, kept->index.get());
  };
  const SegmentPart* largest = LargestPart();
  PrefixIndex loaded;
  if (kind == index::IndexKind::kCodes) {
    PREFIXD_ASSIGN(loaded, LoadCodes(source));
  } else if (largest) {
    PREFIXD_ASSIGN(loaded, LoadOne(source, static_cast<size_t>(largest - parts_.data()), kind));
  }
  slot.of = std::move(loaded);
  slot.loaded.store(true, std::memory_order_release);
  return {};
}

Result<const TokenFeatures*> PreparedPrefix::Features(size_t head, storage::ReadStats* reads) {
  PrefixMemory::Head& state = memory_->heads[head];
  if (!state.has_features.load(std::memory_order_acquire)) {
    PREFIXD_ASSIGN(const CallLock lock, CallLock::Take(state.mutex));
    if (!state.has_features.load(std::memory_order_relaxed)) {
      const SummaryKind kind = SummaryKind::Phi(*model_, *maps(), services_.derived.options);
      if (kind.stored_features()) {
        uint64_t loaded = 0;
        PREFIXD_ASSIGN(state.features_memory,
                       account_.Take(MemoryKind::kSummaries,
                                     uint64_t{partition_.mid.size()} *
                                         kind.feature_format().RowBytes(maps()->d_phi)));
        PREFIXD_ASSIGN(state.features, TokenFeatures::OfMid(services_.derived, *model_, *maps(),
                                                            kind.feature_format(), parts_,
                                                            partition_.mid, head, &loaded));
        if (reads) reads->bytes[static_cast<size_t>(Tier::kSsd)] += loaded;
      }
      state.has_features.store(true, std::memory_order_release);
    }
  }
  return state.features ? &*state.features : nullptr;
}

}  // namespace prefixd
