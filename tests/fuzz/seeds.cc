// Implements fuzz_seeds DIR: writes DIR/<target>/<n>, inputs that reach the accepting side of every
// target at once. Deterministic.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "attention/estimators/moments.h"
#include "attention/estimators/phi_cache.h"
#include "index/search/envelope.h"
#include "prefixd/attach.h"
#include "prefixd/explain.h"
#include "prefixd/lifetime.h"
#include "prefixd/match.h"
#include "prefixd/options.h"
#include "prefixd/put.h"
#include "prefixd/rewrite.h"
#include "prefixd/runtime_stats.h"
#include "prefixd/verify.h"
#include "protocol/codec.h"
#include "protocol/row_copies.h"
#include "protocol/step_frame.h"
#include "runtime/derived/query_samples.h"
#include "runtime/ingest/choice.h"
#include "runtime/summaries/clustering_codec.h"
#include "storage/segment/blob_format.h"
#include "storage/segment/records.h"
#include "storage/segment/segment_format.h"

namespace prefixd::fuzz {
namespace {

class Seeds {
 public:
  explicit Seeds(std::filesystem::path dir) : dir_(std::move(dir)) {}

  // `mode` is the first byte that the target reads. FuzzedDataProvider takes numbers from the end
  // of its input, so the byte stands there when the rest is read as numbers, which random bytes
  // are.
  void Add(const std::string& target, uint8_t mode, std::span<const std::byte> bytes) {
    std::filesystem::create_directories(dir_ / target);
    std::ofstream out(dir_ / target / std::to_string(count_[target]++), std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
    out.put(static_cast<char>(mode));
    ok_ = ok_ && out.good();
  }
  void Add(const std::string& target, uint8_t mode, std::string_view text) {
    Add(target, mode, std::as_bytes(std::span(text)));
  }
  void AddRandom(const std::string& target, uint8_t mode) {
    for (const size_t n : {0, 40, 300}) {
      std::vector<std::byte> bytes(n);
      for (std::byte& b : bytes) b = std::byte(rng_() & 0xff);
      Add(target, mode, bytes);
    }
  }
  bool ok() const { return ok_; }

 private:
  const std::filesystem::path dir_;
  std::map<std::string, int> count_;
  std::mt19937_64 rng_{1};
  bool ok_ = true;
};

KvGeometry Geometry() {
  KvGeometry g;
  g.n_layers = 2;
  g.n_q_heads = 4;
  g.n_kv_heads = 2;
  g.key_dim = g.value_dim = 64;
  g.layers.assign(2, {0.125f, 0, 0});
  return g;
}

void AddStorage(Seeds& seeds) {
  std::array<std::byte, storage::kPageBytes> page;
  storage::SegmentHeader header;
  header.segment[0] = 7;
  header.tokens = {0, 40};
  header.n_layers = 1;
  header.n_kv_heads = 2;
  header.key_dim = header.value_dim = 64;
  header.manifest_bytes = 213;
  header.Encode(page);
  seeds.Add("segment_header", 0, page);
  seeds.Add("segment_header", 1, std::span<const std::byte>(page).first(296));
  header.tokens = {100, 5000};
  header.parent[1] = 1;
  header.key_dim = 3000;  // rows of more than a page
  header.chunk_tokens = 1024;
  header.Encode(page);
  seeds.Add("segment_header", 1, std::span<const std::byte>(page).first(296));
  header.key_dim = 128;
  header.encoding = RowEncoding::kInt8;
  header.incompat = storage::kIncompatEncodedRows | storage::kIncompatDerivedRows;
  header.lineage[3] = 9;
  header.Encode(page);
  seeds.Add("segment_header", 1, std::span<const std::byte>(page).first(296));
  KvGeometry layered = Geometry();
  layered.layers[0].stored = false;
  layered.layers[1].key_dim = 32;
  header.SetGeometry(layered);
  header.Encode(page);
  seeds.Add("segment_header", 0, page);
  seeds.Add("segment_header", 1, std::span<const std::byte>(page).first(2096));
  storage::SegmentFooter footer;
  footer.error = {0.02f, 0.01f, 0.02f, 0.01f};
  footer.sequence = 3;
  footer.total_pages = 11;
  footer.Encode(page);
  seeds.Add("segment_footer", 0, page);
  seeds.Add("segment_footer", 1, std::span<const std::byte>(page).first(88));
  for (const char* target : {"segment_header", "segment_footer", "blob", "envelope"}) {
    seeds.AddRandom(target, 2);
  }

  storage::SegmentRecord record;
  record.model = "m";
  record.tokens = {0, 40};
  record.first_token = 1;
  record.lead = {1, 2, 70000};
  seeds.Add("records", 0, storage::EncodeSegment(record));
  record.parent.bytes[0] = 1;
  record.tokens = {40, 50};
  record.lead.clear();
  record.encoding = RowEncoding::kInt8;
  record.encoding_error = {0.02f, 0.01f, 0.02f, 0.01f};
  record.lineage[3] = 9;
  seeds.Add("records", 0, storage::EncodeSegment(record));
  KvGeometry differing = Geometry();
  differing.layers[0].stored = false;
  differing.layers[1].n_kv_heads = 4;
  const storage::ModelRecord model{"m", {}, Geometry(), "{}"};
  seeds.Add("records", 1, storage::EncodeModel({"l", {}, differing, "{}"}));
  seeds.Add("records", 1, storage::EncodeModel(model));
  seeds.Add(
      "records", 2,
      storage::EncodeManifest({model, "t", "label", 16, true, {{{}, {}, 9, "alias", 1}}, {}}));
  seeds.Add("records", 6, storage::EncodeAlias({{}, {}, 7, "label", 1}));
  for (const uint8_t mode : {3, 4, 5, 7}) seeds.AddRandom("records", mode);

  const std::vector<std::byte> payload(100, std::byte{42});
  const auto blob = storage::EncodeBlob({{}, "moments", "v1", payload});
  for (const uint8_t mode : {0, 1}) seeds.Add("blob", mode, blob);
}

void AddSummaries(Seeds& seeds) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6, -1, 0.5f, 2, 9};
  const RowsView rows{
      reinterpret_cast<const std::byte*>(values.data()), 2, 20, {2, 3, DType::kF32}};
  for (const bool cross : {false, true}) {
    MomentSummary summary(2, 3, cross);
    seeds.Add("summaries", 0, summary.Serialize());
    summary.Add(rows);
    seeds.Add("summaries", 0, summary.Serialize());
  }
  PhiCache cache(2, 3);
  seeds.Add("summaries", 1, cache.Serialize());
  cache.AddFeatures(rows, std::vector<float>{-1, 2, 3, -40});
  seeds.Add("summaries", 1, cache.Serialize());
  cache.AddFeatures(rows, std::vector<float>{1, 2, 300, -4}, std::vector<uint32_t>{1});
  seeds.Add("summaries", 1, cache.Serialize());
  for (const uint8_t mode : {2, 3}) seeds.AddRandom("summaries", mode);

  index::Envelope fields;
  fields.covered = {4, 40};
  fields.key_dim = 64;
  const auto sealed = index::Seal(fields, std::as_bytes(std::span(values)));
  for (const uint8_t mode : {0, 1}) seeds.Add("envelope", mode, sealed);
  for (const uint8_t mode : {0, 1}) seeds.AddRandom("stored_codes", mode);
}

// The target itself makes a builder's bytes from random numbers; these seeds reach the decoders.
void AddIngest(Seeds& seeds) {
  for (const char* target : {"estimators", "features"}) {
    for (const uint8_t mode : {0, 1}) seeds.AddRandom(target, mode);
  }
  HeadChoice choice;
  choice.layer = 1;
  choice.chosen = *EstimatorVariant::Parse("moment/r8");
  choice.budget = 0.01;
  choice.errors = {{*EstimatorVariant::Parse("phi/bf16"), 0.25}, {choice.chosen, 0.5}};
  seeds.Add("ingest", 0, SerializeChoices(std::vector<HeadChoice>{choice, HeadChoice()}));
  KvGeometry geometry;
  geometry.n_layers = geometry.n_q_heads = 2;
  geometry.n_kv_heads = 1;
  geometry.key_dim = geometry.value_dim = 3;
  geometry.layers.assign(2, {0.5f, 0, 0});
  QueryReservoir reservoir(geometry, 40, 4);
  reservoir.Add(0, 31, 2, std::vector<float>(12, 0.5f));
  seeds.Add("ingest", 1, reservoir.Take().Serialize());
  const std::vector<Clustering> clusterings = {Clustering(3, {1, 2, 3, 4, 5, 6}), Clustering(),
                                               Clustering(3, {0, 0, 0})};
  seeds.Add("ingest", 2, SerializeClusterings(clusterings));
  for (const uint8_t mode : {3, 4}) seeds.AddRandom("ingest", mode);
}

void AddSafetensors(Seeds& seeds) {
  const std::string text =
      R"({"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})";
  std::string file(8, '\0');
  const uint64_t length = text.size();
  std::memcpy(file.data(), &length, sizeof(length));
  seeds.Add("safetensors", 0, file + text + std::string(26, 'x'));
  seeds.Add("safetensors", 1, text + '\x1a');  // read from the end: mode, then 26 bytes of data
  seeds.AddRandom("safetensors", 2);
}

void AddWire(Seeds& seeds) {
  using namespace wire;
  const auto add = [&seeds](const auto& value) {
    const Json json = ToJson(value);
    seeds.Add("wire", 2, PackControl(json));
    seeds.Add("wire", 3, json.dump());
  };
  add(Hello{"client", "tenant", "token", true, true});
  add(HelloReply{});
  add(ServerStats{});
  add(ModelSpec{"m", Geometry(), {{"weights", "x"}}, {"maps.safetensors"}});
  add(PutSpec{.model = "m",
              .tenant = "t",
              .label = "label",
              .pinned = true,
              .ttl_seconds = 60,
              .encoding = RowEncoding::kInt8,
              .wait_ms = 100,
              .alone = true,
              .derived = true,
              .accept_approximate = true,
              .lineage = "lineage",
              .heads = {1, 2}});
  add(PersistSpec{.label = "label",
                  .pinned = true,
                  .ttl_seconds = 60,
                  .encoding = RowEncoding::kInt8,
                  .wait_ms = 100,
                  .alone = true,
                  .derived = true});
  add(HeadRange{1, 2});
  add(MatchSpec{"m", "t", {}, true, "lineage", {9000, 16, 200}});
  add(PrefixMatch{"id",
                  10,
                  12,
                  9,
                  {10,
                   4096,
                   8192,
                   {0.5, EstimateSource::kMeasured},
                   {},
                   {0.25, EstimateSource::kGiven},
                   9000,
                   ReuseAdvice::kRecompute}});
  add(ExplainSpec{{"m", "t", {}, true, "lineage"}, {{"weights", "x"}}});
  add(Explanation{
      {"id", 16, 32, 16},
      48,
      {{MissReason::kModelDiffers, "why", 32, "id", "other", 1, {{"rope", "a", "b"}}}}});
  add(RewriteResult{3, 1, 4096, {"it is open"}});
  add(PutResult{"id", 40, 20, 4096, 0.5, RowEncoding::kInt8, {0.02f, 0.01f, 0.02f, 0}});
  AttachSpec attach{"m", "t", {}, "id", 4, {}};
  attach.policy.k = 7;
  attach.policy.prefetch = {4, 1, 8};
  add(attach);
  SessionInfo info;
  info.parts = {{{0, 40}, RowEncoding::kInt8, 16}};
  add(info);
  SessionReport report;
  report.per_head.resize(2);
  add(report);
  PrefixDetail detail;
  detail.chain = {"a", "b"};
  detail.choices.resize(1);
  add(detail);
  add(RuntimeStats{});
  add(Lifetime{true, 60});
  RuntimeOptions options;
  options.host_tier_shares = {{"a", 0.5}, {"b", 0.25}};
  options.tenant_quotas = {{"a", 1 << 20}};
  add(options);
  add(VerifySummary{1, 2, 3, 4, {"damaged"}, {"covered"}, {"unread"}});
  add(ListSpec{"0123456789abcdef0123456789abcdef:t", 7, "t"});
  add(ModelPage{{ModelSpec{"m", Geometry(), {{"weights", "x"}}, {}}}, "m"});
  PrefixPage page;
  page.prefixes.resize(1);
  page.next = "0123456789abcdef0123456789abcdef:t";
  add(page);
  add(TokenRange{3, 9});
  add(Selection{{}, {{1.5f, CutKind::kExact}}, 4, 5});
  seeds.Add("wire", 2, PackControl(ErrorToJson({Code::kNotFound, "no"})));
  seeds.Add("wire", 2,
            PackControl({{"session", 1}, {"layer", 2}, {"extents", {{0, 64}, {64, 128}}}}));
  FrameHeader header;
  header.request_id = 5;
  header.control_bytes = 100;
  seeds.Add("wire", 0, EncodeHeader(header));
  seeds.AddRandom("wire", 1);
}

void AddStepFrame(Seeds& seeds) {
  using namespace wire;
  const StepEntry entry{1, 2, true, 64, 64, 4, 512, {}, true, 32, 32};
  StepLayout layout(2);
  layout.Add(entry), layout.Add(entry);
  std::vector<std::byte> request(layout.request_bytes());
  const std::span bytes(request);
  const auto size = static_cast<uint32_t>(request.size());
  EncodeStepHeader({2, size, 100, 50}, bytes.first<kStepHeaderBytes>());
  EncodeStepEntry(entry, bytes.subspan<kStepHeaderBytes, kStepEntryBytes>());
  EncodeStepEntry(entry, bytes.subspan<kStepHeaderBytes + kStepEntryBytes, kStepEntryBytes>());
  seeds.Add("step_frame", 0, request);
  std::array<std::byte, kStepHeaderBytes> answer;
  EncodeAnswer(2, {4, 10, 20}, answer);
  seeds.Add("step_frame", 1, answer);
  StepInfo info{7, {}, {1, 2}, {0.5f}, {{0.25, true}}};
  std::vector<std::byte> room(StepInfoRoom(2, 1));
  if (EncodeStepInfo(info, room).ok()) seeds.Add("step_frame", 2, room);
  seeds.AddRandom("step_frame", 3);
}

// Of arrays of the target's sizes.
void AddRowCopies(Seeds& seeds) {
  std::vector<std::byte> region(1 << 16), k(512), v(1024);
  const std::array<uint16_t, 4> places = {3, 1, 0, 2};
  const std::array<RowCopy, 2> copies = {
      RowCopy{region.data() + 4096, k.data(), 128, 4, 256, 128},
      {region.data(), v.data(), 256, 4, 256, 256, places.data()}};
  seeds.Add("row_copies", 0, wire::EncodeCopies(copies, region, {.k = k, .v = v}));
  seeds.AddRandom("row_copies", 0);
  seeds.AddRandom("row_copies", 1);
}

// The last byte ends the last line.
void AddTokenFile(Seeds& seeds) {
  const std::string hash = "hash = \"blake2b:" + std::string(63, '0') + "1\"\n";
  const std::string token = "[[tokens]]\ntenant = \"a\"\nname = \"2026\"\n" + hash;
  seeds.Add("token_file", '\n', token + "rights = [\"read\", \"write\", \"admin\"]");
  seeds.Add("token_file", '\n', token + "\n[[users]]\nuser = 1000\ntenant = \"a\\tb\"");
  seeds.Add("token_file", '\n', "[[users]]\nuser = \"root\"\ntenant = \"\"\nrights = [\"read\"]");
  seeds.AddRandom("token_file", '\n');
}

void AddHttp(Seeds& seeds) {
  const auto add = [&](uint8_t kind, const std::string& text) {
    seeds.Add("http", kind, text + std::string(1, '\x10'));
  };
  add(0, "GET / HTTP/1.1\r\nHost: localhost:9460\r\nAccept: */*\r\n\r\n");
  add(0, "HEAD /metrics HTTP/1.0\r\nAuthorization: Bearer pfx_0123456789\r\n\r\n");
  add(0, "POST / HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 2\r\n\r\n{}");
  add(1, "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n");
  add(1, "Authorization: Basic b3A6c2VjcmV0");
  add(2, "b3A6c2VjcmV0");
}

}  // namespace
}  // namespace prefixd::fuzz

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds DIR\n");
    return 2;
  }
  prefixd::fuzz::Seeds seeds(argv[1]);
  prefixd::fuzz::AddStorage(seeds);
  prefixd::fuzz::AddSummaries(seeds);
  prefixd::fuzz::AddIngest(seeds);
  prefixd::fuzz::AddSafetensors(seeds);
  prefixd::fuzz::AddWire(seeds);
  prefixd::fuzz::AddStepFrame(seeds);
  prefixd::fuzz::AddRowCopies(seeds);
  prefixd::fuzz::AddTokenFile(seeds);
  prefixd::fuzz::AddHttp(seeds);
  return seeds.ok() ? 0 : 1;
}
