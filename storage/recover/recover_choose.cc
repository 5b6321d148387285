#include "storage/recover/recover_choose.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace prefixd::storage {
namespace {

class Chooser {
 public:
  explicit Chooser(SegmentScan& scan) : scan_(scan) {}

  RecoverChoice Run() {
    DropOtherModels();
    // Own tokens that a session moved: the session is gone.
    TakeOut("", [](const FoundSegment& f) { return f.record.live; });
    DropTwins();
    DropReplaced();
    CollectAliases();
    return std::move(choice_);
  }

 private:
  // Takes out the segments that `drop` selects; an empty `why` means that another file has their
  // rows.
  template <typename Drop>
  void TakeOut(const std::string& why, Drop drop) {
    std::erase_if(scan_.found, [&](const FoundSegment& f) {
      if (!drop(f)) return false;
      if (!why.empty() || !f.damage.empty()) {
        scan_.damaged.emplace_back(f.path, why.empty() ? f.damage : why);
      } else {
        choice_.superseded.push_back(f.path);
      }
      return true;
    });
  }

  // A model's last manifest overrides earlier ones.
  void DropOtherModels() {
    std::map<std::string, uint64_t> last;
    for (const FoundSegment& f : scan_.found) {
      uint64_t& sequence = last[f.record.model];
      if (f.record.sequence < sequence) continue;
      sequence = f.record.sequence;
      choice_.models[f.record.model] = f.manifest.model;
      if (sequence >= choice_.last_sequence) choice_.block_tokens = f.manifest.block_tokens;
      choice_.last_sequence = std::max(choice_.last_sequence, sequence);
    }
    TakeOut("another model was stored under its model's name later", [&](const FoundSegment& f) {
      return choice_.models.at(f.record.model).fingerprint != f.manifest.model.fingerprint;
    });
  }

  // When a segment has two files (a rewrite was cut short), the later one with sound rows is kept;
  // but one with all rows before a compressed one: where that was acknowledged, the other is gone.
  void DropTwins() {
    std::map<SegmentId, const FoundSegment*> best;
    for (const FoundSegment& f : scan_.found) {
      const FoundSegment*& kept = best[f.record.id];
      const auto worth = [](const FoundSegment& x) {
        return std::tuple(x.damage.empty(), !x.record.compressed(), x.record.sequence);
      };
      if (kept == nullptr || worth(f) > worth(*kept)) kept = &f;
    }
    std::set<Uuid> keep;
    for (const auto& [id, f] : best) keep.insert(f->record.file);
    TakeOut("", [&](const FoundSegment& f) { return !keep.contains(f.record.file); });
  }

  // Drops segments that were compacted into another, unless something still continues them.
  void DropReplaced() {
    std::map<SegmentId, std::vector<SegmentId>> children;
    for (const FoundSegment& f : scan_.found) children[f.record.parent].push_back(f.record.id);
    std::set<SegmentId> gone;
    for (const FoundSegment& compacted : scan_.found) {
      if (!compacted.damage.empty()) continue;
      const std::set<SegmentId> old(compacted.manifest.replaces.begin(),
                                    compacted.manifest.replaces.end());
      const bool needed = std::ranges::any_of(old, [&](const SegmentId& id) {
        const auto of_it = children.find(id);
        return of_it != children.end() &&
               std::ranges::any_of(of_it->second,
                                   [&](const SegmentId& child) { return !old.contains(child); });
      });
      if (!needed) gone.insert(old.begin(), old.end());
    }
    TakeOut("", [&](const FoundSegment& f) { return gone.contains(f.record.id); });
    for (const FoundSegment& f : scan_.found) choice_.segments[f.record.id] = f.record;
  }

  void CollectAliases() {
    std::map<SegmentId, std::pair<uint64_t, AliasRecord>> last;
    for (const FoundSegment& f : scan_.found) {
      for (AliasRecord alias : f.manifest.aliases) {
        if (choice_.segments.contains(alias.id) || alias.n_tokens <= f.record.tokens.begin ||
            alias.n_tokens > f.record.tokens.end) {
          continue;
        }
        alias.segment = f.record.id;
        auto& [sequence, kept] = last[alias.id];
        if (f.record.sequence < sequence) continue;
        sequence = f.record.sequence;
        kept = std::move(alias);
      }
    }
    std::set<SegmentId> named;
    for (auto& [id, entry] : last) {
      named.insert(entry.second.segment);
      choice_.aliases.push_back(std::move(entry.second));
    }
    for (const auto& [id, record] : choice_.segments) named.insert(record.parent);
    // A segment without a name that nothing needs would be freed, so it becomes listed again.
    for (auto& [id, record] : choice_.segments) record.listed |= !named.contains(id);
  }

  SegmentScan& scan_;
  RecoverChoice choice_;
};

}  // namespace

RecoverChoice ChooseSegments(SegmentScan& scan) { return Chooser(scan).Run(); }

}  // namespace prefixd::storage
