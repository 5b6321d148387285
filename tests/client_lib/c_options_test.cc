// Tests every option of an embedded store through options_json of the C interface.
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "base/runtime_options.h"
#include "prefixd/prefixd.h"
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

}  // namespace
}  // namespace prefixd::testing
