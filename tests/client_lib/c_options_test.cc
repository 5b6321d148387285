// Tests every option of an embedded store through options_json of the C interface.
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/tables/runtime_options.h"
#include "prefixd/prefixd.h"
#include "tests/support/files.h"
#include "tests/support/option_values.h"
#include "tests/support/test.h"

namespace prefixd::testing {
namespace {

using Json = nlohmann::json;

// Returns the code and the message of opening a store with only this option set.
std::pair<pfx_code, std::string> Open(const std::string& dir, const Option& option) {
  Json json;
  std::visit([&](const auto& value) { json[option.name] = value; },
             GetOption(option, OptionForm::kMember));
  const std::string text = json.dump();
  pfx_open_options options = PFX_OPEN_OPTIONS_INIT;
  options.dir = dir.c_str();
  options.options_json = text.c_str();
  pfx_store* store = nullptr;
  const pfx_code code = pfx_open(&options, &store);
  pfx_store_close(store);
  return {code, code == PFX_OK ? "" : pfx_last_error()};
}

TEST(COptions, EveryOptionIsKnownAndBounded) {
  const std::string nowhere = ::testing::TempDir() + "no/such/parent";
  RuntimeOptions options;
  for (const Option& option : OptionsOf(options)) {
    if (option.name == "dir") continue;  // the struct has a member for it
    ForEachValueOutOfBounds(option, [&] {
      const auto [code, why] = Open(nowhere, option);
      EXPECT_EQ(code, PFX_INVALID_ARGUMENT) << option.name;
      EXPECT_EQ(why.find("options." + std::string(option.name) + " "), 0u) << why;
    });
    const OptionValue value = OtherValue(option, OptionForm::kMember);
    ASSERT_TRUE(SetOption(option, value, OptionForm::kMember, option.name).ok()) << option.name;
    // The option is valid: opening fails for the directory, or for memory that this machine lacks.
    const auto [code, why] = Open(nowhere, option);
    EXPECT_NE(code, PFX_OK) << option.name;
    EXPECT_EQ(why.find("options."), std::string::npos) << why;
  }
}

TEST(COptions, ReachTheStore) {
  const std::filesystem::path dir =
      std::filesystem::path(::testing::TempDir()) / ("c-options-" + std::to_string(::getpid()));
  const std::string name = dir.string();
  pfx_open_options options = PFX_OPEN_OPTIONS_INIT;
  options.dir = name.c_str();
  options.options_json = R"({"gathered_rows_bytes": 1048576, "selector_memory_bytes": 2097152,
                             "host_tier_bytes": 4194304, "threads": 1, "quota_bytes": 12345678})";
  pfx_store* store = nullptr;
  ASSERT_EQ(pfx_open(&options, &store), PFX_OK) << pfx_last_error();
  char* text = nullptr;
  ASSERT_EQ(pfx_stats(store, &text), PFX_OK) << pfx_last_error();
  const Json stats = Json::parse(text);
  pfx_free(text);
  pfx_store_close(store);
  EXPECT_EQ(stats["gathered_rows_capacity"], 1048576);
  EXPECT_EQ(stats["selector_memory_capacity"], 2097152);
  EXPECT_EQ(stats["host_tier_capacity"], 4194304);
  EXPECT_EQ(stats["quota_bytes"], 12345678);
  std::filesystem::remove_all(dir);
}

constexpr const char* kModel =
    R"({"name": "m", "identity": [["weights", "random"]], "geometry": {"n_layers": 2,
        "n_q_heads": 4, "n_kv_heads": 2, "key_dim": 16, "value_dim": 16, "dtype": "f32",
        "layers": [{"scale": 0.25}, {"scale": 0.25}]}})";

// Puts take their buffers from the store's memory, and whoever finds none learns when to come back.
TEST(COptions, ARefusalSaysWhenToRetry) {
  testing::TempDir dir;
  pfx_open_options open = PFX_OPEN_OPTIONS_INIT;
  const std::string where = dir.path() / "store";
  open.dir = where.c_str();
  open.options_json = R"({"memory_bytes": 134217728, "min_free_bytes": 0, "threads": 1})";
  pfx_store* store = nullptr;
  ASSERT_EQ(pfx_open(&open, &store), PFX_OK) << pfx_last_error();
  ASSERT_EQ(pfx_register_model(store, kModel), PFX_OK) << pfx_last_error();
  std::vector<uint32_t> tokens(60'000);
  std::vector<pfx_put*> puts;
  pfx_code code = PFX_OK;
  while (code == PFX_OK && puts.size() < 100) {
    tokens[0] = uint32_t(puts.size());
    pfx_put_options options = PFX_PUT_OPTIONS_INIT;
    options.model = "m";
    options.tokens = tokens.data();
    options.n_tokens = tokens.size();
    pfx_put* put = nullptr;
    code = pfx_begin_put(store, &options, &put);
    if (code == PFX_OK) puts.push_back(put);
  }
  EXPECT_EQ(code, PFX_RESOURCE_EXHAUSTED) << puts.size();
  EXPECT_GT(pfx_last_retry_after_ms(), 0u) << pfx_last_error();
  EXPECT_GE(puts.size(), 2u);
  EXPECT_EQ(pfx_remove(store, "nothing"), PFX_NOT_FOUND);
  EXPECT_EQ(pfx_last_retry_after_ms(), 0u);
  for (pfx_put* put : puts) pfx_put_free(put);
  pfx_store_close(store);
}

}  // namespace
}  // namespace prefixd::testing
