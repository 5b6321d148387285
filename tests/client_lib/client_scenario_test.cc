// Runs one scenario on every kind of client: prompts are put, kept, matched, attached to, stepped
// and removed.
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <thread>

#include "base/every_page.h"
#include "prefixd/restore.h"
#include "tests/client_lib/client_scenario.h"

namespace prefixd::testing {
namespace {

TEST_P(ClientScenario, LifetimeTravelsWithThePutAndAfterIt) {
  ASSERT_TRUE(client_->RegisterModel(prompt_.model).ok());
  auto put = client_->BeginPut({prompt_.model.name, "", prompt_.tokens, "", true, 1000});
  ASSERT_TRUE(put.ok() && WriteRows(**put, prompt_).ok());
  const auto done = (*put)->Commit();
  ASSERT_TRUE(done.ok());
  auto detail = client_->Prefix(done->prefix);
  ASSERT_TRUE(detail.ok());
  EXPECT_TRUE(detail->summary.pinned);
  EXPECT_GT(detail->summary.expires_unix_ms, detail->summary.created_unix_ms);
  ASSERT_TRUE(client_->SetLifetime(done->prefix, {false, {}}).ok());
  ASSERT_TRUE(client_->SetLifetime(done->prefix, {{}, 0}).ok());
  detail = client_->Prefix(done->prefix);
  ASSERT_TRUE(detail.ok());
  EXPECT_FALSE(detail->summary.pinned);
  EXPECT_EQ(detail->summary.expires_unix_ms, 0);
  EXPECT_EQ(client_->SetLifetime(std::string(32, '0'), {true, {}}).error().code, Code::kNotFound);
  const auto stats = client_->Stats();
  ASSERT_TRUE(stats.ok());
  ASSERT_EQ(stats->tenants.size(), 1u);
  EXPECT_GT(stats->tenants[0].bytes, 0u);
}

TEST_P(ClientScenario, ExplainsWhyAPromptMisses) {
  Put(*client_);
  ExplainSpec spec;
  spec.match.model = prompt_.model.name;
  spec.match.tokens = prompt_.tokens;
  auto why = client_->Explain(spec);
  ASSERT_TRUE(why.ok()) << why.error().message;
  EXPECT_EQ(why->match.n_tokens, kTokens);
  EXPECT_EQ(why->match.prefix, prefix_);
  EXPECT_TRUE(why->misses.empty());

  spec.match.tokens[300] = prompt_.tokens[300] + 1;
  why = client_->Explain(spec);
  ASSERT_TRUE(why.ok());
  ASSERT_EQ(why->misses.size(), 1u);
  EXPECT_EQ(why->asked_tokens, kTokens);
  EXPECT_EQ(why->misses[0].reason, MissReason::kDiverges);
  EXPECT_EQ(why->misses[0].n_tokens, 300u);
  EXPECT_EQ(why->misses[0].asked_token, prompt_.tokens[300] + 1);
  EXPECT_EQ(why->misses[0].stored_token, prompt_.tokens[300]);
  EXPECT_NE(why->misses[0].text.find("diverges at token 300"), std::string::npos);

  // Under another model of another identity and geometry nothing is stored, but the tokens are.
  ModelSpec other = prompt_.model;
  other.name = "other";
  other.identity.emplace_back("adapter", "poems");
  other.geometry.layers[1].scale = 0.5f;
  ASSERT_TRUE(client_->RegisterModel(other).ok());
  spec.match.tokens = prompt_.tokens;
  spec.match.model = "other";
  why = client_->Explain(spec);
  ASSERT_TRUE(why.ok());
  ASSERT_EQ(why->misses.size(), 2u);
  EXPECT_EQ(why->misses[0].reason, MissReason::kModelDiffers);
  EXPECT_EQ(why->misses[0].model, prompt_.model.name);
  EXPECT_EQ(why->misses[0].n_tokens, kTokens);
  ASSERT_EQ(why->misses[0].differs.size(), 2u);
  EXPECT_EQ(why->misses[0].differs[0], (FieldDifference{"adapter", "poems", ""}));
  EXPECT_EQ(why->misses[0].differs[1].field, "geometry.layers");
  EXPECT_EQ(why->misses[1].reason, MissReason::kNothingStored);

  // A model that is not registered, with the identity that the engine has.
  ASSERT_TRUE(client_->RemoveModel("other").ok() || Remote());
  spec.match.model = "gone";
  spec.identity = {{"weights", "others"}};
  why = client_->Explain(spec);
  ASSERT_TRUE(why.ok());
  ASSERT_EQ(why->misses.size(), 2u);
  EXPECT_EQ(why->misses[0].reason, MissReason::kModelDiffers);
  EXPECT_EQ(why->misses[0].differs,
            (std::vector<FieldDifference>{{"weights", "others", "random"}}));
  EXPECT_EQ(why->misses[1].reason, MissReason::kNoModel);

  // The identity that the engine has is compared with the registered one.
  spec.match.model = prompt_.model.name;
  why = client_->Explain(spec);
  ASSERT_TRUE(why.ok());
  ASSERT_EQ(why->misses.size(), 1u);
  EXPECT_EQ(why->misses[0].reason, MissReason::kModelDiffers);

  ASSERT_TRUE(client_->Remove(prefix_).ok());
  why = client_->Explain(spec);
  ASSERT_TRUE(why.ok());
  ASSERT_GE(why->misses.size(), 2u);
  EXPECT_EQ(why->misses[0].reason, MissReason::kRemoved);
  EXPECT_GE(why->misses[0].n_tokens, kTokens / 16 * 16);
  EXPECT_GT(why->misses[0].unix_ms, 0);
  EXPECT_EQ(client_->Explain({}).error().code, Code::kInvalidArgument);
}

TEST_P(ClientScenario, EstimatesWhatAPromptCosts) {
  ASSERT_TRUE(client_->RegisterModel(prompt_.model).ok());
  PutSpec put{prompt_.model.name, "", prompt_.tokens};
  put.prefill_from = 0;
  auto stream = client_->BeginPut(put);
  ASSERT_TRUE(stream.ok() && WriteRows(**stream, prompt_).ok() && (*stream)->Commit().ok());
  MatchSpec spec{prompt_.model.name, "", prompt_.tokens};
  auto match = client_->Match(spec);
  ASSERT_TRUE(match.ok()) << match.error().message;
  EXPECT_EQ(match->estimate.tokens, kTokens);
  EXPECT_GT(match->estimate.memory_bytes + match->estimate.disk_bytes, 0u);
  EXPECT_EQ(match->estimate.recompute.source, EstimateSource::kLearnt);
  EXPECT_EQ(match->estimate.retrieve, TimeEstimate());

  // Read twice, so that the rates of disk and memory are known, wherever the rows lay before.
  for (int i = 0; i < 2; ++i) {
    const auto session = Attach(*client_, {.mode = StepMode::kFull});
    ASSERT_NE(session, nullptr);
    auto restore = Restore::Begin(session, {});
    ASSERT_TRUE(restore.ok());
    for (auto run = (*restore)->Next(); run.ok() && run->has_value();) run = (*restore)->Next();
  }
  spec.engine = {1e-9, 100, 8};
  match = client_->Match(spec);
  ASSERT_TRUE(match.ok());
  EXPECT_EQ(match->estimate.tokens, kTokens - 100);
  EXPECT_EQ(match->estimate.restore.source, EstimateSource::kMeasured);
  EXPECT_EQ(match->estimate.recompute, (TimeEstimate{300e9, EstimateSource::kGiven}));
  EXPECT_EQ(match->estimate.prefill_tokens_per_second, 1e-9);
  EXPECT_EQ(match->estimate.advice, ReuseAdvice::kRestore);
  spec.engine.prefill_tokens_per_second = 1e15;
  auto pending = client_->MatchAsync(spec, std::chrono::hours(1));
  ASSERT_TRUE(pending.ok());
  match = (*pending)->Get();
  ASSERT_TRUE(match.ok());
  EXPECT_EQ(match->estimate.advice, ReuseAdvice::kRecompute);
  const auto why = client_->Explain({spec, {}});
  ASSERT_TRUE(why.ok());
  EXPECT_EQ(why->match.estimate.advice, ReuseAdvice::kRecompute);
  AttachSpec attach{prompt_.model.name, "", prompt_.tokens};
  attach.policy.mode = StepMode::kFull;
  attach.engine = spec.engine;
  const auto session = client_->Attach(attach);
  ASSERT_TRUE(session.ok()) << session.error().message;
  EXPECT_EQ((*session)->info().estimate.tokens, kTokens - 100);
  EXPECT_EQ((*session)->info().estimate.advice, ReuseAdvice::kRecompute);
  spec.engine.prefill_tokens_per_second = -1;
  EXPECT_EQ(client_->Match(spec).error().code, Code::kInvalidArgument);
  const auto stats = client_->Stats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->advised_recompute, 1u);
  EXPECT_EQ(stats->advised_restore, 1u);
}

TEST_P(ClientScenario, RewritesOnRequest) {
  Put(*client_);
  const Prompt more = MakePrompt(kTokens, Seed("ClientScenario") + 1);
  Prompt longer = prompt_;
  longer.tokens.insert(longer.tokens.end(), more.tokens.begin(), more.tokens.end());
  for (uint32_t l = 0; l < 2; ++l) {
    longer.k[l].insert(longer.k[l].end(), more.k[l].begin(), more.k[l].end());
    longer.v[l].insert(longer.v[l].end(), more.v[l].begin(), more.v[l].end());
  }
  const auto put = PutPrompt(*client_, longer);
  ASSERT_TRUE(put.ok()) << put.error().message;
  ASSERT_TRUE(client_->WaitReady(put->prefix, {}).ok());
  const auto compacted = client_->Rewrite(put->prefix, RewriteKind::kCompact, {});
  ASSERT_TRUE(compacted.ok()) << compacted.error().message;
  EXPECT_EQ(compacted->segments, 1u);
  EXPECT_LE(compacted->rewritten, 1u);  // the background may have been first
  ASSERT_TRUE(client_->WaitReady(put->prefix, {}).ok());
  const auto reclustered = client_->Rewrite(put->prefix, RewriteKind::kRecluster, {});
  ASSERT_TRUE(reclustered.ok()) << reclustered.error().message;
  EXPECT_TRUE(client_->Prefix(put->prefix)->summary.reclustered || !reclustered->left.empty());
  EXPECT_EQ(client_->Prefix(prefix_)->summary.n_tokens, kTokens);
  const auto again = client_->Rewrite(put->prefix, RewriteKind::kRecluster, {});
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->rewritten, 0u);
  EXPECT_EQ(client_->Rewrite(std::string(32, '0'), RewriteKind::kCompact, {}).error().code,
            Code::kNotFound);
}

TEST_P(ClientScenario, CompressesOnRequest) {
  Put(*client_);
  ASSERT_TRUE(client_->WaitReady(prefix_, {}).ok());
  CompressSpec spec;
  spec.policy = "window";
  spec.keep = 0.5;
  spec.dry_run = true;
  const auto measured = client_->Compress(prefix_, spec, {});
  ASSERT_TRUE(measured.ok()) << measured.error().message;
  EXPECT_FALSE(measured->compressed);
  EXPECT_EQ(client_->Prefix(prefix_)->summary.kept_tokens, 0u);
  spec.dry_run = false;
  const auto done = client_->Compress(prefix_, spec, {});
  ASSERT_TRUE(done.ok()) << done.error().message;
  EXPECT_TRUE(done->compressed);
  EXPECT_EQ(done->own_tokens, kTokens);
  EXPECT_EQ(client_->Prefix(prefix_)->summary.kept_tokens, done->kept_tokens);
  MatchSpec match;
  match.model = prompt_.model.name;
  match.tokens = prompt_.tokens;
  EXPECT_EQ(client_->Match(match)->n_tokens, 0u);
  match.accept_compressed = true;
  EXPECT_TRUE(client_->Match(match)->compressed);
  AttachSpec attach;
  attach.model = prompt_.model.name;
  attach.tokens = prompt_.tokens;
  attach.policy.k = 10;
  attach.policy.estimator = EstimatorKind::kMoment;
  attach.accept_compressed = true;
  EXPECT_TRUE(client_->Attach(attach).ok());
  attach.policy.mode = StepMode::kFull;
  EXPECT_EQ(client_->Attach(attach).error().code, Code::kFailedPrecondition);
  EXPECT_EQ(client_->Compress(prefix_, spec, {}).error().code, Code::kFailedPrecondition);
}

TEST_P(ClientScenario, SnapshotsAreForTheStoresOwner) {
  Put(*client_);
  auto snapshot = client_->TakeSnapshot();
  if (Remote()) {
    ASSERT_FALSE(snapshot.ok());
    EXPECT_EQ(snapshot.error().code, Code::kFailedPrecondition);
    return;
  }
  ASSERT_TRUE(snapshot.ok()) << snapshot.error().message;
  const std::filesystem::path dir = (*snapshot)->dir();
  EXPECT_TRUE(std::filesystem::exists(dir / "STORE"));
  EXPECT_EQ(client_->TakeSnapshot().error().code, Code::kFailedPrecondition);
  for (int i = 0; i < 20;
       ++i) {  // one that is destroyed is gone, and in the next one's way no more
    snapshot->reset();
    EXPECT_FALSE(std::filesystem::exists(dir));
    snapshot = client_->TakeSnapshot();
    ASSERT_TRUE(snapshot.ok()) << snapshot.error().message;
  }
}

TEST_P(ClientScenario, PutMatchAttachStepDetach) {
  Put(*client_);
  auto models = EveryModel(*client_);
  ASSERT_TRUE(models.ok());
  ASSERT_EQ(models->size(), 1u);
  EXPECT_EQ((*models)[0].geometry, prompt_.model.geometry);

  std::vector<uint32_t> longer = prompt_.tokens;
  longer.insert(longer.end(), {1, 2, 3});
  auto match = client_->Match({.model = prompt_.model.name, .tokens = longer});
  ASSERT_TRUE(match.ok()) << match.error().message;
  EXPECT_EQ(match->n_tokens, kTokens);
  EXPECT_EQ(match->prefix, prefix_);

  auto pending =
      client_->MatchAsync({.model = prompt_.model.name, .tokens = longer}, std::chrono::hours(1));
  ASSERT_TRUE(pending.ok()) << pending.error().message;
  match = (*pending)->Get();
  ASSERT_TRUE(match.ok()) << match.error().message;
  EXPECT_EQ(match->n_tokens, kTokens);
  EXPECT_EQ(match->prefix, prefix_);
  EXPECT_TRUE((*pending)->ready());

  for (StepPolicy policy :
       {StepPolicy{.mode = StepMode::kFull}, StepPolicy{.mode = StepMode::kAnchors},
        StepPolicy{.estimator = EstimatorKind::kMoment, .k = 24},
        StepPolicy{.estimator = EstimatorKind::kNone, .k = 24}}) {
    auto session = Attach(*client_, policy);
    auto reference = Attach(*reference_, policy);
    ASSERT_TRUE(session && reference);
    EXPECT_EQ(session->info().n_tokens, kTokens);
    EXPECT_EQ(session->policy(), policy);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const auto q = Queries(1, layer + 10);
      std::vector<float> y(kQHeads * kDim), lse(kQHeads), y2(y), lse2(lse);
      StepInfo info, info2;
      Status s = session->Step(layer, q, y, lse, &info);
      ASSERT_TRUE(s.ok()) << s.error().message;
      ASSERT_TRUE(reference->Step(layer, q, y2, lse2, &info2).ok());
      ExpectNear(y, y2);
      ExpectNear(lse, lse2);
      EXPECT_EQ(info.k, info2.k);
      EXPECT_EQ(info.ledger.retrieved_tokens, info2.ledger.retrieved_tokens);
      EXPECT_EQ(info.ledger.anchor_tokens, info2.ledger.anchor_tokens);
    }
    EXPECT_EQ(session->report()->total.steps, reference->report()->total.steps);
    auto report = session->Detach();
    ASSERT_TRUE(report.ok()) << report.error().message;
    EXPECT_EQ(report->total.steps, reference->report()->total.steps);
    EXPECT_EQ(report->per_head.size(), 4u);
    EXPECT_FALSE(session->Detach().ok());
    std::vector<float> y(kQHeads * kDim), lse(kQHeads);
    Status after = session->Step(0, Queries(1, 1), y, lse, nullptr);
    ASSERT_FALSE(after.ok());
    EXPECT_EQ(after.error().code, Code::kFailedPrecondition);
  }
}

TEST_P(ClientScenario, BatchesOfStepsKeepTheirOwnOutcomes) {
  Put(*client_);
  auto a = Attach(*client_, {.mode = StepMode::kFull});
  auto b = Attach(*client_, {.estimator = EstimatorKind::kMoment, .k = 16});
  auto reference = Attach(*reference_, {.mode = StepMode::kFull});
  ASSERT_TRUE(a && b && reference);
  const auto q0 = Queries(1, 3), q1 = Queries(1, 4);
  std::vector<std::vector<float>> y(4, std::vector<float>(kQHeads * kDim));
  std::vector<std::vector<float>> lse(4, std::vector<float>(kQHeads));
  std::vector<StepRequest> batch = {{a.get(), 0, q0, y[0], lse[0], nullptr, {}},
                                    {a.get(), 99, q0, y[1], lse[1], nullptr, {}},
                                    {b.get(), 1, q1, y[2], lse[2], nullptr, {}},
                                    {a.get(), 1, q1, y[3], lse[3], nullptr, {}}};
  client_->StepBatch(batch);
  EXPECT_TRUE(batch[0].status.ok());
  EXPECT_FALSE(batch[1].status.ok());
  EXPECT_TRUE(batch[2].status.ok());
  EXPECT_TRUE(batch[3].status.ok());
  std::vector<float> y2(kQHeads * kDim), lse2(kQHeads);
  ASSERT_TRUE(reference->Step(0, q0, y2, lse2, nullptr).ok());
  ExpectNear(y[0], y2);
  ASSERT_TRUE(reference->Step(1, q1, y2, lse2, nullptr).ok());
  ExpectNear(y[3], y2);
}

TEST_P(ClientScenario, ExactAttentionRowsSelectionAndSummaries) {
  Put(*client_);
  auto session = Attach(*client_), reference = Attach(*reference_);
  ASSERT_TRUE(session && reference);
  constexpr uint32_t kN = 5;
  const auto q = Queries(kN, 7);
  std::vector<float> y(kN * kQHeads * kDim), lse(kN * kQHeads), y2(y), lse2(lse);
  ASSERT_TRUE(session->AttendExact(1, kN, q, y, lse).ok());
  ASSERT_TRUE(reference->AttendExact(1, kN, q, y2, lse2).ok());
  ExpectNear(y, y2);
  ExpectNear(lse, lse2);

  // Rows are the bytes that were put: for each token its key, then its value.
  const size_t row = prompt_.model.geometry.row(0).bytes(), half = row / 2;
  const auto expected = [&](uint32_t layer, uint32_t head, uint32_t token) {
    const size_t at = (size_t{token} * 2 + head) * half;
    std::vector<std::byte> bytes(prompt_.k[layer].begin() + at,
                                 prompt_.k[layer].begin() + at + half);
    bytes.insert(bytes.end(), prompt_.v[layer].begin() + at, prompt_.v[layer].begin() + at + half);
    return bytes;
  };
  const std::vector<uint32_t> ids = {0, 17, 200, kTokens - 1};
  std::vector<std::byte> rows(ids.size() * row), range(kTokens * row);
  ASSERT_TRUE(session->ReadRows(1, 0, ids, rows).ok());
  ASSERT_TRUE(session->ReadRange(0, 1, {0, kTokens}, range).ok());
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto want = expected(1, 0, ids[i]);
    EXPECT_TRUE(std::equal(want.begin(), want.end(), rows.begin() + i * row)) << ids[i];
  }
  for (uint32_t t = 0; t < kTokens; ++t) {
    const auto want = expected(0, 1, t);
    ASSERT_TRUE(std::equal(want.begin(), want.end(), range.begin() + t * row)) << t;
  }
  const std::vector<uint32_t> beyond = {kTokens};
  rows.resize(row);
  EXPECT_FALSE(session->ReadRows(0, 0, beyond, rows).ok());
  EXPECT_FALSE(session->ReadRows(0, 0, ids, rows).ok());  // output too small

  const auto group = std::span(q).first(2 * kDim);
  auto mine = session->Select(0, 1, group, 12), theirs = reference->Select(0, 1, group, 12);
  ASSERT_TRUE(mine.ok() && theirs.ok());
  EXPECT_EQ(mine->ids, theirs->ids);
  EXPECT_EQ(mine->ids.size(), 12u);
  ASSERT_EQ(mine->cuts.size(), 2u);
  EXPECT_EQ(mine->cuts[0].kind, theirs->cuts[0].kind);

  auto moment = session->MomentBytes(1, 1), moment2 = reference->MomentBytes(1, 1);
  ASSERT_TRUE(moment.ok() && moment2.ok());
  EXPECT_EQ(*moment, *moment2);
  auto phi = session->PhiCacheBytes(0, 0);
  ASSERT_FALSE(phi.ok());  // no feature maps were registered
  EXPECT_EQ(phi.error().code, Code::kNotFound);
}

TEST_P(ClientScenario, RefusalsAreTheSameEverywhere) {
  Put(*client_);
  auto session = Attach(*client_);
  ASSERT_TRUE(session);
  std::vector<float> y(kQHeads * kDim), lse(kQHeads);
  auto q = Queries(1, 1);
  q[3] = std::nanf("");
  Status nan = session->Step(0, q, y, lse, nullptr);
  ASSERT_FALSE(nan.ok());
  EXPECT_EQ(nan.error().code, Code::kInvalidArgument);
  EXPECT_FALSE(session->Step(0, std::span(q).first(8), y, lse, nullptr).ok());

  Status infeasible = session->SetPolicy({.budget = 1e-4});
  ASSERT_FALSE(infeasible.ok());
  EXPECT_EQ(infeasible.error().code, Code::kInfeasible);

  auto unknown = client_->Attach({.model = "nobody", .tokens = prompt_.tokens});
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code, Code::kNotFound);
  EXPECT_EQ(client_->Prefix(std::string(32, '0')).error().code, Code::kNotFound);

  auto put = client_->BeginPut({prompt_.model.name, "", {9, 8, 7, 6}, ""});
  ASSERT_TRUE(put.ok()) << put.error().message;
  EXPECT_FALSE((*put)->Write(0, 0, 4, {}, {}).ok());
  EXPECT_FALSE((*put)->Commit().ok());  // rows are missing
  auto match = client_->Match({.model = prompt_.model.name, .tokens = {9, 8, 7, 6}});
  ASSERT_TRUE(match.ok());
  EXPECT_EQ(match->n_tokens, 0u);
}

TEST_P(ClientScenario, PrefixesVerifyRemoveStats) {
  Put(*client_);
  auto list = EveryPrefix(*client_);
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->size(), 1u);
  EXPECT_EQ((*list)[0].label, "scenario");
  EXPECT_EQ((*list)[0].ingest, IngestState::kReady);
  auto detail = client_->Prefix(prefix_);
  ASSERT_TRUE(detail.ok());
  EXPECT_EQ(detail->chain, std::vector<std::string>{prefix_});
  bool called = false;
  auto verify =
      client_->Verify("", [&](uint64_t, uint64_t, std::string_view) { return called = true; });
  ASSERT_TRUE(verify.ok()) << verify.error().message;
  EXPECT_TRUE(called);
  EXPECT_EQ(verify->segments, 1u);
  EXPECT_TRUE(verify->damaged.empty());
  auto stats = client_->Stats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->prefixes, 1u);
  EXPECT_EQ(stats->puts, 1u);
  Status removed = client_->Remove(prefix_);
  ASSERT_TRUE(removed.ok()) << removed.error().message;
  EXPECT_TRUE(EveryPrefix(*client_)->empty());
}

// Pages are the same embedded and remote, and the old ones are good after a removal.
TEST_P(ClientScenario, ListsComeInPages) {
  Put(*client_);
  for (uint64_t i = 1; i <= 5; ++i) {
    const Prompt more = MakePrompt(100, i);
    ASSERT_TRUE(PutPrompt(*client_, more, "more").ok());
  }
  const auto all = EveryPrefix(*client_);
  ASSERT_TRUE(all.ok() && all->size() == 6u);
  ListSpec list{.limit = 4};
  auto page = client_->ListPrefixes(list);
  ASSERT_TRUE(page.ok()) << page.error().message;
  ASSERT_EQ(page->prefixes.size(), 4u);
  ASSERT_TRUE(client_->Remove(page->prefixes[3].id).ok());
  list.after = page->next;
  page = client_->ListPrefixes(list);
  ASSERT_TRUE(page.ok()) << page.error().message;
  ASSERT_EQ(page->prefixes.size(), 2u);
  EXPECT_EQ(page->next, "");
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(page->prefixes[i].id, (*all)[4 + i].id);
  EXPECT_EQ(client_->ListPrefixes({.after = "x"}).error().code, Code::kInvalidArgument);

  ModelSpec second = prompt_.model;
  second.name = "another";
  second.identity = {{"weights", "others"}};
  ASSERT_TRUE(client_->RegisterModel(second).ok());
  const auto models = client_->ListModels({.limit = 1});
  ASSERT_TRUE(models.ok() && models->models.size() == 1u);
  EXPECT_EQ(models->models[0].name, "another");
  EXPECT_EQ(client_->ListModels({.after = models->next})->models.size(), 1u);
  EXPECT_EQ(client_->Model(prompt_.model.name)->identity, prompt_.model.identity);
  EXPECT_EQ(client_->Model("nobody").error().code, Code::kNotFound);
}

TEST_P(ClientScenario, ModelsAreRemovedWhenNothingIsStoredForThem) {
  Put(*client_);
  Status removed = client_->RemoveModel(prompt_.model.name);
  ASSERT_FALSE(removed.ok());
  EXPECT_EQ(removed.error().code, Code::kFailedPrecondition);
  const bool stranger = Remote();
  EXPECT_EQ(removed.error().message.find("used by 1 stored") == std::string::npos, stranger)
      << removed.error().message;
  ASSERT_TRUE(client_->Remove(prefix_).ok());
  removed = client_->RemoveModel(prompt_.model.name);
  EXPECT_EQ(removed.ok(), !stranger);
  EXPECT_EQ(EveryModel(*client_)->size(), stranger ? 1u : 0u);
}

INSTANTIATE_TEST_SUITE_P(Clients, ClientScenario, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
