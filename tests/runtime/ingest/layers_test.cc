// Tests models whose layers differ: each layer answers, bit for bit, as a model of that layer
// alone.
#include <map>

#include "tests/runtime/runtime_fixture.h"
#include "tests/support/layered_model.h"

namespace prefixd::testing {
namespace {

constexpr uint32_t kLayerTokens = 1500, kFirstTokens = 900;

class Layers : public RuntimeTest {
 protected:
  Layers() {
    spec_.geometry = LayeredGeometry();
    spec_.name = "layers";
    options_.build_codes = true;
    options_.build_ivf = true;
    options_.codes_min_tokens = options_.ivf_min_tokens = 500;
    options_.estimators.clear();
    for (const char* name : {"none", "moment", "moment/r4", "moment/full", "centroid", "scan"}) {
      options_.estimators.push_back(*EstimatorVariant::Parse(name));
    }
    options_.recluster_min_tokens = 100;
    options_.recluster_chunk_tokens = 256;
  }

  // Puts both turns of a prompt in the model of five layers, and each layer in one of its own.
  void PutAll(uint64_t seed) {
    prompt_ = MakePrompt(spec_.geometry, kLayerTokens, seed);
    Open();
    PutTurns(spec_, prompt_);
    for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
      if (!spec_.geometry.layers[l].stored) continue;
      const SyntheticPrompt alone = LayerAlone(prompt_, l);
      const ModelSpec model = ModelOfLayer(alone, l);
      ASSERT_OK(store_->RegisterModel(model));
      PutTurns(model, alone);
    }
    ASSERT_OK(store_->WaitRewritten(nullptr));
  }

  void PutTurns(const ModelSpec& model, const SyntheticPrompt& prompt) {
    for (const uint32_t n : {kFirstTokens, kLayerTokens}) {
      const auto tokens = std::span(prompt.tokens).first(n);
      auto put = store_->BeginPut({model.name, "", {tokens.begin(), tokens.end()}, "test"});
      ASSERT_OK(put);
      const TokenRange missing = (*put)->missing();
      EXPECT_EQ(missing.end, n);
      for (uint32_t l = 0; l < prompt.geometry.n_layers; ++l) {
        if (!prompt.geometry.layers[l].stored) continue;
        const uint32_t first = missing.begin, size = missing.size();
        ASSERT_OK(
            (*put)->Write(l, first, size, prompt.K(l, first, size), prompt.V(l, first, size)));
        ASSERT_OK((*put)->WriteQueries(l, 0, n, prompt.Q(l, 0, n)));
      }
      EXPECT_EQ((*put)->progress().done, (*put)->progress().total);
      const auto result = (*put)->Commit();
      ASSERT_OK(result);
      ASSERT_OK(store_->WaitReady(result->prefix, nullptr));
    }
  }

  std::shared_ptr<Session> AttachTo(const std::string& model, const StepPolicy& policy) {
    auto session = store_->Attach({model, "", prompt_.tokens, "", 0, policy});
    EXPECT_TRUE(session.ok()) << session.error().ToString();
    return session.ok() ? *std::move(session) : nullptr;
  }

  static std::vector<StepPolicy> Policies() {
    std::vector<StepPolicy> policies(11);
    for (size_t i = 0; i < policies.size(); ++i) policies[i].k = 16 + 5 * uint32_t(i);
    policies[0].mode = StepMode::kFull;
    policies[1].mode = StepMode::kAnchors;
    policies[2].estimator = EstimatorKind::kNone;
    policies[2].report_missing = true;
    policies[3].estimator = EstimatorKind::kMoment;
    policies[3].k.reset(), policies[3].budget = 0.2;
    policies[4].estimator = EstimatorKind::kScan;
    policies[4].selector = "exact";
    policies[5].estimator = EstimatorKind::kAuto;
    policies[5].k.reset(), policies[5].budget = 0.15;
    policies[6].estimator = EstimatorKind::kCentroid;
    policies[7].sharing = {.block = 4, .similarity = 0.2, .dilation = 2, .across = true};
    policies[8].prefetch = {.forward = 4, .back = 2};
    policies[8].selector = "codes";
    policies[9].estimator = *EstimatorVariant::Parse("moment/r4");
    policies[10].selector = "ivf";
    return policies;
  }

  // Steps of the same queries in both, some of all heads and some of a part of them.
  void ExpectStepsAlike(Session& all, Session& alone, uint32_t layer) {
    const LayerShape shape = spec_.geometry.layer(layer);
    for (uint32_t t = kLayerTokens - 6; t < kLayerTokens; ++t) {
      const auto q = prompt_.Q(layer, t, 1);
      const Output got = Step(all, layer, q), want = Step(alone, 0, q);
      ASSERT_EQ(got.y, want.y) << "layer " << layer << ", token " << t;
      ASSERT_EQ(got.lse, want.lse);
      EXPECT_EQ(got.info.k_per_head, want.info.k_per_head);
      EXPECT_TRUE(std::ranges::equal(got.info.missing, want.info.missing,
                                     [](const MissingMass& a, const MissingMass& b) {
                                       return a.delta == b.delta && a.certified == b.certified;
                                     }));
      EXPECT_EQ(got.info.ledger.retrieved_tokens, want.info.ledger.retrieved_tokens);
      EXPECT_EQ(got.info.ledger.summary_tokens, want.info.ledger.summary_tokens);
      EXPECT_EQ(got.info.ledger.logical_bytes, want.info.ledger.logical_bytes);
    }
    const uint32_t n = 5;
    const auto q = prompt_.Q(layer, 700, n);
    std::vector<float> y(n * shape.n_q_heads * shape.value_dim), lse(n * shape.n_q_heads);
    std::vector<float> y2(y), lse2(lse);
    ASSERT_OK(all.AttendExact(layer, n, q, y, lse));
    ASSERT_OK(alone.AttendExact(0, n, q, y2, lse2));
    EXPECT_EQ(y, y2);
    EXPECT_EQ(lse, lse2);
  }

  void ExpectReadsAlike(Session& all, Session& alone, uint32_t layer) {
    const LayerShape shape = spec_.geometry.layer(layer);
    const size_t row = shape.row().bytes();
    const std::vector<uint32_t> ids = {0, 5, 6, 899, 900, 1499};
    for (uint32_t h = 0; h < shape.n_kv_heads; ++h) {
      std::vector<std::byte> a(ids.size() * row), b(a), c(kLayerTokens * row), d(c);
      ASSERT_OK(all.ReadRows(layer, h, ids, a));
      ASSERT_OK(alone.ReadRows(0, h, ids, b));
      EXPECT_EQ(a, b);
      ASSERT_OK(all.ReadRange(layer, h, {0, kLayerTokens}, c));
      ASSERT_OK(alone.ReadRange(0, h, {0, kLayerTokens}, d));
      EXPECT_EQ(c, d);
      const auto q =
          prompt_.Q(layer, kLayerTokens - 1, 1)
              .subspan(h * shape.group_size() * shape.key_dim, shape.group_size() * shape.key_dim);
      const auto mine = all.Select(layer, h, q, 30), theirs = alone.Select(0, h, q, 30);
      ASSERT_OK(mine);
      ASSERT_OK(theirs);
      EXPECT_EQ(mine->ids, theirs->ids);
      EXPECT_EQ(*all.SummaryBytes(layer, h, EstimatorKind::kMoment),
                *alone.SummaryBytes(0, h, EstimatorKind::kMoment));
    }
    LayerSlice slice{.layer = layer, .tokens = {10, 1010}};
    std::vector<std::byte> k(1000 * shape.n_kv_heads * shape.row().key_bytes()), k2(k);
    std::vector<std::byte> v(1000 * shape.n_kv_heads * shape.row().value_bytes()), v2(v);
    ASSERT_OK(all.ReadLayer(slice, k, v));
    slice.layer = 0;
    ASSERT_OK(alone.ReadLayer(slice, k2, v2));
    EXPECT_EQ(k, k2);
    EXPECT_EQ(v, v2);
  }

  void ExpectEveryLayerAlike() {
    for (const StepPolicy& policy : Policies()) {
      const auto all = AttachTo("layers", policy);
      ASSERT_TRUE(all);
      for (uint32_t l = 0; l < spec_.geometry.n_layers; ++l) {
        if (!spec_.geometry.layers[l].stored) continue;
        const auto alone = AttachTo("layer-" + std::to_string(l), policy);
        ASSERT_TRUE(alone);
        SCOPED_TRACE("policy " + policy.estimator.Name() + ", layer " + std::to_string(l));
        ExpectStepsAlike(*all, *alone, l);
        ExpectReadsAlike(*all, *alone, l);
      }
      EXPECT_EQ(all->report()->per_head.size(), 2u + 4 + 2 + 6);
    }
  }

  SyntheticPrompt prompt_;
};

TEST_F(Layers, AnswerAsIfEachWereAlone) {
  PutAll(Seed("Layers.AnswerAsIfEachWereAlone"));
  ExpectEveryLayerAlike();
  Open();  // all of it is on the disk
  ExpectEveryLayerAlike();
  const auto prefixes = store_->ListPrefixes({});
  ASSERT_OK(prefixes);
  for (const PrefixSummary& prefix : prefixes->prefixes) {
    const auto report = store_->Verify(prefix.id, nullptr);
    ASSERT_OK(report);
    EXPECT_TRUE(report->damaged.empty());
  }
}

TEST_F(Layers, AnswerAlikeFromEncodedRows) {
  options_.encoding = "int8";
  PutAll(Seed("Layers.AnswerAlikeFromEncodedRows"));
  ExpectEveryLayerAlike();
}

TEST_F(Layers, AttendExactlyByDefinition) {
  options_.build_codes = options_.build_ivf = false;
  Open();
  prompt_ = MakePrompt(spec_.geometry, 400, Seed("Layers.AttendExactlyByDefinition"));
  ASSERT_NE(PutReady(prompt_), "");
  StepPolicy full;
  full.mode = StepMode::kFull;
  const auto session = AttachTo("layers", full);
  ASSERT_TRUE(session);
  for (const uint32_t layer : {0, 1, 3, 4}) ExpectSuffix(*session, prompt_, layer, 390, 10);
}

// Two ranks put half of the model's heads each, which are 1, 2, 1 and 3 of the layers'.
TEST_F(Layers, ArePutInPartsAndSteppedInParts) {
  Open();
  prompt_ = MakePrompt(spec_.geometry, kLayerTokens, Seed("Layers.ArePutInParts"));
  std::vector<std::unique_ptr<PutStream>> parts;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    PutSpec spec{"layers", "", prompt_.tokens, "parts"};
    spec.heads = {rank, 1};
    auto put = store_->BeginPut(spec);
    ASSERT_OK(put);
    parts.push_back(*std::move(put));
  }
  const auto part_of = [](std::span<const std::byte> all, size_t token, uint32_t rank) {
    std::vector<std::byte> out;
    for (size_t at = rank * token / 2; at < all.size(); at += token) {
      out.insert(out.end(), all.begin() + ptrdiff_t(at), all.begin() + ptrdiff_t(at + token / 2));
    }
    return out;
  };
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (uint32_t l = 0; l < 5; ++l) {
      if (l == kUnstoredLayer) continue;
      const LayerShape shape = spec_.geometry.layer(l);
      const auto k = part_of(prompt_.k[l], shape.n_kv_heads * shape.row().key_bytes(), rank);
      const auto v = part_of(prompt_.v[l], shape.n_kv_heads * shape.row().value_bytes(), rank);
      ASSERT_OK(parts[rank]->Write(l, 0, kLayerTokens, k, v));
      const auto q = part_of(std::as_bytes(prompt_.Q(l, 0, kLayerTokens)),
                             shape.query_floats() * sizeof(float), rank);
      std::vector<float> floats(q.size() / sizeof(float));
      std::memcpy(floats.data(), q.data(), q.size());
      ASSERT_OK(parts[rank]->WriteQueries(l, 0, kLayerTokens, floats));
    }
  }
  EXPECT_CODE(parts[0]->Commit(), Code::kFailedPrecondition);  // the other part is missing
  const auto joined = parts[1]->Commit();
  ASSERT_OK(joined);
  ASSERT_OK(store_->WaitReady(joined->prefix, nullptr));
  const std::string whole = Put(prompt_, true, 100, "whole");
  ASSERT_OK(store_->WaitReady(whole, nullptr));
  StepPolicy policy;
  policy.k.reset(), policy.budget = 0.15;
  const auto a = AttachTo("layers", policy);
  const auto other = store_->Attach({"layers", "whole", prompt_.tokens, "", 0, policy});
  ASSERT_OK(other);
  for (const uint32_t l : {0, 1, 3, 4}) {
    const LayerShape shape = spec_.geometry.layer(l);
    const auto q = prompt_.Q(l, kLayerTokens - 1, 1);
    const Output got = Step(*a, l, q), want = Step(**other, l, q);
    EXPECT_EQ(got.y, want.y) << l;
    EXPECT_EQ(got.lse, want.lse);
    EXPECT_EQ(got.info.k_per_head, want.info.k_per_head);
    // Steps of some heads count in the layer's own.
    const size_t group = shape.group_size();
    for (uint32_t h = 0; h < shape.n_kv_heads; ++h) {
      std::vector<float> y(group * shape.value_dim), lse(group);
      ASSERT_OK(a->Step(l, {h, 1}, q.subspan(h * group * shape.key_dim, group * shape.key_dim), y,
                        lse, nullptr));
      EXPECT_TRUE(std::ranges::equal(y, std::span(got.y).subspan(h * y.size(), y.size())));
      EXPECT_TRUE(std::ranges::equal(lse, std::span(got.lse).subspan(h * group, group)));
    }
  }
}

TEST_F(Layers, RefuseWhatIsNotTheirs) {
  Open();
  prompt_ = MakePrompt(spec_.geometry, 200, Seed("Layers.RefuseWhatIsNotTheirs"));
  auto put = store_->BeginPut({"layers", "", prompt_.tokens, ""});
  ASSERT_OK(put);
  const auto k = prompt_.K(1, 0, 200), v = prompt_.V(1, 0, 200);
  EXPECT_CODE((*put)->Write(0, 0, 200, k, v), Code::kInvalidArgument);  // another layer's size
  EXPECT_CODE((*put)->Write(kUnstoredLayer, 0, 200, {}, {}), Code::kInvalidArgument);
  EXPECT_CODE((*put)->WriteQueries(kUnstoredLayer, 0, 200, {}), Code::kInvalidArgument);
  EXPECT_CODE((*put)->WriteQueries(0, 0, 200, prompt_.Q(1, 0, 200)), Code::kInvalidArgument);
  for (const uint32_t l : {0, 1, 3}) {
    ASSERT_OK((*put)->Write(l, 0, 200, prompt_.K(l, 0, 200), prompt_.V(l, 0, 200)));
  }
  const auto early = (*put)->Commit();
  EXPECT_CODE(early, Code::kFailedPrecondition);
  EXPECT_NE(early.error().message.find("layer 4 lacks token 0"), std::string::npos);
  ASSERT_OK((*put)->Write(4, 0, 200, prompt_.K(4, 0, 200), prompt_.V(4, 0, 200)));
  ASSERT_OK((*put)->Commit());
  StepPolicy policy;
  policy.k = 8;
  const auto session = AttachTo("layers", policy);
  ASSERT_TRUE(session);
  std::vector<float> y(12 * 16), lse(12);
  const auto q = prompt_.Q(1, 0, 1);
  EXPECT_OK(session->Step(1, q, y, lse, nullptr));
  EXPECT_CODE(session->Step(0, q, y, lse, nullptr), Code::kInvalidArgument);
  EXPECT_CODE(session->Step(1, {4, 0}, q, y, lse, nullptr), Code::kInvalidArgument);
  for (const uint32_t l : {kUnstoredLayer, 5u}) {
    EXPECT_CODE(session->Step(l, {}, {}, {}, nullptr), Code::kInvalidArgument);
    EXPECT_CODE(session->AttendExact(l, 0, {}, {}, {}), Code::kInvalidArgument);
    EXPECT_CODE(session->ReadRange(l, 0, {0, 0}, {}), Code::kInvalidArgument);
    EXPECT_CODE(session->ReadLayer({.layer = l, .tokens = {0, 0}}, {}, {}), Code::kInvalidArgument);
    EXPECT_CODE(session->Select(l, 0, {}, 3), Code::kInvalidArgument);
  }
  policy.fixed = {{kUnstoredLayer, 0, EstimatorKind::kNone}};
  EXPECT_CODE(session->SetPolicy(policy), Code::kInvalidArgument);
  policy.fixed = {{1, 3, EstimatorKind::kNone}};
  EXPECT_OK(session->SetPolicy(policy));
  PutSpec quarter{"layers", "", {1, 2, 3}, ""};
  spec_.name = "odd";
  spec_.geometry.layers[3].n_kv_heads = 1;
  ASSERT_OK(store_->RegisterModel(spec_));
  quarter.model = "odd";
  quarter.heads = {0, 1};
  const auto no_whole = store_->BeginPut(quarter);
  EXPECT_CODE(no_whole, Code::kInvalidArgument);
  EXPECT_NE(no_whole.error().message.find("no whole heads of the 1 of layer 3"), std::string::npos);
}

TEST_F(Layers, HaveNoFeatureMaps) {
  Random random(3);
  const auto path = dir_.path() / "phi.safetensors";
  ASSERT_OK(WriteRandomMaps(path, SmallGeometry(5, 4, 2, 16), 1024, 16, 8, random));
  Open();
  spec_.feature_maps.push_back(path);
  const Status refused = store_->RegisterModel(spec_);
  EXPECT_CODE(refused, Code::kInvalidArgument);
  EXPECT_NE(refused.error().message.find("same heads and dimensions"), std::string::npos);
}

TEST_F(Layers, NamingTheModelsNumbersIsTheSameModel) {
  spec_.geometry = SmallGeometry(2, 4, 2, 16);
  Open();
  prompt_ = MakePrompt(spec_.geometry, 100, 1);
  ASSERT_NE(Put(prompt_), "");
  spec_.geometry.layers[1].n_kv_heads = 2;
  spec_.geometry.layers[1].key_dim = 16;
  ASSERT_OK(store_->RegisterModel(spec_));  // another model could not take the name
  EXPECT_EQ(store_->Match({.model = "layers", .tokens = prompt_.tokens})->n_tokens, 100u);
}

}  // namespace
}  // namespace prefixd::testing
