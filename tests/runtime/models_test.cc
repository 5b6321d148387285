// Tests which models there may be: bounds, who makes room, removal, pages.
#include <algorithm>

#include "base/every_page.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class ModelsTest : public RuntimeTest {
 protected:
  ModelSpec Named(const std::string& name) const {
    ModelSpec spec = spec_;
    spec.name = name;
    spec.identity = {{"weights", name}};
    return spec;
  }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    const auto models = EveryModel(*store_);
    for (const ModelSpec& spec : *models) names.push_back(spec.name);
    return names;
  }
};

TEST_F(ModelsTest, ThoseThatNothingIsStoredForMakeRoomTheLeastRecentlyUsedFirst) {
  options_.max_models = 3;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 60, 1);
  PutReady(prompt);  // "tiny" is used
  ASSERT_OK(store_->RegisterModel(Named("a")));
  ASSERT_OK(store_->RegisterModel(Named("b")));
  ASSERT_OK(store_->Match({.model = "a", .tokens = prompt.tokens}));
  ASSERT_OK(store_->RegisterModel(Named("c")));
  EXPECT_EQ(Names(), (std::vector<std::string>{"a", "c", "tiny"}));
  for (int i = 0; i < 20; ++i) ASSERT_OK(store_->RegisterModel(Named("n" + std::to_string(i))));
  EXPECT_EQ(Names().size(), 3u);
  EXPECT_EQ(std::ranges::count(Names(), "tiny"), 1);
  EXPECT_EQ(store_->Stats()->models_dropped, 21u);
  Open();  // the catalog has no more of them either
  EXPECT_EQ(Names().size(), 3u);
  EXPECT_EQ(store_->Match({.model = "tiny", .tokens = prompt.tokens})->n_tokens, 60u);
}

TEST_F(ModelsTest, WhereAllAreUsedANewOneIsRefused) {
  options_.max_models = 1;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 60, 1);
  const std::string id = PutReady(prompt);
  const Status refused = store_->RegisterModel(Named("a"));
  EXPECT_CODE(refused, Code::kResourceExhausted);
  EXPECT_NE(refused.error().message.find("limits.max_models"), std::string::npos);
  EXPECT_EQ(Names(), std::vector<std::string>{"tiny"});
  ASSERT_OK(store_->RegisterModel(spec_));  // the known one may come again
  ASSERT_OK(store_->Remove(id));
  ASSERT_OK(store_->RegisterModel(Named("a")));
  EXPECT_EQ(Names(), std::vector<std::string>{"a"});
}

TEST_F(ModelsTest, AModelOfAPutUnderWayStays) {
  options_.max_models = 1;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 60, 1);
  auto put = store_->BeginPut({"tiny", "", prompt.tokens, ""});
  ASSERT_OK(put);
  EXPECT_CODE(store_->RegisterModel(Named("a")), Code::kResourceExhausted);
  EXPECT_CODE(store_->RemoveModel("tiny"), Code::kFailedPrecondition);
  put->reset();
  ASSERT_OK(store_->RemoveModel("tiny"));
  EXPECT_CODE(store_->BeginPut({"tiny", "", prompt.tokens, ""}), Code::kNotFound);
}

TEST_F(ModelsTest, FeatureMapsCountAndComingAgainTakesNothing) {
  AddMaps(512, 7);
  Open();
  const uint64_t bytes = store_->Stats()->models_bytes;
  const uint64_t summaries = store_->memory()->used(MemoryKind::kSummaries);
  EXPECT_GT(bytes, 4 * 16 * 16 * 4u);
  EXPECT_GE(summaries, bytes);
  for (int i = 0; i < 10; ++i) ASSERT_OK(store_->RegisterModel(spec_));
  EXPECT_EQ(store_->Stats()->models_bytes, bytes);
  EXPECT_EQ(store_->memory()->used(MemoryKind::kSummaries), summaries);
  Open();
  EXPECT_EQ(store_->Stats()->models_bytes, bytes);
  ASSERT_OK(store_->RemoveModel("tiny"));
  EXPECT_EQ(store_->Stats()->models_bytes, 0u);
  EXPECT_EQ(store_->memory()->used(MemoryKind::kSummaries), summaries - bytes);
}

TEST_F(ModelsTest, TheirBytesAreBounded) {
  options_.max_models_bytes = 1 << 20;
  Open();
  ModelSpec large = Named("large");
  large.identity.emplace_back("note", std::string(60 << 10, 'x'));
  for (int i = 0; i < 40; ++i) {
    large.name = "large-" + std::to_string(i);
    ASSERT_OK(store_->RegisterModel(large));
    ASSERT_LE(store_->Stats()->models_bytes, 1u << 20);
  }
  EXPECT_GT(store_->Stats()->models_dropped, 20u);
  AddMaps(512, 7, 4096);  // more than a MiB
  const Status refused = store_->RegisterModel(spec_);
  EXPECT_CODE(refused, Code::kResourceExhausted);
  EXPECT_NE(refused.error().message.find("limits.models_mib"), std::string::npos);
  EXPECT_TRUE(store_->Model("large-39").ok());  // nobody made room for what cannot be
}

TEST_F(ModelsTest, RemovalSaysHowManySegmentsUseIt) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 60, 1);
  const std::string id = PutReady(prompt);
  const Status used = store_->RemoveModel("tiny");
  EXPECT_CODE(used, Code::kFailedPrecondition);
  EXPECT_NE(used.error().message.find("used by 1 stored"), std::string::npos)
      << used.error().message;
  EXPECT_CODE(store_->RemoveModel("nobody"), Code::kNotFound);
  ASSERT_OK(store_->Remove(id));
  ASSERT_OK(store_->RemoveModel("tiny"));
  EXPECT_CODE(store_->Model("tiny"), Code::kNotFound);
  ModelSpec other = spec_;  // the name is free for another one
  other.geometry = SmallGeometry(3, 4, 2, 16);
  ASSERT_OK(store_->RegisterModel(other));
  EXPECT_EQ(store_->Model("tiny")->geometry.n_layers, 3u);
}

TEST_F(ModelsTest, ListsComeInPagesThatOutliveRemovals) {
  Open();
  for (int i = 0; i < 9; ++i) ASSERT_OK(store_->RegisterModel(Named("m" + std::to_string(i))));
  const auto first = store_->ListModels({.limit = 4});
  ASSERT_OK(first);
  ASSERT_EQ(first->models.size(), 4u);
  EXPECT_EQ(first->models[3].name, "m3");
  ASSERT_OK(store_->RemoveModel("m3"));  // the one that the next page begins behind
  ASSERT_OK(store_->RemoveModel("m5"));
  const auto second = store_->ListModels({.after = first->next, .limit = 4});
  ASSERT_OK(second);
  ASSERT_EQ(second->models.size(), 4u);
  EXPECT_EQ(second->models[0].name, "m4");
  EXPECT_EQ(second->models[1].name, "m6");
  const auto last = store_->ListModels({.after = second->next, .limit = 4});
  ASSERT_OK(last);
  EXPECT_EQ(last->models.size(), 1u);
  EXPECT_EQ(last->next, "");
}

// Large models make small pages, and each at least one model.
TEST_F(ModelsTest, PagesAreBoundedInBytes) {
  Open();
  ModelSpec large = Named("large");
  large.identity.emplace_back("note", std::string(60 << 10, 'x'));
  for (int i = 0; i < 150; ++i) {
    large.name = "large-" + std::to_string(i);
    ASSERT_OK(store_->RegisterModel(large));
  }
  const auto page = store_->ListModels({});
  ASSERT_OK(page);
  EXPECT_LT(page->models.size(), 100u);
  EXPECT_NE(page->next, "");
  EXPECT_EQ(EveryModel(*store_)->size(), 151u);
}

TEST_F(ModelsTest, PrefixesComeInPagesByTenantAndId) {
  Open();
  std::vector<std::pair<std::string, std::string>> stored;
  for (int i = 0; i < 14; ++i) {
    const std::string tenant = i % 2 == 0 ? "alice" : "bob";
    stored.emplace_back(tenant,
                        Put(MakePrompt(spec_.geometry, 40, 100 + uint64_t(i)), false, 100, tenant));
  }
  std::ranges::sort(stored);
  // A removal between any two pages, of a prefix seen already, neither skips nor repeats another.
  std::vector<std::pair<std::string, std::string>> seen;
  ListSpec spec{.limit = 3};
  do {
    const auto page = store_->ListPrefixes(spec);
    ASSERT_OK(page);
    ASSERT_LE(page->prefixes.size(), 3u);
    for (const PrefixSummary& p : page->prefixes) seen.emplace_back(p.tenant, p.id);
    spec.after = page->next;
    ASSERT_OK(store_->Remove(seen.back().second));
  } while (!spec.after.empty());
  EXPECT_EQ(seen, stored);

  const auto his = EveryPrefix(*store_, {.limit = 2, .tenant = "bob"});
  ASSERT_OK(his);
  for (const PrefixSummary& p : *his) EXPECT_EQ(p.tenant, "bob");
  EXPECT_TRUE(EveryPrefix(*store_, {.tenant = "nobody"})->empty());
  const std::string place = stored[0].second + ":alice";
  for (const ListSpec& wrong : {ListSpec{.after = "x"}, ListSpec{.after = stored[0].second},
                                ListSpec{.after = place, .tenant = "bob"}}) {
    EXPECT_CODE(store_->ListPrefixes(wrong), Code::kInvalidArgument);
  }
  ASSERT_OK(store_->ListPrefixes({.after = place, .tenant = "alice"}));
}

}  // namespace
}  // namespace prefixd::testing
