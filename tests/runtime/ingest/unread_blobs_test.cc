// Derived data that cannot be read now is not made again: ingest and the loaders report the error,
// and what is stored stays.
#include <sys/stat.h>

#include <set>

#include "runtime/derived/blob_names.h"
#include "runtime/derived/models.h"
#include "runtime/ingest/ingest.h"
#include "runtime/ingest/rewrite.h"
#include "runtime/store/store_options.h"
#include "storage/store/open_store.h"
#include "storage/store/prefix_store.h"
#include "tests/runtime/runtime_fixture.h"
#include "tests/runtime/wait_checked.h"
#include "tests/storage/io/faulty_engine.h"

namespace prefixd::testing {
namespace {

using storage::SegmentId;

// Fails the reads of one blob, and notes what is written.
class UnreadableBlob final : public storage::SegmentSource {
 public:
  UnreadableBlob(storage::SegmentSource& inner, std::string name, Code code)
      : inner_(inner), name_(std::move(name)), code_(code) {}

  Result<storage::PrefixInfo> GetPrefix(const SegmentId& id) const override {
    return inner_.GetPrefix(id);
  }
  Result<std::shared_ptr<const storage::StoredPrefix>> OpenPrefix(const SegmentId& id,
                                                                  uint32_t n_tokens) override {
    return inner_.OpenPrefix(id, n_tokens);
  }
  Status PutBlob(const SegmentId& id, std::string_view name, std::string_view producer,
                 std::span<const std::byte> bytes) override {
    {
      std::lock_guard lock(mutex_);
      written_.insert(std::string(name));
    }
    return inner_.PutBlob(id, name, producer, bytes);
  }
  Result<std::vector<std::byte>> GetBlob(const SegmentId& id, std::string_view name,
                                         std::string_view producer) const override {
    if (name != name_) return inner_.GetBlob(id, name, producer);
    asked_ = true;
    return Error{code_, "the disk refuses"};
  }
  std::vector<std::string> ListBlobs(const SegmentId& id) const override {
    return inner_.ListBlobs(id);
  }
  Status RemoveBlob(const SegmentId& id, std::string_view name) override {
    return inner_.RemoveBlob(id, name);
  }

  bool asked() const { return asked_; }
  std::set<std::string> written() const {
    std::lock_guard lock(mutex_);
    return written_;
  }

 private:
  storage::SegmentSource& inner_;
  const std::string name_;
  const Code code_;
  mutable std::atomic<bool> asked_{false};
  mutable std::mutex mutex_;
  std::set<std::string> written_;
};

// Makes a file one that can be opened and not read, until the end of its scope.
class UnreadableFile {
 public:
  explicit UnreadableFile(std::filesystem::path path)
      : path_(std::move(path)), aside_(path_.string() + ".aside") {
    std::filesystem::rename(path_, aside_);
    std::filesystem::create_directory(path_);
  }
  ~UnreadableFile() {
    std::filesystem::remove(path_);
    std::filesystem::rename(aside_, path_);
  }
  UnreadableFile(const UnreadableFile&) = delete;
  UnreadableFile& operator=(const UnreadableFile&) = delete;

 private:
  const std::filesystem::path path_, aside_;
};

class UnreadBlobsTest : public RuntimeTest {
 protected:
  UnreadBlobsTest() {
    options_.build_codes = options_.build_ivf = true;
    options_.codes_min_tokens = options_.ivf_min_tokens = 1000;
    options_.recall_target = 0.5;
    options_.recluster = false;
    options_.checkpoint_tokens = 512;
    options_.clusters = 8;
    options_.phi_features = "log8";
    options_.estimators = *ParseVariants("none, moment, moment/r4, centroid, phi");
  }

  // Leaves little to be made.
  void MakeIndexesAlone() {
    options_.build_ivf = false;
    options_.phi_features = "none";
    options_.estimators = *ParseVariants("none, moment");
  }
  // The store's files with `part` in their names.
  std::vector<std::filesystem::path> Files(const std::string& part) const {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(options_.dir / "segments")) {
      if (entry.path().filename().string().find(part) != std::string::npos) {
        found.push_back(entry.path());
      }
    }
    return found;
  }
};

TEST_F(UnreadBlobsTest, IngestReportsTheErrorAndWritesNothing) {
  AddMaps(4096, Seed("IngestReportsTheErrorAndWritesNothing"));
  Open();
  const auto prompt =
      MakePrompt(spec_.geometry, 1200, Seed("IngestReportsTheErrorAndWritesNothing"));
  const std::string prefix = PutReady(prompt);
  store_.reset();
  const auto at = StorageOptions(options_);
  ASSERT_OK(at);
  auto opened = storage::PrefixStore::Open(*at);
  ASSERT_OK(opened);
  ModelRegistry models(opened->get(), {10, 1 << 30}, {});
  ASSERT_OK(models.LoadAll());
  const auto model = models.Find(spec_.name);
  ASSERT_OK(model);
  const SegmentId id = *SegmentId::Parse(prefix);
  ThreadPool pool(2);
  ScratchPool scratch;
  std::set<std::string> read;
  const auto names = (*opened)->ListBlobs(id);
  ASSERT_GT(names.size(), 15u);
  for (const std::string& name : names) {
    for (const Code code : {Code::kIo, Code::kUnavailable, Code::kResourceExhausted}) {
      SCOPED_TRACE(name + ": " + std::string(CodeName(code)));
      UnreadableBlob segments(**opened, name, code);
      WorkProgress progress;
      const Status done = IngestSegment({segments, options_, pool, scratch}, **model, id, progress);
      if (!segments.asked()) continue;
      read.insert(name.substr(0, name.find('.')));
      EXPECT_CODE(done, code);
      EXPECT_EQ(segments.written(), std::set<std::string>{});
    }
  }
  const std::set<std::string> every{"choice",   "clustering", "clusters", "codes",
                                    "features", "ivf",        "kept",     "moments",
                                    "phi",      "queries",    "recall"};
  EXPECT_EQ(read, every);
}

// What sessions load is not left out either: a step without its index would read every key, and a
// session without choices would use another estimator.
TEST_F(UnreadBlobsTest, SessionsReportWhatTheyCouldNotLoad) {
  MakeIndexesAlone();
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1500, Seed("SessionsReportWhatTheyCouldNotLoad"));
  ASSERT_NE(PutReady(prompt), "");
  Open();
  {
    const auto choices = Files(".choice.");
    ASSERT_EQ(choices.size(), 1u);
    const UnreadableFile unreadable(choices[0]);
    EXPECT_CODE(store_->Attach({spec_.name, "", prompt.tokens, "", 0, {}}), Code::kIo);
  }
  StepPolicy policy;
  policy.k = 25;
  policy.selector = "codes";
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  const auto q = prompt.Q(1, 1499, 1);
  {
    std::vector<std::unique_ptr<UnreadableFile>> unreadable;
    for (auto& file : Files(".codes.1.")) {  // of the layer that steps
      unreadable.push_back(std::make_unique<UnreadableFile>(std::move(file)));
    }
    ASSERT_FALSE(unreadable.empty());
    const KvGeometry& g = spec_.geometry;
    std::vector<float> y(g.n_q_heads * g.value_dim), lse(g.n_q_heads);
    EXPECT_CODE(session->Step(1, q, y, lse, nullptr), Code::kIo);
  }
  EXPECT_GT(Step(*session, 1, q).info.ledger.retrieved_tokens, 0u);
}

TEST_F(UnreadBlobsTest, ACompactionKeepsTheSamplesThatItCouldNotRead) {
  MakeIndexesAlone();
  options_.compact_max_tokens = 0;
  Open();
  PutReady(MakePrompt(spec_.geometry, 250, 29));
  const SegmentId id = *SegmentId::Parse(PutReady(MakePrompt(spec_.geometry, 500, 29)));
  store_.reset();
  options_.compact_max_tokens = 8192;
  const auto at = StorageOptions(options_);
  ASSERT_OK(at);
  auto opened = storage::PrefixStore::Open(*at);
  ASSERT_OK(opened);
  ModelRegistry models(opened->get(), {10, 1 << 30}, {});
  ASSERT_OK(models.LoadAll());
  const auto model = models.Find(spec_.name);
  ASSERT_OK(model);
  ThreadPool pool(2);
  ScratchPool scratch;
  WorkProgress progress;
  UnreadableBlob segments(**opened, std::string(kQueriesBlob), Code::kIo);
  EXPECT_CODE(RewriteSegment(**opened, {segments, options_, pool, scratch}, **model, id, progress),
              Code::kIo);
  EXPECT_TRUE(segments.asked());
  EXPECT_EQ((*opened)->GetPrefix(id)->chain.size(), 2u);
  const auto done =
      RewriteSegment(**opened, {**opened, options_, pool, scratch}, **model, id, progress);
  ASSERT_OK(done);
  ASSERT_TRUE(done->compacted);
  EXPECT_EQ(std::ranges::count((*opened)->ListBlobs(*done->compacted), kQueriesBlob), 1);
}

TEST_F(UnreadBlobsTest, AStepReportsTheErrorAndTheNextOneUsesTheIndex) {
  auto plan = std::make_shared<storage::FaultPlan>();
  plan->reads_only = true;
  options_.build_ivf = false;
  options_.host_tier_bytes = 0;
  options_.phi_features = "none";
  options_.estimators = *ParseVariants("none, moment");
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1500, Seed("AStepReportsTheError"));
  ASSERT_NE(PutReady(prompt), "");
  store_.reset();
  auto opened = LocalStore::Open(options_, [&](const storage::StoreOptions& at) {
    return storage::OpenStoreWithEngine(at, [&](std::unique_ptr<storage::IoEngine> inner) {
      return std::make_unique<storage::FaultyEngine>(std::move(inner), plan);
    });
  });
  ASSERT_OK(opened);
  store_ = *std::move(opened);
  prefixd::testing::WaitChecked(*store_);
  const auto files = [&] {  // by name and inode: a blob that is made again is another file
    std::set<std::pair<std::string, uint64_t>> all;
    for (const auto& entry : std::filesystem::directory_iterator(options_.dir / "segments")) {
      struct stat st {};
      ::stat(entry.path().c_str(), &st);
      all.emplace(entry.path().filename(), st.st_ino);
    }
    return all;
  };
  const auto before = files();
  StepPolicy policy;
  policy.k = 25;
  policy.selector = "codes";
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  const auto q = prompt.Q(1, 1499, 1);
  const KvGeometry& g = spec_.geometry;
  std::vector<float> y(g.n_q_heads * g.value_dim), lse(g.n_q_heads);
  plan->Arm(storage::Fault::kEio, 1, true);
  EXPECT_CODE(session->Step(1, q, y, lse, nullptr), Code::kIo);
  plan->Disarm();
  const Output out = Step(*session, 1, q);
  EXPECT_GT(out.info.ledger.retrieved_tokens, 0u);
  EXPECT_EQ(store_->Stats()->ingest_queue, 0u);
  const auto selection = session->Select(1, 0, q.first(2 * g.key_dim), 25);
  ASSERT_OK(selection);
  EXPECT_EQ(selection->cuts[0].kind, CutKind::kApproximate);  // by the index, not every key
  EXPECT_EQ(files(), before);
}

}  // namespace
}  // namespace prefixd::testing
