// Tests prefixes that leave a store as files and come back, through prefixctl and the real daemon.
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "attention/rows/rows.h"
#include "base/every_page.h"
#include "prefixctl/commands/prefix_file.h"
#include "protocol/json_text.h"
#include "tensors/safetensors.h"
#include "tests/prefixctl/prefixctl_fixture.h"
#include "tests/support/files.h"
#include "tests/support/layered_model.h"
#include "tests/support/seed.h"

namespace prefixd {
namespace {

using testing::DaemonDir;
using testing::Finished;
using testing::Prompt;
using testing::ReadFile;

constexpr uint32_t kTokens = 9000;  // more than one write of a layer

class PrefixFileTest : public testing::PrefixctlFixture {
 protected:
  PrefixFileTest()
      : PrefixctlFixture(testing::MakePrompt(kTokens, testing::Seed("PrefixFileTest")),
                         "a \xff label") {}

  Finished Run(std::vector<std::string> args, const std::string& tenant = "team-a") const {
    args.insert(args.begin(), "prefixes");
    args.insert(args.end(), {"--tenant", tenant});
    return PrefixctlFixture::Run(args);
  }
  std::string File(const char* name) const { return dir_.path() / name; }

  // Returns the tensors of an export of prompt_, which the tests change.
  std::vector<TensorToWrite> Tensors() const {
    std::vector<TensorToWrite> tensors = {
        {"tokens", TensorType::kU32, {kTokens}, std::as_bytes(std::span(prompt_.tokens))}};
    for (const uint32_t layer : {0u, 1u}) {
      const std::string at = "layers." + std::to_string(layer) + ".";
      tensors.push_back({at + "k", TensorType::kBf16, {kTokens, 2, 16}, prompt_.k[layer]});
      tensors.push_back({at + "v", TensorType::kBf16, {kTokens, 2, 16}, prompt_.v[layer]});
    }
    return tensors;
  }
  void ExpectRefused(const char* name, const std::string& why) {
    SCOPED_TRACE(name);
    const Finished put = Run({"put", File(name)}, "team-b");
    EXPECT_EQ(put.code, 1);
    EXPECT_NE(put.err.find(why), std::string::npos) << put.err;
    EXPECT_EQ(put.out, "");
  }
};

TEST_F(PrefixFileTest, WhatIsExportedComesBackTheSame) {
  const Finished exported = Run({"export", prefix_, File("a")});
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_NE(exported.out.find("9000 tokens of test-model"), std::string::npos) << exported.out;
  EXPECT_EQ(std::filesystem::status(File("a")).permissions(), std::filesystem::perms(0600));
  auto file = SafetensorsFile::Open(File("a"));
  ASSERT_TRUE(file.ok());
  ASSERT_EQ(file->tensors().size(), Tensors().size());
  for (const TensorToWrite& want : Tensors()) {
    const TensorInfo* have = file->Find(want.name);
    ASSERT_TRUE(have) << want.name;
    EXPECT_EQ(have->shape, want.shape);
    EXPECT_TRUE(std::ranges::equal(file->Bytes(*have), want.bytes)) << want.name;
  }

  const Finished put = Run({"put", File("a")}, "team-b");
  ASSERT_EQ(put.code, 0) << put.err;
  EXPECT_NE(put.out.find("9000 tokens, 9000 of them new"), std::string::npos) << put.out;
  EXPECT_NE(Run({"put", File("a")}, "team-b").out.find(" 0 of them new"), std::string::npos);
  const std::string id = put.out.substr(7, 32);
  EXPECT_EQ(Run({"export", id, File("other")}).code, 3);  // another tenant's
  ASSERT_EQ(Run({"export", id, File("b")}, "team-b").code, 0);
  EXPECT_EQ(ReadFile(File("a")), ReadFile(File("b")));

  // This store has never registered the model.
  DaemonDir other;
  ASSERT_NO_FATAL_FAILURE(StartIn(other.path()));
  const Finished moved = Run({"put", File("a"), "--quiet"});
  ASSERT_EQ(moved.code, 0) << moved.err;
  EXPECT_EQ(moved.err, "");
  ASSERT_EQ(Run({"export", moved.out.substr(7, 32), File("c")}).code, 0);
  EXPECT_EQ(ReadFile(File("a")), ReadFile(File("c")));
}

TEST_F(PrefixFileTest, LayersThatDifferComeBackTheSame) {
  ModelSpec model{"layers", testing::LayeredGeometry(), {{"weights", "l"}}, {}};
  ASSERT_TRUE(client_->RegisterModel(model).ok());
  const auto shown = PrefixctlFixture::Run({"models", "show", "layers"});
  EXPECT_NE(shown.out.find("5 layers (1: 12/4 heads, dim 16; 1: 4/2 heads, dim 16; "
                           "1: 4/2 heads, dim 32/24; 1: 6/6 heads, dim 24/20; 1: no rows), bf16"),
            std::string::npos)
      << shown.out;
  const auto prompt = testing::MakePrompt(model.geometry, 700, 3);
  PutSpec spec;
  spec.model = "layers";
  spec.tenant = "team-a";
  spec.tokens = prompt.tokens;
  auto put = client_->BeginPut(spec);
  ASSERT_TRUE(put.ok());
  for (const uint32_t l : {0, 1, 3, 4}) {
    ASSERT_TRUE((*put)->Write(l, 0, 700, prompt.K(l, 0, 700), prompt.V(l, 0, 700)).ok());
  }
  const auto done = (*put)->Commit();
  ASSERT_TRUE(done.ok());
  const Finished exported = Run({"export", done->prefix, File("layers")});
  ASSERT_EQ(exported.code, 0) << exported.err;
  const auto file = SafetensorsFile::Open(File("layers"));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->tensors().size(), 9u);  // the tokens, and two of each stored layer
  EXPECT_EQ(file->Find("layers.2.k"), nullptr);
  const TensorInfo* values = file->Find("layers.4.v");
  ASSERT_TRUE(values);
  EXPECT_EQ(values->shape, (std::vector<uint64_t>{700, 6, 20}));
  EXPECT_TRUE(std::ranges::equal(file->Bytes(*values), prompt.v[4]));
  const Finished again = Run({"put", File("layers")}, "team-b");
  ASSERT_EQ(again.code, 0) << again.err;
  ASSERT_EQ(Run({"export", again.out.substr(7, 32), File("again")}, "team-b").code, 0);
  EXPECT_EQ(ReadFile(File("layers")), ReadFile(File("again")));
}

TEST_F(PrefixFileTest, DerivedRowsStayDerived) {
  Prompt other = testing::MakePrompt(100, 5);
  PutSpec spec;
  spec.model = other.model.name;
  spec.tenant = "team-a";
  spec.tokens = other.tokens;
  spec.derived = true;
  auto put = client_->BeginPut(spec);
  ASSERT_TRUE(put.ok() && testing::WriteRows(**put, other).ok());
  const auto done = (*put)->Commit();
  ASSERT_TRUE(done.ok());
  ASSERT_EQ(Run({"export", done->prefix, File("derived")}).code, 0);
  const auto file = SafetensorsFile::Open(File("derived"));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->metadata().at("format"), "prefixd-prefix-v2");
  EXPECT_EQ(file->metadata().at("exact_tokens"), "0");
  const Finished moved = Run({"put", File("derived")}, "team-b");
  ASSERT_EQ(moved.code, 0) << moved.err;
  EXPECT_NE(moved.out.find("tokens from 0 on are derived"), std::string::npos) << moved.out;
  const std::string id = moved.out.substr(7, 32);
  EXPECT_NE(Run({"list"}, "team-b").out.find("100 (0 exact)"), std::string::npos);
  const Finished shown = Run({"show", id}, "team-b");
  EXPECT_NE(shown.out.find("from token 0 on, computed behind an approximate step"),
            std::string::npos)
      << shown.out;
  EXPECT_EQ(Run({"show", prefix_}).out.find("from token"), std::string::npos);
}

TEST_F(PrefixFileTest, TokenIdsAreReadByTheRun) {
  AttachSpec spec;
  spec.prefix = prefix_;
  spec.policy.mode = StepMode::kAnchors;
  auto session = client_->Attach(spec);
  ASSERT_TRUE(session.ok()) << session.error().message;
  std::vector<uint32_t> ids(100);
  ASSERT_TRUE((*session)->ReadTokens({4000, 4100}, ids).ok());
  EXPECT_TRUE(std::ranges::equal(ids, std::span(prompt_.tokens).subspan(4000, 100)));
  const auto refused = [&](TokenRange range, size_t room) {
    ids.assign(room, 0);
    const Status status = (*session)->ReadTokens(range, ids);
    return !status.ok() && status.error().code == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refused({0, 100}, 99));
  EXPECT_TRUE(refused({100, 0}, 0));
  EXPECT_TRUE(refused({kTokens - 1, kTokens + 1}, 2));
  ASSERT_TRUE((*session)->Detach().ok());
  ids.resize(1);
  EXPECT_FALSE((*session)->ReadTokens({0, 1}, ids).ok());
}

TEST_F(PrefixFileTest, WhatCannotBeRightIsRefusedAndStoresNothing) {
  const std::map<std::string, std::string> right = {{"format", "prefixd-prefix-v1"},
                                                    {"model", wire::ToText(prompt_.model)}};
  const auto write = [&](const char* name, const std::vector<TensorToWrite>& tensors,
                         const std::map<std::string, std::string>& metadata) {
    ASSERT_TRUE(WriteSafetensors(File(name), tensors, metadata).ok());
  };
  ExpectRefused("absent", "absent");
  std::ofstream(File("text")) << "not a tensor file at all";
  ExpectRefused("text", "text");
  write("no-format", Tensors(), {});
  ExpectRefused("no-format", "prefixctl prefixes export");
  auto tensors = Tensors();
  tensors.pop_back();
  write("no-v", tensors, right);
  ExpectRefused("no-v", "layers.1.v");
  tensors = Tensors();
  tensors.push_back({"more", TensorType::kU8, {0}, {}});
  write("more", tensors, right);
  ExpectRefused("more", "more tensors");
  tensors = Tensors();
  tensors[1].shape = {kTokens, 1, 32};
  write("shape", tensors, right);
  ExpectRefused("shape", "[9000, 2, 16]");
  tensors = Tensors();
  tensors[0].shape = {kTokens / 2, 2};
  write("tokens", tensors, right);
  ExpectRefused("tokens", "one dimension");
  auto metadata = right;
  metadata["model"] = "{\"name\": 7}";
  write("model", Tensors(), metadata);
  ExpectRefused("model", "model");
  Prompt other = prompt_;
  other.model.identity = {{"weights", "others"}};
  metadata["model"] = wire::ToText(other.model);
  write("identity", Tensors(), metadata);
  ExpectRefused("identity", "another geometry or identity");
  other = prompt_;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  FromFloat(DType::kBf16, std::span(&nan, 1), other.v[1].data() + other.v[1].size() - 2);
  tensors = Tensors();
  tensors.back().bytes = other.v[1];
  write("nan", tensors, right);
  ExpectRefused("nan", "layer 1");
  const std::string good = ReadFile(File("nan"));
  std::ofstream(File("cut"), std::ios::binary) << good.substr(0, good.size() - 1);
  ExpectRefused("cut", "cut");
  EXPECT_EQ(EveryPrefix(*client_)->size(), 1u);
  EXPECT_EQ(Run({"list"}, "team-b").out.find("test-model"), std::string::npos);

  EXPECT_EQ(Run({"export", std::string(32, '0'), File("x")}).code, 3);
  EXPECT_EQ(Run({"export", prefix_, File("no/such/x")}).code, 1);
  EXPECT_EQ(Run({"export", prefix_}).code, 2);
  EXPECT_FALSE(std::filesystem::exists(File("x")));
}

TEST_F(PrefixFileTest, AStoppedExportSaysSoAndWritesNothing) {
  const auto stop = [](uint64_t, uint64_t, std::string_view) { return false; };
  const auto stopped = ctl::ExportPrefix(*client_, prefix_, File("stopped"), stop);
  ASSERT_FALSE(stopped.ok());
  EXPECT_EQ(stopped.error().code, Code::kCancelled);
  EXPECT_EQ(stopped.error().message,
            "the export was stopped; " + File("stopped") + " was not written");
  EXPECT_FALSE(std::filesystem::exists(File("stopped")));
  EXPECT_EQ(Run({"export", prefix_, File("stopped")}).code, 0);
}

// The replacement of a byte that is not UTF-8 is longer than the byte, and labels have a limit.
TEST_F(PrefixFileTest, ALabelOfOtherBytesComesBack) {
  const Prompt other = testing::MakePrompt(100, testing::Seed("PrefixFileTest.Label"));
  const auto stored = testing::PutPrompt(*client_, other, std::string(4095, '\xff') + "\xc3");
  ASSERT_TRUE(stored.ok()) << stored.error().message;
  ASSERT_EQ(Run({"export", stored->prefix, File("label")}).code, 0);
  const Finished put = Run({"put", File("label")}, "team-b");
  EXPECT_EQ(put.code, 0) << put.err;
}

}  // namespace
}  // namespace prefixd
