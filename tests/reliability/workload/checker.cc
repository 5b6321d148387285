#include "tests/reliability/workload/checker.h"

#include <algorithm>
#include <memory>

#include "storage/catalog/store_dir.h"
#include "storage/segment/hex.h"
#include "tests/reliability/workload/workload.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage::reliability {
namespace {

namespace fs = std::filesystem;

class Check {
 public:
  Check(fs::path dir, Truth& truth, Journal& journal)
      : dir_(std::move(dir)), truth_(truth), journal_(journal) {}

  bool Open() {
    RepairSpoiled(dir_, truth_);
    auto opened = PrefixStore::Open(WorkloadOptions(dir_));
    if (!opened.ok()) return Wrong("it does not open: " + opened.error().ToString());
    store_ = std::move(*opened);
    return true;
  }

  void All() {
    CheckModel();
    LiftQuarantines();
    for (const PrefixInfo& info : store_->ListPrefixes()) CheckPrefix(info);
    CheckAbsent();
    CheckFiles();
    CheckVerify();
  }

  uint64_t orphans() const { return store_->stats().recovered_orphans; }

 private:
  bool Wrong(const std::string& what) {
    journal_.Violation(what);
    return false;
  }

  void Tell(const Event& event) {
    truth_.Apply(event);
    journal_.Append(event);
  }

  void LiftQuarantines() {
    const std::vector<uint32_t> repaired = truth_.Spoiled();
    if (repaired.empty()) return;
    CheckVerify();
    for (const uint32_t number : repaired) Tell({EventKind::kSpoilEnd, {number}});
  }

  void CheckModel() {
    const auto model = store_->GetModel(WorkloadModel().name);
    if (truth_.model() && !model.ok()) Wrong("the model is lost");
    if (model.ok() && model->fingerprint != WorkloadModel().fingerprint) Wrong("the model differs");
  }

  void CheckPrefix(const PrefixInfo& info) {
    const std::string who = "prefix " + info.id.ToString();
    if (info.quarantined && LostRemoval(info)) {
      journal_.Count(1, "removals lost and made again");
      if (Status removed = store_->Remove(info.id); !removed.ok()) {
        Wrong(who + " cannot be removed again: " + removed.error().message);
      }
      return;
    }
    if (info.quarantined) Wrong(who + " is quarantined: " + info.quarantine);
    const auto prefix = store_->OpenPrefix(info.id, 0);
    if (!prefix.ok()) {
      Wrong(who + " does not open: " + prefix.error().ToString());
      return;
    }
    const Tokens tokens((*prefix)->tokens().begin(), (*prefix)->tokens().end());
    const auto number = truth_.Find(info.tenant == TenantName(0) ? 0 : 1, tokens);
    if (!number) {
      Wrong(who + " was never put");
      return;
    }
    if (!truth_.at(*number).possible()) Wrong(who + " is back although its removal succeeded");
    const auto difference = Compare(**prefix, *number, truth_.at(*number));
    if (!difference.ok()) Wrong(who + " does not read: " + difference.error().ToString());
    if (difference.ok() && !difference->empty()) Wrong(who + ": wrong bytes, " + *difference);
    if (truth_.at(*number).possible()) {
      CheckLifetime(who, *number, info);
      CheckBlobs(*number, info.chain.back());
    }
    Event seen{EventKind::kSeen, {*number}};
    for (const SegmentId& id : {info.id, info.chain.back()}) {
      const auto words = IdWords(id);
      seen.words.insert(seen.words.end(), words.begin(), words.end());
    }
    seen.words.push_back(info.pinned ? 1 : 0);
    seen.AddWide(info.expires_unix_ms);
    seen.words.push_back(info.kept_rows > 0 ? 1 : 0);
    Tell(seen);
    seen_.insert(*number);
    // This includes segments that only others continue.
    for (const SegmentId& id : info.chain) {
      const auto segment = store_->GetPrefix(id);
      if (!segment.ok()) {
        Wrong(who + " has an unknown segment in its chain");
        continue;
      }
      files_[ToHex(segment->file) + ".seg"] = 0;
      for (const std::string& name : store_->ListBlobs(id)) {
        files_[id.ToString() + "." + name + ".blob"] = 0;
      }
      segment_of_[segment->file] = segment_of_[id.bytes] = id;
      bytes_[id] = segment->own_bytes;
    }
  }

  // A removal whose commit went with a damaged log leaves a record without a file: its rows cannot
  // be read, and it can be removed again.
  bool LostRemoval(const PrefixInfo& info) const {
    if (info.quarantine.find("the file is missing") == std::string::npos) return false;
    return std::any_of(truth_.prompts().begin(), truth_.prompts().end(), [&](const auto& entry) {
      const Prompt& p = entry.second;
      return p.id == info.id && (!p.possible() || p.removing);
    });
  }

  void CheckLifetime(const std::string& who, uint32_t number, const PrefixInfo& info) {
    const auto& kept = truth_.at(number).kept;
    if (!kept.contains({info.pinned, info.expires_unix_ms})) {
      Wrong(who + " is not kept as long as was acknowledged");
    }
  }

  void CheckBlobs(uint32_t number, const SegmentId& id) {
    const Prompt& p = truth_.at(number);
    // A compaction drops the blobs of both and may have brought some; an unfinished removal may
    // have taken them first.
    if (p.segment && *p.segment != id) {
      if (p.compacting == 0) Wrong("a prefix moved to another segment");
      Event compacted{EventKind::kCompacted, IdWords(id)};
      compacted.words.push_back(number);
      Tell(compacted);
    }
    const auto sharing = truth_.In(id);
    const bool removing =
        p.removing || std::any_of(sharing.begin(), sharing.end(),
                                  [&](uint32_t other) { return truth_.at(other).removing; });
    std::set<std::string> listed;
    for (std::string& name : store_->ListBlobs(id)) listed.insert(std::move(name));
    const Blobs blobs = truth_.BlobsOf(id);
    for (const auto& [name, allowed] : blobs) {
      const auto got = store_->GetBlob(id, BlobName(name), BlobProducer(name));
      if (!got.ok() && got.error().code != Code::kNotFound) {
        Wrong("a blob does not read: " + got.error().ToString());
        continue;
      }
      if (listed.erase(BlobName(name)) != (got.ok() ? 1u : 0u)) {
        Wrong("the list of blobs does not agree with what is there");
      }
      uint32_t found = 0;
      for (const uint32_t version : allowed) {
        if (got.ok() && version != 0 && *got == BlobBytes(name, version)) found = version;
      }
      if (got.ok() && found == 0) Wrong("a blob has wrong bytes");
      if (!got.ok() && !allowed.contains(0) && !removing) {
        const bool with_merge = truth_.CameWithMerge(*allowed.begin());
        Wrong(with_merge ? kCompactedBlobLost : "an acknowledged blob is lost");
      }
      Tell({EventKind::kBlobSeen, {number, name, found}});
    }
    for (const std::string& name : listed) Wrong("blob " + name + " was never put");
  }

  void CheckAbsent() {
    std::vector<uint32_t> missing;
    for (const auto& [number, p] : truth_.prompts()) {
      if (p.possible() && !seen_.contains(number)) missing.push_back(number);
    }
    for (const uint32_t number : missing) {
      const Prompt& p = truth_.at(number);
      if (p.sure()) Wrong("prompt " + std::to_string(number) + " was acknowledged and is lost");
      Tell({EventKind::kNotSeen, {number}});
    }
    for (const uint32_t number : truth_.Sure()) {
      const Prompt& p = truth_.at(number);
      const auto match = store_->LongestMatch("m", TenantName(p.tenant), p.tokens,
                                              {.compressed = p.compressed.contains(true)});
      if (!match.ok() || match->n_tokens != p.tokens.size()) Wrong("a stored prompt has no match");
    }
  }

  // Checks that the disk holds only files that the store knows, in the sizes that it knows.
  void CheckFiles() {
    std::map<SegmentId, uint64_t> sizes;
    uint64_t total = 0;
    for (const auto& entry : fs::directory_iterator(dir_ / "segments")) {
      const std::string name = entry.path().filename().string();
      if (files_.erase(name) == 0) Wrong("a file is leaked: " + name);
      total += entry.file_size();
      if (const auto parsed = ParseSegmentsEntry(name)) {
        sizes[segment_of_[parsed->id]] += entry.file_size();
      }
    }
    for (const auto& [name, unused] : files_) Wrong("a file is missing: " + name);
    if (sizes != bytes_) Wrong("the sizes of prefixes are not those of their files");
    if (store_->stats().bytes_on_disk != total) Wrong("bytes_on_disk is not what lies there");
  }

  void CheckVerify() {
    const auto report = store_->Verify(nullptr, nullptr);
    if (!report.ok()) {
      Wrong("verify: " + report.error().ToString());
      return;
    }
    for (const std::string& damage : report->damaged) Wrong("verify: " + damage);
  }

  const fs::path dir_;
  Truth& truth_;
  Journal& journal_;
  std::unique_ptr<PrefixStore> store_;
  std::map<std::string, int> files_;
  std::map<Uuid, SegmentId> segment_of_;  // keyed by the uuids in file names
  std::map<SegmentId, uint64_t> bytes_;
  std::set<uint32_t> seen_;
};

}  // namespace

void CheckStore(const fs::path& dir, Truth& truth, Journal& journal, bool use) {
  {
    Check check(dir, truth, journal);
    if (!check.Open()) return;
    check.All();
  }
  if (!use) return;
  {
    Workload workload({.dir = dir, .seed = truth.next_prompt(), .operations = 8}, truth, journal);
    if (!workload.Open()) return;
    workload.Put();
    workload.PutBlob();
    workload.Read();
    workload.Remove();
    workload.Put();
  }
  Check again(dir, truth, journal);
  if (!again.Open()) return;
  if (again.orphans() != 0) journal.Violation("a clean close left files to be recovered");
  again.All();
}

}  // namespace prefixd::storage::reliability
