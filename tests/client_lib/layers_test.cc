// Tests a model whose layers differ on every kind of client: it answers as an embedded store does.
#include "prefixd/restore.h"
#include "tests/client_lib/client_refusals.h"
#include "tests/support/layered_model.h"

namespace prefixd::testing {
namespace {

class ClientLayers : public ClientRefusals {
 protected:
  void SetUp() override {
    ClientRefusals::SetUp();
    model_.name = "layers";
    model_.geometry = LayeredGeometry();
    own_ = MakePrompt(model_.geometry, kTokens, Seed("ClientLayers"));
    for (Store* store : {client_.get(), reference_.get()}) {
      ASSERT_TRUE(store->RegisterModel(model_).ok());
      PutLayers(*store);
    }
    const auto known = client_->Model("layers");
    ASSERT_TRUE(known.ok());
    EXPECT_EQ(known->geometry, model_.geometry);
  }

  void PutLayers(Store& store) const {
    auto put = store.BeginPut({"layers", "", own_.tokens, "layers"});
    ASSERT_TRUE(put.ok()) << put.error().message;
    for (uint32_t l = 0; l < 5; ++l) {
      if (l == kUnstoredLayer) continue;
      const auto written =
          (*put)->Write(l, 0, kTokens, own_.K(l, 0, kTokens), own_.V(l, 0, kTokens));
      ASSERT_TRUE(written.ok()) << written.error().message;
      ASSERT_TRUE((*put)->WriteQueries(l, 0, kTokens, own_.Q(l, 0, kTokens)).ok());
    }
    EXPECT_EQ((*put)->progress().total, 4 * kTokens);
    EXPECT_EQ((*put)->progress().done, 4 * kTokens);
    const auto done = (*put)->Commit();
    ASSERT_TRUE(done.ok()) << done.error().message;
    const Status ready =
        store.WaitReady(done->prefix, [](uint64_t, uint64_t, std::string_view) { return true; });
    ASSERT_TRUE(ready.ok()) << ready.error().message;
  }

  std::shared_ptr<Session> AttachTo(Store& store, const StepPolicy& policy) const {
    AttachSpec spec;
    spec.model = "layers";
    spec.tokens = own_.tokens;
    spec.policy = policy;
    auto session = store.Attach(spec);
    EXPECT_TRUE(session.ok()) << session.error().message;
    return session.ok() ? *session : nullptr;
  }

  struct Answer {
    std::vector<float> y, lse;
    StepInfo info;
  };
  Answer Room(uint32_t layer, uint32_t n = 1) const {
    const LayerShape shape = model_.geometry.layer(layer);
    return {std::vector<float>(n * shape.n_q_heads * shape.value_dim),
            std::vector<float>(n * shape.n_q_heads),
            {}};
  }

  ModelSpec model_;
  SyntheticPrompt own_;
};

TEST_P(ClientLayers, StepAsAnEmbeddedStoreDoes) {
  std::vector<StepPolicy> policies(4);
  policies[0].mode = StepMode::kFull;
  policies[1].mode = StepMode::kAnchors;
  policies[2].estimator = EstimatorKind::kMoment;
  policies[2].k = 24, policies[2].report_missing = true;
  policies[3].budget = 0.4;
  for (const StepPolicy& policy : policies) {
    const auto mine = AttachTo(*client_, policy), theirs = AttachTo(*reference_, policy);
    ASSERT_TRUE(mine && theirs);
    EXPECT_EQ(mine->info().geometry, model_.geometry);
    std::vector<Answer> batched(5);
    std::vector<StepRequest> requests;
    for (uint32_t l = 0; l < 5; ++l) {
      if (l == kUnstoredLayer) continue;
      const auto q = own_.Q(l, kTokens - 1, 1);
      Answer got = Room(l), want = Room(l);
      ASSERT_TRUE(mine->Step(l, q, got.y, got.lse, &got.info).ok());
      ASSERT_TRUE(theirs->Step(l, q, want.y, want.lse, &want.info).ok());
      EXPECT_EQ(got.y, want.y) << l;
      EXPECT_EQ(got.lse, want.lse);
      EXPECT_EQ(got.info.k_per_head, want.info.k_per_head);
      EXPECT_EQ(got.info.missing.size(), want.info.missing.size());
      // The last of the layer's own heads, alone.
      const LayerShape shape = model_.geometry.layer(l);
      const size_t group = shape.group_size(), n = shape.n_kv_heads;
      std::vector<float> y(group * shape.value_dim), lse(group);
      ASSERT_TRUE(mine->Step(l, {shape.n_kv_heads - 1, 0},
                             q.subspan((n - 1) * group * shape.key_dim), y, lse, nullptr)
                      .ok());
      EXPECT_TRUE(std::ranges::equal(y, std::span(got.y).last(y.size())));
      batched[l] = Room(l);
      requests.push_back(
          {mine.get(), l, q, batched[l].y, batched[l].lse, &batched[l].info, {}, {}});
      Answer exact = Room(l, 3), exactly = Room(l, 3);
      const auto queries = own_.Q(l, 100, 3);
      ASSERT_TRUE(mine->AttendExact(l, 3, queries, exact.y, exact.lse).ok());
      ASSERT_TRUE(theirs->AttendExact(l, 3, queries, exactly.y, exactly.lse).ok());
      EXPECT_EQ(exact.y, exactly.y);
      EXPECT_EQ(exact.lse, exactly.lse);
    }
    client_->StepBatch(requests);  // of layers of every size, in one message
    for (const StepRequest& r : requests) {
      ASSERT_TRUE(r.status.ok()) << r.status.error().message;
      Answer want = Room(r.layer);
      ASSERT_TRUE(theirs->Step(r.layer, r.q, want.y, want.lse, nullptr).ok());
      EXPECT_EQ(batched[r.layer].y, want.y) << r.layer;
    }
    EXPECT_EQ(mine->report()->per_head.size(), 14u);
  }
}

TEST_P(ClientLayers, RestoreEveryLayerThatIsStored) {
  const auto session = AttachTo(*client_, {.mode = StepMode::kFull});
  ASSERT_TRUE(session);
  RestoreOptions options;
  options.buffer_bytes = 64 << 10;
  uint64_t last_done = 0, last_total = 0;
  options.progress = [&](uint64_t done, uint64_t total, std::string_view) {
    last_done = done, last_total = total;
    return true;
  };
  auto restore = Restore::Begin(session, options);
  ASSERT_TRUE(restore.ok());
  std::vector<uint32_t> tokens(5);
  while (true) {
    const auto next = (*restore)->Next();
    ASSERT_TRUE(next.ok()) << next.error().message;
    if (!*next) break;
    const RestoredRun& run = **next;
    tokens[run.layer] += run.tokens.size();
    const auto k = own_.K(run.layer, run.tokens.begin, run.tokens.size());
    const auto v = own_.V(run.layer, run.tokens.begin, run.tokens.size());
    EXPECT_TRUE(std::ranges::equal(run.k, k)) << run.layer;
    EXPECT_TRUE(std::ranges::equal(run.v, v)) << run.layer;
  }
  EXPECT_EQ(tokens, (std::vector<uint32_t>{kTokens, kTokens, 0, kTokens, kTokens}));
  EXPECT_EQ(last_total, kTokens * model_.geometry.token_bytes());
  EXPECT_EQ(last_done, last_total);
}

TEST_P(ClientLayers, AreRefusedAlike) {
  const auto mine = AttachTo(*client_, {.k = 8}), theirs = AttachTo(*reference_, {.k = 8});
  ASSERT_TRUE(mine && theirs);
  const auto step = [this](uint32_t layer, uint32_t sized_as, HeadRange heads = {}) {
    return [this, layer, sized_as, heads](Store&, Session& s) {
      Answer room = Room(sized_as);
      return s.Step(layer, heads, own_.Q(sized_as, 0, 1), room.y, room.lse, nullptr);
    };
  };
  const auto put = [this](uint32_t layer, uint32_t sized_as) {
    return [this, layer, sized_as](Store& store, Session&) -> Status {
      PREFIXD_ASSIGN(auto begun, store.BeginPut({"layers", "", {1, 2, 3}, ""}));
      return begun->Write(layer, 0, 3, own_.K(sized_as, 0, 3), own_.V(sized_as, 0, 3));
    };
  };
  const std::vector<Case> cases = {
      {"another layer's size", Code::kInvalidArgument, step(0, 1)},
      {"a layer without rows", Code::kInvalidArgument, step(kUnstoredLayer, 0)},
      {"no layer", Code::kInvalidArgument, step(5, 0)},
      {"another layer's heads", Code::kInvalidArgument, step(0, 0, {3, 1})},
      {"rows of another layer", Code::kInvalidArgument, put(3, 4)},
      {"rows of a layer without any", Code::kInvalidArgument, put(kUnstoredLayer, 0)},
      {"a range of a layer without rows", Code::kInvalidArgument,
       [](Store&, Session& s) {
         return s.ReadRange(kUnstoredLayer, 0, {0, 0}, {});
       }},
      {"a head that others have", Code::kInvalidArgument,
       [](Store&, Session& s) {
         return s.ReadRange(0, 5, {0, 0}, {});
       }},
      {"a model without rows", Code::kInvalidArgument,
       [this](Store& store, Session&) {
         ModelSpec none = model_;
         none.name = "none";
         for (LayerGeometry& layer : none.geometry.layers) layer.stored = false;
         return store.RegisterModel(none);
       }},
      {"too many heads", Code::kInvalidArgument,
       [this](Store& store, Session&) {
         ModelSpec many = model_;
         many.name = "many";
         many.geometry.layers[1].n_kv_heads = 1025;
         return store.RegisterModel(many);
       }},
      {"the name of another model", Code::kAlreadyExists,
       [this](Store& store, Session&) {
         ModelSpec other = model_;
         other.geometry.layers[4].value_dim = 21;
         return store.RegisterModel(other);
       }},
  };
  ExpectRefused(cases, *mine, *theirs);
}

INSTANTIATE_TEST_SUITE_P(Clients, ClientLayers, EveryKind(), KindName);

}  // namespace
}  // namespace prefixd::testing
