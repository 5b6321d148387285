// Tests the store: models, puts, refusals, the registry of sessions, restart.
#include <cmath>
#include <filesystem>
#include <limits>
#include <thread>

#include "base/every_page.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

using StoreTest = RuntimeTest;

TEST_F(StoreTest, UnknownModelsAndPrefixesAreNamed) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 60, 1);
  auto put = store_->BeginPut({"nobody", "", prompt.tokens, ""});
  EXPECT_CODE(put, Code::kNotFound);
  EXPECT_NE(put.error().message.find("tiny"), std::string::npos) << put.error().message;
  EXPECT_CODE(store_->Match({.model = "nobody", .tokens = prompt.tokens}), Code::kNotFound);
  EXPECT_CODE(store_->Attach({"nobody", "", prompt.tokens, "", 0, {}}), Code::kNotFound);
  EXPECT_CODE(store_->Attach({"tiny", "", prompt.tokens, "", 0, {}}), Code::kNotFound);
  EXPECT_CODE(store_->Attach({"tiny", "", {}, "", 0, {}}), Code::kInvalidArgument);
  EXPECT_CODE(store_->Prefix("zz"), Code::kNotFound);
  EXPECT_CODE(store_->WaitReady(std::string(32, '0'), nullptr), Code::kNotFound);
  EXPECT_CODE(store_->Remove("x"), Code::kNotFound);
}

TEST_F(StoreTest, ModelsAreCheckedAndKept) {
  AddMaps(512, 7);
  Open();
  ASSERT_OK(store_->RegisterModel(spec_));  // again
  ModelSpec other = spec_;
  other.identity = {{"weights", "w2"}};
  // Their metadata names other weights.
  EXPECT_CODE(store_->RegisterModel(other), Code::kInvalidArgument);
  other.feature_maps.clear();
  EXPECT_CODE(store_->RegisterModel(other), Code::kAlreadyExists);
  other.name = "wide";
  other.geometry = SmallGeometry(2, 4, 2, 32);
  other.identity = {{"weights", "w1"}};
  other.feature_maps = spec_.feature_maps;
  EXPECT_CODE(store_->RegisterModel(other), Code::kInvalidArgument);  // the maps have 16 dimensions
  other.geometry.layers.clear();
  EXPECT_CODE(store_->RegisterModel(other), Code::kInvalidArgument);
  other = spec_;
  other.feature_maps = {dir_.path() / "none.safetensors"};
  EXPECT_CODE(store_->RegisterModel(other), Code::kNotFound);

  store_.reset();
  auto reopened = LocalStore::Open(options_);
  ASSERT_OK(reopened);
  const auto models = EveryModel(**reopened).value();
  ASSERT_EQ(models.size(), 1u);
  EXPECT_EQ(models[0].identity, spec_.identity);
  EXPECT_EQ(models[0].geometry, spec_.geometry);
  ASSERT_EQ(models[0].feature_maps.size(), 1u);
}

TEST_F(StoreTest, FeatureMapsAddedLaterSurviveARestart) {
  Open();
  AddMaps(512, 7);
  ASSERT_OK(store_->RegisterModel(spec_));
  store_.reset();
  auto reopened = LocalStore::Open(options_);
  ASSERT_OK(reopened);
  EXPECT_EQ(EveryModel(**reopened).value()[0].feature_maps.size(), 1u);
}

TEST_F(StoreTest, WrongSizesAreRefused) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 64, 2);
  auto put = store_->BeginPut({"tiny", "", prompt.tokens, ""});
  ASSERT_OK(put);
  const auto k = prompt.K(0, 0, 10), v = prompt.V(0, 0, 10);
  EXPECT_CODE((*put)->Write(2, 0, 10, k, v), Code::kInvalidArgument);
  EXPECT_CODE((*put)->Write(0, 60, 10, k, v), Code::kInvalidArgument);
  EXPECT_CODE((*put)->Write(0, 0, 9, k, v), Code::kInvalidArgument);
  EXPECT_CODE((*put)->Write(0, 0, 10, k, v.first(8)), Code::kInvalidArgument);
  EXPECT_CODE((*put)->WriteQueries(0, 0, 9, prompt.Q(0, 0, 10)), Code::kInvalidArgument);
  EXPECT_CODE((*put)->Commit(), Code::kFailedPrecondition);  // rows are missing
  (*put)->Abort();
  EXPECT_CODE((*put)->Write(0, 0, 10, k, v), Code::kFailedPrecondition);
  auto match = store_->Match({.model = "tiny", .tokens = prompt.tokens});
  ASSERT_OK(match);
  EXPECT_EQ(match->n_tokens, 0u);
  EXPECT_EQ(match->prefix, "");
}

TEST_F(StoreTest, RowsAndQueriesThatAreNotFiniteAreNamed) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    spec_.name = std::string(DTypeName(dtype));
    spec_.geometry = SmallGeometry(2, 4, 2, 16, dtype);
    Open();
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      auto prompt = MakePrompt(spec_.geometry, 40, 3);
      auto put = store_->BeginPut({spec_.name, "", prompt.tokens, ""});
      ASSERT_OK(put);
      const size_t at = (17 * 2 + 1) * 16 + 5;  // token 17, KV head 1
      FromFloat(dtype, {&bad, 1}, prompt.v[1].data() + at * DTypeBytes(dtype));
      const auto status = (*put)->Write(1, 10, 30, prompt.K(1, 10, 30), prompt.V(1, 10, 30));
      EXPECT_CODE(status, Code::kInvalidArgument);
      EXPECT_NE(status.error().message.find("value of layer 1, token 17"), std::string::npos)
          << status.error().message;
      prompt.q[0][(5 * 4 + 2) * 16] = bad;
      const auto queries = (*put)->WriteQueries(0, 0, 40, prompt.Q(0, 0, 40));
      EXPECT_CODE(queries, Code::kInvalidArgument);
      EXPECT_NE(queries.error().message.find("token 5, head 2"), std::string::npos)
          << queries.error().message;
    }
  }
}

TEST_F(StoreTest, PuttingAgainStoresNothingNew) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 200, 4);
  const std::string id = Put(prompt);
  auto put = store_->BeginPut({"tiny", "", prompt.tokens, ""});
  ASSERT_OK(put);
  EXPECT_EQ((*put)->missing().size(), 0u);
  ASSERT_OK((*put)->Write(0, 0, 200, prompt.K(0, 0, 200), prompt.V(0, 0, 200)));  // ignored
  auto result = (*put)->Commit();
  ASSERT_OK(result);
  EXPECT_EQ(result->prefix, id);
  EXPECT_EQ(result->stored_tokens, 0u);
  EXPECT_EQ(result->bytes, 0u);
}

TEST_F(StoreTest, TenantsDoNotSeeEachOther) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 100, 5);
  const std::string id = Put(prompt, true, 100, "alice");
  EXPECT_CODE(store_->Attach({"tiny", "bob", prompt.tokens, "", 0, {}}), Code::kNotFound);
  EXPECT_CODE(store_->Attach({"tiny", "bob", {}, id, 0, {}}), Code::kNotFound);
  StepPolicy policy;
  policy.k = 5;
  ASSERT_OK(store_->Attach({"tiny", "alice", {}, id, 0, policy}));
}

TEST_F(StoreTest, RestartGivesIdenticalSteps) {
  const uint64_t seed = Seed("RestartGivesIdenticalSteps");
  AddMaps(2048, seed);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1100, seed);
  ASSERT_NE(PutReady(prompt), "");
  std::vector<Output> before;
  const auto run = [&](std::vector<Output>& outputs) {
    for (const EstimatorKind estimator : {EstimatorKind::kNone, EstimatorKind::kMoment,
                                          EstimatorKind::kPhi, EstimatorKind::kAuto}) {
      StepPolicy policy;
      policy.estimator = estimator;
      policy.budget = 0.05;
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      for (uint32_t l = 0; l < 2; ++l) outputs.push_back(Step(*session, l, prompt.Q(l, 1099, 1)));
    }
  };
  run(before);
  Open();
  std::vector<Output> after;
  run(after);
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(before[i].y, after[i].y) << i;
    EXPECT_EQ(before[i].lse, after[i].lse) << i;
  }
}

TEST_F(StoreTest, RemoveWaitsForSessions) {
  options_.compact_max_tokens = 0;  // a compacted prefix keeps its name beside the session's rows
  Open();
  const auto parent = MakePrompt(spec_.geometry, 150, 6);
  const auto child = MakePrompt(spec_.geometry, 260, 6);
  const std::string parent_id = PutReady(parent), child_id = PutReady(child);
  ASSERT_NE(parent_id, child_id);
  StepPolicy policy;
  policy.k = 5;
  auto session = Attach(child, policy);
  EXPECT_CODE(store_->Remove(child_id), Code::kFailedPrecondition);
  ASSERT_OK(store_->WaitReady(child_id, nullptr));  // still there
  ASSERT_OK(session->Detach());
  ASSERT_OK(store_->Remove(child_id));
  ASSERT_OK(store_->Remove(parent_id));
  EXPECT_TRUE(EveryPrefix(*store_).value().empty());
}

TEST_F(StoreTest, AHostTierThatNoDeviceCanBeGivenIsSaidAndDoneWithout) {
  options_.pin_host_tier = true;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 300, 8);
  PutReady(prompt);
  const auto session = Attach(prompt, {.k = 5});
  const std::vector<uint32_t> ids = {0, 7, 299};
  const auto rows = session->ReadInPlace(1, 1, ids);
  ASSERT_OK(rows);
  EXPECT_EQ(rows->rows.size(), 3u);
  const RuntimeStats stats = store_->Stats().value();
  EXPECT_GT(stats.host_tier_pinned, 0u);
  EXPECT_FALSE(stats.host_tier_gpu.empty());
  EXPECT_NE(stats.host_tier_gpu, "off");  // "registered", or why not
}

TEST_F(StoreTest, VerifyAndStatsCountWhatIsThere) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 300, 8);
  const std::string id = PutReady(prompt);
  auto report = store_->Verify("", nullptr);
  ASSERT_OK(report);
  EXPECT_EQ(report->segments, 1u);
  EXPECT_GT(report->blobs, 0u);
  EXPECT_TRUE(report->damaged.empty());
  StepPolicy policy;
  policy.k = 5;
  const auto session = Attach(prompt, policy);
  Step(*session, 0, prompt.Q(0, 299, 1));
  const RuntimeStats stats = store_->Stats().value();
  EXPECT_EQ(stats.models, 1u);
  EXPECT_EQ(stats.prefixes, 1u);
  EXPECT_EQ(stats.sessions, 1u);
  EXPECT_EQ(stats.steps, 1u);
  EXPECT_EQ(stats.compute, "cpu");
  EXPECT_EQ(stats.ingest_queue, 0u);
  const auto detail = store_->Prefix(id);
  ASSERT_OK(detail);
  EXPECT_EQ(detail->summary.n_tokens, 300u);
  EXPECT_EQ(detail->summary.ingest, IngestState::kReady);
  EXPECT_EQ(detail->chain, std::vector<std::string>{id});
}

TEST_F(StoreTest, LifetimeIsKeptAndTheSweepRemovesWhatExpired) {
  options_.maintenance_ms = 20;
  Open();
  const auto first = MakePrompt(spec_.geometry, 100, 21),
             second = MakePrompt(spec_.geometry, 90, 22);
  const std::string kept = PutReady(first), short_lived = PutReady(second);
  ASSERT_OK(store_->SetLifetime(kept, {true, 3600}));
  ASSERT_OK(store_->SetLifetime(kept, {std::nullopt, 7200}));
  const auto detail = store_->Prefix(kept);
  ASSERT_OK(detail);
  EXPECT_TRUE(detail->summary.pinned);
  EXPECT_GT(detail->summary.expires_unix_ms, detail->summary.created_unix_ms + 7'000'000);
  EXPECT_CODE(store_->SetLifetime(kept, {std::nullopt, ~0ull}), Code::kInvalidArgument);
  EXPECT_CODE(store_->SetLifetime(std::string(32, '0'), {true, {}}), Code::kNotFound);
  auto put = store_->BeginPut({"tiny", "", first.tokens, "", false, ~0ull});
  EXPECT_CODE(put, Code::kInvalidArgument);

  ASSERT_OK(store_->SetLifetime(short_lived, {std::nullopt, 1}));
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (store_->Stats().value().expired == 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(store_->Stats().value().expired, 1u);
  EXPECT_EQ(EveryPrefix(*store_).value().size(), 1u);
  EXPECT_CODE(store_->Attach({"tiny", "", second.tokens, "", 0, {}}), Code::kNotFound);
  EXPECT_EQ(store_->Stats().value().tenants.size(), 1u);
  EXPECT_EQ(store_->Stats().value().tenants[0].bytes, store_->Stats().value().bytes_on_disk);
}

TEST_F(StoreTest, WhatHasExpiredIsNotFoundThoughASessionHoldsIt) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 400, 23);
  const std::string id = PutReady(prompt);
  StepPolicy policy;
  policy.k = 5;
  const auto holds = store_->Attach({"tiny", "", {}, id, 0, policy});
  ASSERT_OK(holds);
  ASSERT_OK(store_->SetLifetime(id, {std::nullopt, 1}));
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  EXPECT_CODE(store_->Attach({"tiny", "", {}, id, 0, policy}), Code::kNotFound);
  EXPECT_CODE(store_->Attach({"tiny", "", {}, id, 300, policy}), Code::kNotFound);
}

TEST_F(StoreTest, AFullStoreEvictsWhatIsUsedTheLeast) {
  Open();
  const auto used = MakePrompt(spec_.geometry, 100, 31), idle = MakePrompt(spec_.geometry, 100, 32);
  PutReady(used);
  options_.quota_bytes = 5 * store_->Stats().value().bytes_on_disk / 2;  // two and a half of them
  Open();
  PutReady(idle);
  StepPolicy policy;
  policy.k = 5;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Attach(used, policy));
  PutReady(MakePrompt(spec_.geometry, 100, 33));
  const RuntimeStats stats = store_->Stats().value();
  EXPECT_EQ(stats.evictions, 1u);
  EXPECT_LE(stats.bytes_on_disk, options_.quota_bytes);
  EXPECT_TRUE(Attach(used, policy));
  EXPECT_CODE(store_->Attach({"tiny", "", idle.tokens, "", 0, policy}), Code::kNotFound);
}

// A damaged summary is not used, and made again.
TEST_F(StoreTest, DamagedDerivedDataAreMadeAgain) {
  const uint64_t seed = Seed("DamagedDerivedDataAreMadeAgain");
  options_.scrub_bytes_per_second = 0;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 600, seed);
  const std::string id = PutReady(prompt);
  const auto blobs = store_->Prefix(id)->blobs;
  store_.reset();
  const auto path = options_.dir / "segments" / (id + ".moments.128.blob");
  ASSERT_TRUE(std::filesystem::exists(path));
  FlipByte(path, 500);
  Open();
  ASSERT_OK(store_->Verify("", nullptr));
  ASSERT_OK(store_->WaitReady(id, nullptr));
  EXPECT_EQ(store_->Prefix(id)->blobs, blobs);
  const auto again = store_->Verify("", nullptr);
  ASSERT_OK(again);
  EXPECT_EQ(again->damaged, std::vector<std::string>{});
  EXPECT_FALSE(EveryPrefix(*store_).value().at(0).quarantined);
}

// What opening the store does not read is checked behind it, also where nothing is scrubbed.
TEST_F(StoreTest, ADamagedHeaderIsFoundSoonAfterTheStart) {
  options_.scrub_bytes_per_second = 0;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 600, Seed("ADamagedHeaderIsFound"));
  const std::string id = PutReady(prompt);
  store_.reset();
  FlipByte(options_.dir / "segments" / (id + ".seg"), 100);
  Open();
  const auto found = [&] { return store_->Prefix(id)->summary.quarantined; };
  for (int i = 0; i < 3000 && !found(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(found());
}

// Damage to a page under an open session makes the steps that need the page fail, and later matches
// miss; other sessions do not notice, and the prompt can be put anew.
TEST_F(StoreTest, DamageUnderAnOpenSession) {
  const uint64_t seed = Seed("DamageUnderAnOpenSession");
  options_.host_tier_bytes = 0;
  options_.scrub_bytes_per_second = 0;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 600, seed);
  const auto apart = MakePrompt(spec_.geometry, 600, seed + 1);
  const std::string id = PutReady(prompt), other = PutReady(apart);
  StepPolicy full;
  full.mode = StepMode::kFull;
  const auto session = Attach(prompt, full), sound = Attach(apart, full);
  ASSERT_TRUE(session && sound);
  const std::vector<float> q(spec_.geometry.n_q_heads * spec_.geometry.key_dim, 0.5f);
  FlipByte(options_.dir / "segments" / (id + ".seg"), 4 * 4096 + 9);  // layer 0, KV head 0
  std::vector<float> y(spec_.geometry.n_q_heads * spec_.geometry.value_dim);
  std::vector<float> lse(spec_.geometry.n_q_heads);
  EXPECT_CODE(session->Step(0, q, y, lse, nullptr), Code::kCorrupt);
  ASSERT_OK(session->Step(1, q, y, lse, nullptr));
  Step(*sound, 0, q);
  EXPECT_EQ(store_->Match({.model = spec_.name, .tokens = prompt.tokens})->n_tokens, 0u);
  EXPECT_CODE(store_->Attach({spec_.name, "", {}, id, 0, full}), Code::kCorrupt);
  const auto listed = store_->Prefix(id);
  ASSERT_OK(listed);
  EXPECT_TRUE(listed->summary.quarantined);
  EXPECT_NE(listed->summary.quarantine.find("does not verify"), std::string::npos);
  const std::string anew = PutReady(prompt);
  EXPECT_NE(anew, id);
  Step(*Attach(prompt, full), 0, q);
}

// Closing the store does not wait for the scrub, at any rate.
TEST_F(StoreTest, TheScrubEndsWithTheStore) {
  options_.scrub_bytes_per_second = 1;
  options_.scrub_interval_hours = 1;
  Open();
  PutReady(MakePrompt(spec_.geometry, 600, 3));
  Open();
  EXPECT_GT(store_->Stats().value().verified_since_unix_ms, 0);
  EXPECT_EQ(store_->Stats().value().scrub_bytes, 0u);  // nothing is due
}

// Who copies a snapshot has a working directory of its own.
TEST_F(StoreTest, ARelativeDirectoryIsToldInFull) {
  const std::filesystem::path here = std::filesystem::current_path();
  std::filesystem::current_path(options_.dir.parent_path());
  options_.dir = options_.dir.filename();
  Open();
  std::filesystem::current_path(here);
  const auto snapshot = store_->TakeSnapshot();
  ASSERT_OK(snapshot);
  EXPECT_TRUE((*snapshot)->dir().is_absolute()) << (*snapshot)->dir();
  EXPECT_TRUE(std::filesystem::exists((*snapshot)->dir() / "STORE"));
  PutReady(MakePrompt(spec_.geometry, 60, 1));  // wherever the program is now
}

TEST_F(StoreTest, BadOptionsAreRefused) {
  RuntimeOptions bad = options_;
  bad.io = "floppy";
  EXPECT_CODE(LocalStore::Open(bad), Code::kInvalidArgument);
  bad = options_;
  bad.evict = "always";
  EXPECT_CODE(LocalStore::Open(bad), Code::kInvalidArgument);
  bad = options_;
  bad.compute = "abacus";
  EXPECT_CODE(LocalStore::Open(bad), Code::kInvalidArgument);
  bad = options_;
  bad.checkpoint_tokens = 0;
  EXPECT_CODE(LocalStore::Open(bad), Code::kInvalidArgument);
  bad = options_;
  bad.choice_budgets = {0.5, 2};
  EXPECT_CODE(LocalStore::Open(bad), Code::kInvalidArgument);
  Open();
  EXPECT_CODE(LocalStore::Open(options_), Code::kFailedPrecondition);  // a second opener
}

}  // namespace
}  // namespace prefixd::testing
