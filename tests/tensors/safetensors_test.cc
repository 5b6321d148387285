#include "tensors/safetensors.h"

#include <cstring>
#include <map>
#include <random>

#include "attention/rows/rows.h"
#include "tests/support/files.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::ReadFile;
using testing::TempDir;
using testing::WriteFile;

std::span<const std::byte> Bytes(const std::vector<float>& values) {
  return std::as_bytes(std::span(values));
}

// Writes a file with the given header text and data, and the length in front.
std::string FileOf(std::string_view header, std::string_view data) {
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  return file.append(header).append(data);
}

// Returns the message of opening `bytes`, or "" if it opens.
std::string OpenError(const TempDir& dir, std::string_view bytes) {
  WriteFile(dir / "x.safetensors", bytes);
  const auto file = SafetensorsFile::Open(dir / "x.safetensors");
  if (file.ok()) return "";
  EXPECT_EQ(file.error().code, Code::kCorrupt);
  EXPECT_EQ(file.error().message.find('\n'), std::string::npos) << file.error().message;
  EXPECT_NE(file.error().message.find("x.safetensors"), std::string::npos);
  return file.error().message;
}

void ExpectRefused(const TempDir& dir, std::string_view header, std::string_view data,
                   std::string_view reason) {
  const std::string message = OpenError(dir, FileOf(header, data));
  EXPECT_NE(message.find(reason), std::string::npos)
      << "header " << header << "\n  says: " << message << "\n  not:  " << reason;
}

TEST(Safetensors, WhatIsWrittenIsRead) {
  TempDir dir;
  const uint64_t seed = testing::Seed("WhatIsWrittenIsRead");
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    std::map<std::string, std::pair<std::vector<uint64_t>, std::vector<float>>> truth;
    std::map<std::string, DType> dtypes;
    std::map<std::string, std::vector<std::byte>> stored;
    std::vector<TensorToWrite> tensors;
    const size_t count = random() % 6;
    for (size_t i = 0; i < count; ++i) {
      const std::string name = "t\"\\\xc3\xa9" + std::to_string(random() % 1000);
      if (truth.count(name) > 0) continue;
      std::vector<uint64_t> shape(random() % 4);
      uint64_t elements = 1;
      for (uint64_t& dim : shape) elements *= dim = random() % 5;  // sometimes empty
      const DType dtype = static_cast<DType>(1 + random() % 3);
      std::vector<float> values(elements);
      for (float& v : values) v = static_cast<float>(int(random() % 256) - 128) / 16;  // exact
      stored[name].resize(elements * DTypeBytes(dtype));
      FromFloat(dtype, values, stored[name].data());
      dtypes[name] = dtype;
      truth[name] = {shape, values};
    }
    for (const auto& [name, entry] : truth) {
      tensors.push_back({name, TensorTypeOf(dtypes[name]), entry.first, stored[name]});
    }
    const std::map<std::string, std::string> metadata = {{"a", "\"quoted\"\n"}, {"b", ""}};
    ASSERT_TRUE(WriteSafetensors(dir / "a.safetensors", tensors, metadata).ok());
    const auto file = SafetensorsFile::Open(dir / "a.safetensors");
    ASSERT_TRUE(file.ok()) << file.error().message << " seed " << seed;
    EXPECT_EQ(file->metadata(), metadata);
    ASSERT_EQ(file->tensors().size(), truth.size());
    for (const auto& [name, entry] : truth) {
      const TensorInfo* info = file->Find(name);
      ASSERT_NE(info, nullptr) << name;
      EXPECT_EQ(info->shape, entry.first);
      const size_t offset = size_t(file->Bytes(*info).data() - file->file_bytes().data());
      EXPECT_EQ(offset % DTypeBytes(dtypes[name]), 0u) << "aligned to its element";
      const auto values = file->ReadFloats(name, entry.first);
      ASSERT_TRUE(values.ok()) << values.error().message;
      EXPECT_EQ(*values, entry.second) << "seed " << seed;
    }
  }
}

TEST(Safetensors, ReadsTheFormatAsDocumented) {
  TempDir dir;
  const std::string header =
      R"({"__metadata__":{"k":"v"},"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},)"
      R"("a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
      R"("i":{"dtype":"I8","shape":[],"data_offsets":[12,13]}}   )";
  std::string data("\x00\x00\x80\x3f\x00\x00\x00\xc0\x80\x3f\x40\xc0\x07", 13);
  WriteFile(dir / "x.safetensors", FileOf(header, data));
  const auto file = SafetensorsFile::Open(dir / "x.safetensors");
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(file->metadata().at("k"), "v");
  EXPECT_EQ(*file->ReadFloats("a", std::vector<uint64_t>{1, 2}), (std::vector<float>{1, -2}));
  EXPECT_EQ(*file->ReadFloats("b", std::vector<uint64_t>{2}), (std::vector<float>{1, -3}));
  ASSERT_NE(file->Find("i"), nullptr);
  EXPECT_EQ(file->Find("i")->type, TensorType::kI8);
  EXPECT_EQ(file->Find("j"), nullptr);

  const auto integer = file->ReadFloats("i", {});
  ASSERT_FALSE(integer.ok());
  EXPECT_NE(integer.error().message.find("'i' is I8"), std::string::npos);
  const auto missing = file->ReadFloats("j", {});
  ASSERT_FALSE(missing.ok());
  EXPECT_NE(missing.error().message.find("has no tensor 'j'"), std::string::npos);
  const auto shape = file->ReadFloats("a", std::vector<uint64_t>{2, 1});
  ASSERT_FALSE(shape.ok());
  EXPECT_NE(shape.error().message.find("has shape [1, 2] but [2, 1] is expected"),
            std::string::npos);
}

TEST(Safetensors, RefusesMalformedHeaders) {
  TempDir dir;
  const auto tensor = [](std::string_view body) { return "{\"a\":" + std::string(body) + "}"; };
  ExpectRefused(dir, "", "", "does not begin with '{'");
  ExpectRefused(dir, "[]", "", "does not begin with '{'");
  ExpectRefused(dir, " {}", "", "does not begin with '{'");
  ExpectRefused(dir, "{\"a\":", "", "not a JSON object");
  ExpectRefused(dir, "{\"a\":\"\xff\"}", "", "not a JSON object");
  ExpectRefused(dir, "{} {}", "", "not a JSON object");
  ExpectRefused(dir, "{\"a\":[[[[[[1]]]]]]}", "", "nests too deeply");
  ExpectRefused(dir, "{\"__metadata__\":{\"a\":1}}", "", "'a' is not a string");
  ExpectRefused(dir, "{\"__metadata__\":[]}", "", "__metadata__ is not an object");
  ExpectRefused(dir, tensor("3"), "", "must have exactly");
  ExpectRefused(dir, tensor(R"({"dtype":"F32","shape":[1]})"), "", "must have exactly");
  ExpectRefused(dir, tensor(R"({"dtype":"F33","shape":[1],"data_offsets":[0,4]})"), "1234",
                "unknown dtype");
  ExpectRefused(dir, tensor(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), "1234",
                "whole numbers");
  ExpectRefused(dir, tensor(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})"), "1234",
                "whole numbers");
  ExpectRefused(dir, tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})"), "1234",
                "two whole numbers");
  ExpectRefused(dir, tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})"), "1234",
                "ends before it begins");
  ExpectRefused(dir, tensor(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"), "1234",
                "needs 8 bytes but has 4");
  ExpectRefused(dir, tensor(R"({"dtype":"F4","shape":[3],"data_offsets":[0,1]})"), "1",
                "impossible shape");
  // 2^62 * 4 elements of 4 bytes: wraps to 0 in 64 bits.
  ExpectRefused(dir,
                tensor(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]})"),
                "", "impossible shape");
  ExpectRefused(
      dir,
      tensor(
          R"({"dtype":"F32","shape":[1],"data_offsets":[18446744073709551612,18446744073709551616]})"),
      "1234", "two whole numbers");
  ExpectRefused(
      dir,
      tensor(
          R"({"dtype":"U8","shape":[3],"data_offsets":[18446744073709551612,18446744073709551615]})"),
      "1234", "truncated");
  const std::string a = R"("a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]})";
  ExpectRefused(dir, "{" + a + "," + a + "}", "12", "names 'a' twice");
  ExpectRefused(dir, "{" + a + R"(,"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", "123",
                "overlaps another tensor");
  ExpectRefused(dir, "{" + a + R"(,"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})", "12345",
                "leaves unused bytes");
  ExpectRefused(dir, "{" + a + "}", "123", "1 bytes behind the last tensor");
  ExpectRefused(dir, "{" + a + "}", "1", "truncated");
  // A name with a line break still makes a one-line message.
  ExpectRefused(dir, R"({"x\ny":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}})", "1", "'x?y'");
}

TEST(Safetensors, RefusesImpossibleHeaderLengths) {
  TempDir dir;
  EXPECT_NE(OpenError(dir, "").find("truncated"), std::string::npos);
  EXPECT_NE(OpenError(dir, "1234567").find("truncated"), std::string::npos);
  EXPECT_NE(OpenError(dir, std::string(8, '\xff')).find("limit 100 MB"), std::string::npos);
  EXPECT_NE(OpenError(dir, FileOf("{}", "").substr(0, 9)).find("truncated"), std::string::npos);
}

TEST(Safetensors, OpenSaysWhatKindOfFileItIsNot) {
  TempDir dir;
  const auto missing = SafetensorsFile::Open(dir / "nothing");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  const auto directory = SafetensorsFile::Open(dir.path());
  ASSERT_FALSE(directory.ok());
  EXPECT_EQ(directory.error().code, Code::kInvalidArgument);
}

TEST(Safetensors, WriterRefusesAndLeavesTheOldFileAlone) {
  TempDir dir;
  const std::vector<float> two = {1, 2};
  const auto write = [&](std::vector<TensorToWrite> tensors,
                         std::map<std::string, std::string> metadata = {}) {
    return WriteSafetensors(dir / "x.safetensors", tensors, metadata);
  };
  ASSERT_TRUE(write({{"a", TensorType::kF32, {2}, Bytes(two)}}).ok());
  const std::string before = ReadFile(dir / "x.safetensors");
  const auto expect_refused = [&](const Status& status) {
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, Code::kInvalidArgument) << status.error().message;
    EXPECT_EQ(ReadFile(dir / "x.safetensors"), before);
  };
  expect_refused(write({{"a", TensorType::kF32, {3}, Bytes(two)}}));
  expect_refused(write({{"", TensorType::kF32, {2}, Bytes(two)}}));
  expect_refused(write({{"__metadata__", TensorType::kF32, {2}, Bytes(two)}}));
  expect_refused(
      write({{"a", TensorType::kF32, {2}, Bytes(two)}, {"a", TensorType::kF32, {2}, Bytes(two)}}));
  expect_refused(write({{"\xff", TensorType::kF32, {2}, Bytes(two)}}));
  expect_refused(write({}, {{"k", "\xff"}}));
  expect_refused(
      write({{"a", TensorType::kF32, {uint64_t{1} << 62, 4}, std::span<const std::byte>()}}));
  // A file written in pieces appears only when it is complete, and has nothing else in it.
  {
    const TensorInfo a{"a", TensorType::kF32, {2}, 0, 0, 0};
    auto writer = SafetensorsWriter::Create(dir / "x.safetensors", {a}, {}, 0600);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->Write("a", 4, Bytes(two).subspan(4)).ok());
    const Status early = writer->Commit();
    ASSERT_FALSE(early.ok());
    EXPECT_EQ(early.error().code, Code::kFailedPrecondition);
    expect_refused(writer->Write("b", 0, Bytes(two)));
    expect_refused(writer->Write("a", 4, Bytes(two)));
    expect_refused(writer->Write("a", UINT64_MAX, Bytes(two)));
    expect_refused(writer->Write("a", 0, Bytes(two)));
  }
  {
    const TensorInfo a{"a", TensorType::kF32, {2}, 0, 0, 0},
        ids{"b", TensorType::kU8, {3}, 0, 0, 0};
    auto writer = SafetensorsWriter::Create(dir / "x.safetensors", {ids, a}, {{"k", "v"}}, 0600);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->Write("a", 4, Bytes(two).subspan(4)).ok());
    ASSERT_TRUE(writer->Write("b", 0, Bytes(two).first(3)).ok());
    ASSERT_TRUE(writer->Write("a", 0, Bytes(two).first(4)).ok());
    ASSERT_TRUE(writer->Commit().ok());
    auto file = SafetensorsFile::Open(dir / "x.safetensors");
    ASSERT_TRUE(file.ok());
    EXPECT_EQ(file->metadata().at("k"), "v");
    EXPECT_TRUE(std::ranges::equal(file->Bytes(*file->Find("a")), Bytes(two)));
    EXPECT_EQ(file->Find("b")->elements, 3u);
    EXPECT_EQ(std::filesystem::status(dir / "x.safetensors").permissions(),
              std::filesystem::perms(0600));
  }
  // Only the file itself remains.
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(dir.path())) {
    ++files;
  }
  EXPECT_EQ(files, 1u);
  const Status nowhere = WriteSafetensors(dir / "no/such/x", {}, {});
  ASSERT_FALSE(nowhere.ok());
  EXPECT_EQ(nowhere.error().code, Code::kIo);
}

}  // namespace
}  // namespace prefixd
