// Takes every option of the table through every surface: file, command line, printed form, JSON of
// embedded stores, C++. The table covers new options, too.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "base/tables/runtime_options.h"
#include "daemon/settings/command_line.h"
#include "daemon/settings/config.h"
#include "daemon/settings/reference.h"
#include "prefixd/client.h"
#include "protocol/json_text.h"
#include "runtime/store/local_store.h"
#include "tests/support/expect_ok.h"
#include "tests/support/option_values.h"
#include "tests/support/test.h"

namespace prefixd::daemon {
namespace {

using ::prefixd::testing::ForEachValueOutOfBounds;
using ::prefixd::testing::HasBounds;
using ::prefixd::testing::OtherValue;
using wire::Json;

constexpr OptionForm kWritten = OptionForm::kWritten, kMember = OptionForm::kMember;

std::vector<OptionValue> Values(Config config) {
  std::vector<OptionValue> values;
  for (const Option& option : OptionsOf(config)) values.push_back(GetOption(option, kMember));
  return values;
}
std::vector<OptionValue> Values(const RuntimeOptions& options) {
  Config config;
  config.store = options;
  return Values(config);
}

// Reads the command line like main.
Result<Config> FromCommandLine(const Option& option, const std::string& text) {
  CLI::App app;
  CommandLine line;
  DeclareOptions(&app, &line);
  app.parse(std::vector<std::string>{text, "--" + option.flag});  // the last argument comes first
  Config config;
  PREFIXD_TRY(ApplyFlags(line.flags, &config));
  return config;
}

Result<Config> FromFile(const std::string& text) {
  const std::filesystem::path file =
      ::testing::TempDir() + "prefixd-options-" + std::to_string(::getpid()) + ".toml";
  std::ofstream(file) << text;
  Config config;
  Status loaded = LoadConfig(file, &config);
  std::filesystem::remove(file);
  if (!loaded.ok()) return loaded.error();
  return config;
}

// Returns a file with only one option's line of the printed form, in its section.
std::string FileWithOnly(const Option& option, const std::string& printed) {
  const std::string section(option.section());
  const size_t from = section.empty() ? 0 : printed.find("\n[" + section + "]\n");
  const size_t begin = printed.find("\n" + std::string(option.last()) + " = ", from) + 1;
  const std::string line = printed.substr(begin, printed.find('\n', begin) - begin);
  return section.empty() ? line : "[" + section + "]\n" + line;
}

// One option has another value; all others have their defaults.
class OneOption : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    options_ = OptionsOf(config_);
    ASSERT_OK(SetOption(option(), OtherValue(option(), kWritten), kWritten, option().key));
    values_ = Values(config_);
  }
  const Option& option() const { return options_.at(GetParam()); }
  bool embedded() const { return !option().name.empty(); }
  std::string JsonWithOnlyIt() const {
    const std::string name(option().name);
    return Json{{name, wire::ToJson(config_.store)[name]}}.dump();
  }
  std::string Text() const { return OptionText(GetOption(option(), kWritten)); }

  Config config_;
  std::vector<Option> options_;
  std::vector<OptionValue> values_;
};

// The error names the option as the caller wrote it, and its bounds.
void ExpectRefused(const auto& result, const Option& option, std::string_view called,
                   OptionForm form) {
  ASSERT_FALSE(result.ok()) << option.key;
  const std::string& why = result.error().message;
  EXPECT_EQ(result.error().code, Code::kInvalidArgument) << why;
  EXPECT_NE(why.find(called), std::string::npos) << why;
  if (!option.choices.empty() || option.bounds.max > 0) {
    EXPECT_NE(why.find(OptionBoundsText(option, form)), std::string::npos) << why;
  }
}

TEST_P(OneOption, IsAloneInItsMember) {
  const std::vector<OptionValue> defaults = Values(Config());
  for (size_t i = 0; i < values_.size(); ++i) {
    EXPECT_EQ(values_[i] == defaults[i], i != GetParam()) << options_[i].key;
  }
}

TEST_P(OneOption, ComesFromAFile) {
  const auto read = FromFile(FileWithOnly(option(), PrintConfig(config_)));
  ASSERT_OK(read);
  EXPECT_EQ(Values(*read), values_) << option().key;
}

TEST_P(OneOption, SurvivesPrinting) {
  const std::string printed = PrintConfig(config_);
  const auto read = FromFile(printed);
  ASSERT_OK(read);
  EXPECT_EQ(Values(*read), values_) << option().key;
  EXPECT_EQ(PrintConfig(*read), printed);
}

TEST_P(OneOption, ComesFromTheCommandLine) {
  const auto read = FromCommandLine(option(), Text());
  ASSERT_OK(read);
  EXPECT_EQ(Values(*read), values_) << option().key;
}

TEST_P(OneOption, ComesFromJson) {
  if (!embedded()) return;
  const auto read = wire::FromText<RuntimeOptions>(JsonWithOnlyIt(), "options");
  ASSERT_OK(read);
  RuntimeOptions expected = config_.store;
  // Embedded stores have other defaults of these than the daemon.
  if (option().name != "dir") expected.dir = "";
  if (option().name != "warm_up") expected.warm_up = false;
  EXPECT_EQ(Values(*read), Values(expected)) << option().key;
  const auto all = wire::FromText<RuntimeOptions>(wire::ToJson(config_.store).dump(), "options");
  ASSERT_OK(all);
  EXPECT_EQ(Values(*all), Values(config_.store)) << option().key;
}

TEST_P(OneOption, OutOfBoundsIsRefusedEverywhere) {
  ForEachValueOutOfBounds(option(), [&] {
    ExpectRefused(FromFile(FileWithOnly(option(), PrintConfig(config_))), option(), option().key,
                  kWritten);
    ExpectRefused(FromCommandLine(option(), Text()), option(), "--" + option().flag, kWritten);
    if (!embedded()) return;
    const std::string name(option().name);
    ExpectRefused(wire::FromText<RuntimeOptions>(JsonWithOnlyIt(), "options"), option(),
                  "options." + name, kMember);
    ExpectRefused(LocalStore::Open(config_.store), option(), name, kMember);
  });
}

TEST_P(OneOption, TheWrongTypeIsRefusedEverywhere) {
  const std::string section(option().section()), last(option().last());
  const std::string head = section.empty() ? "" : "[" + section + "]\n";
  ExpectRefused(FromFile(head + last + " = { a = { b = 1 } }"), option(), option().key, kWritten);
  if (!std::holds_alternative<std::string>(GetOption(option(), kWritten))) {
    ExpectRefused(FromCommandLine(option(), "some words"), option(), "--" + option().flag,
                  kWritten);
  }
  if (!embedded()) return;
  const std::string name(option().name);
  const std::string wrong = Json{{name, {{"a", {{"b", 1}}}}}}.dump();
  ExpectRefused(wire::FromText<RuntimeOptions>(wrong, "options"), option(), "options." + name,
                kMember);
}

size_t CountOfOptions() {
  Config config;
  return OptionsOf(config).size();
}

std::string NameOf(const ::testing::TestParamInfo<size_t>& param) {
  Config config;
  std::string name(OptionsOf(config).at(param.param).key);
  std::ranges::replace(name, '.', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, OneOption, ::testing::Range(size_t{0}, CountOfOptions()), NameOf);

TEST(Options, HaveNamesOfTheirOwnAndDefaultsWithinTheirBounds) {
  Config config;
  std::set<std::string_view> names, keys, flags;
  size_t embedded = 0;
  const std::vector<Option> options = OptionsOf(config);
  for (const Option& option : options) {
    EXPECT_TRUE(keys.insert(option.key).second) << option.key;
    EXPECT_TRUE(flags.insert(option.flag).second) << option.flag;
    EXPECT_FALSE(option.help.empty()) << option.key;
    EXPECT_TRUE(CheckOption(option).ok()) << option.key;
    if (option.name.empty()) continue;
    EXPECT_TRUE(names.insert(option.name).second) << option.name;
    ++embedded;
  }
  EXPECT_EQ(OptionsOf(config.store).size(), embedded);
  EXPECT_GT(std::ranges::count_if(options, HasBounds), 40);
}

TEST(Options, TheReferencePageIsUpToDate) {
  std::ifstream in(std::string(PREFIXD_SOURCE_DIR) + "/docs/reference.md");
  const std::string page(std::istreambuf_iterator<char>(in), {});
  EXPECT_TRUE(page == ReferencePage()) << "docs/reference.md is stale: `make reference` writes it";
}

}  // namespace
}  // namespace prefixd::daemon
