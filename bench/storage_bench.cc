// Measures whether storage is as fast as the disk: durable put, full restore and random rows beside
// fio on the same file system, the host tier beside memcpy, attach of a stored prompt, and the
// pages that a real model's retrieval reads. Every pair is measured in turns; checksums are on
// throughout.
//
// A put counts until Commit returned: rows are durable, summaries are not yet built. Geometry:
// Llama-3.2-1B (16 layers, 8 KV heads of 64, bf16), 16384 tokens, so 512 MiB of rows.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "bench/prompts/trace_options.h"
#include "bench/storage/encoding_error.h"
#include "bench/storage/step_reads.h"
#include "bench/storage/stored_reads.h"
#include "bench/support/bench_main.h"
#include "measure/disk/attach_time.h"
#include "measure/disk/fio.h"
#include "measure/disk/storage_speed.h"
#include "measure/prompts/bench_prompt.h"
#include "measure/timing/json_file.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

// These are the lines of the table with the names of their ratios, and the other parts of the
// report.
const std::vector<std::pair<std::string, std::string>> kLines = {
    {"put", "put_vs_fio"},
    {"segment", "put_segment_vs_fio"},
    {"restore", "restore_vs_fio"},
    {"rows", "row_iops_vs_fio"},
    {"host", "host_vs_memcpy"},
    {"reclustered", "host_reclustered_vs_memcpy"},
    {"step_cold", "step_cold_vs_fio"},
    {"step_half", "step_half_vs_fio"},
    {"step_full", "step_full_vs_memcpy"},
    {"scrubbed", "step_during_scrub"},
    {"verified", "step_during_verify"},
    {"gap", "gap_together"}};
constexpr const char* kAttach = "attach";
constexpr const char* kEncoding = "encoding";
constexpr const char* kAmplification = "amplification";

struct Options {
  bool Wants(const std::string& part) const {
    return parts.empty() || std::find(parts.begin(), parts.end(), part) != parts.end();
  }

  uint32_t tokens = 16384;
  SpeedOptions speed{.dir = std::filesystem::temp_directory_path()};
  std::string source_pages = "small";
  std::filesystem::path keep;  // store of the attach part; empty: a temporary one
  TraceOptions trace;
  std::vector<std::string> parts;  // from kParts; empty: all
  std::string json_file;
};

json SpreadJson(const Spread& s) {
  return {{"median", s.median}, {"low", s.low}, {"high", s.high}};
}

json StagesJson(const StageMs& s) {
  return {{"read", s.read}, {"select", s.select}, {"compute", s.compute}};
}

json PairedJson(const Paired& p) {
  return {{"name", p.name},
          {"floor", p.floor_name},
          {"ours_per_second", SpreadJson(p.ours)},
          {"floor_per_second", SpreadJson(p.floor)},
          {"ratio", SpreadJson(p.ratio)},
          {"cpu_seconds_per_gb", p.ours_cpu},
          {"floor_cpu_seconds_per_gb", p.floor_cpu}};
}

void PrintPaired(const Paired& p) {
  const double d = p.unit_divisor;
  std::printf(
      "%-24s %7.0f (%5.0f-%5.0f)  %-13s %7.0f (%5.0f-%5.0f) %-5s %5.2f (%.2f-%.2f) %6.2f %6.2f\n",
      p.name.c_str(), p.ours.median / d, p.ours.low / d, p.ours.high / d, p.floor_name.c_str(),
      p.floor.median / d, p.floor.low / d, p.floor.high / d, p.unit.c_str(), p.ratio.median,
      p.ratio.low, p.ratio.high, p.ours_cpu, p.floor_cpu);
}

// Owns the measurements' folder on the disk and removes it at the end.
struct Scratch {
  std::filesystem::path dir;
  explicit Scratch(const std::filesystem::path& parent)
      : dir(parent / ("prefixd-storage-" + std::to_string(std::random_device{}()))) {}
  ~Scratch() {
    std::error_code ec;
    std::filesystem::remove_all(dir, ec);
  }
};

Status MeasureLines(const Prompt& prompt, const SpeedOptions& speed, const std::string& pages,
                    json& report) {
  PREFIXD_ASSIGN(const std::string fio, FioVersion());
  std::fprintf(stderr, "   %u pairs of every line ...\n", speed.pairs);
  PREFIXD_ASSIGN(SpeedReport measured, MeasureSpeed(prompt, speed));
  // A figure that is kept has its floor, and a run all of its lines.
  if (!measured.skipped.empty()) return Error{Code::kUnavailable, measured.skipped.front()};
  PREFIXD_ASSIGN(auto steps, MeasureStepReads(prompt, speed, measured.fio_engine));
  measured.lines.merge(steps);
  std::printf("%.0f MiB of rows; I/O by %s, %s by %s; %u threads read; medians (quartiles)\n",
              double(prompt.row_bytes()) / (1 << 20), measured.io_backend.c_str(), fio.c_str(),
              measured.fio_engine.c_str(), measured.threads);
  std::printf("%-24s %-22s %-13s %-27s %-17s %s\n", "", "prefixd", "floor", "", "ratio",
              "CPU s/GB, floor's");
  for (const auto& [part, ratio] : kLines) {
    const auto line = measured.lines.find(part);
    if (line == measured.lines.end()) continue;
    PrintPaired(line->second);
    report["speed"].push_back(PairedJson(line->second));
    report["ratios"][ratio] = line->second.ratio.median;
  }
  if (measured.source_read.median > 0) {
    std::printf(
        "%-24s %7.0f MB/s, read once by one thread (%s pages): a put must do at least that\n",
        "keys and values", measured.source_read.median / 1e6, pages.c_str());
    report["source_read_per_second"] = SpreadJson(measured.source_read);
    report["source_pages"] = pages;
  }
  report["fio"] = fio;
  report["io_backend"] = measured.io_backend;
  report["row_bytes"] = prompt.row_bytes();
  return {};
}

Status MeasureAttaching(const Options& options, const Prompt& prompt,
                        const std::filesystem::path& dir, json& report) {
  std::fprintf(stderr, "   building the summaries of a prefix to attach to ...\n");
  const bool keep = !options.keep.empty();
  PREFIXD_ASSIGN(const AttachReport a, MeasureAttach(prompt, keep ? options.keep : dir / "attach",
                                                     keep, options.speed.pairs));
  std::printf(
      "\nattach of %u tokens: warm %.1f ms (%.1f-%.1f), store just opened %.1f ms\n"
      "first completed step, all layers: warm %.1f ms (%.1f-%.1f), cold %.1f ms (%.0f MB read)\n"
      "second step: warm %.1f ms (%.1f-%.1f), after the cold one %.1f ms\n",
      options.tokens, a.warm_attach_ms.median, a.warm_attach_ms.low, a.warm_attach_ms.high,
      a.cold_attach_ms, a.warm_step_ms.median, a.warm_step_ms.low, a.warm_step_ms.high,
      a.cold_step_ms, a.cold_step_bytes / 1e6, a.next_step_ms.median, a.next_step_ms.low,
      a.next_step_ms.high, a.cold_next_step_ms);
  for (const auto& [name, stages] :
       {std::pair{"cold", a.cold_stages}, {"first", a.first_stages}, {"second", a.next_stages}}) {
    std::printf("of the %s step, by thread: reading %.1f ms, selection %.1f, arithmetic %.1f\n",
                name, stages.read, stages.select, stages.compute);
  }
  std::printf("%s %.1f s\n",
              a.found ? "the prefix was stored before; the rest of its summaries took"
                      : "summaries and indexes were ready after",
              a.ingest_seconds);
  report["attach"] = {{"warm_attach_ms", SpreadJson(a.warm_attach_ms)},
                      {"warm_first_step_ms", SpreadJson(a.warm_step_ms)},
                      {"warm_next_step_ms", SpreadJson(a.next_step_ms)},
                      {"cold_step_stages_ms", StagesJson(a.cold_stages)},
                      {"first_step_stages_ms", StagesJson(a.first_stages)},
                      {"next_step_stages_ms", StagesJson(a.next_stages)},
                      {"cold_attach_ms", a.cold_attach_ms},
                      {"cold_first_step_bytes", a.cold_step_bytes},
                      {"cold_first_step_ms", a.cold_step_ms},
                      {"cold_next_step_ms", a.cold_next_step_ms},
                      {"stored_before", a.found},
                      {"ingest_seconds", a.ingest_seconds},
                      {"reclustered_seconds", a.reclustered_seconds}};
  report["ratios"]["attach_ms_16k"] = a.warm_attach_ms.median;
  return {};
}

Status MeasureDisk(const Options& options, json& report) {
  SpeedOptions speed = options.speed;
  speed.parts.clear();
  for (const auto& [part, ratio] : kLines) {
    if (options.Wants(part)) speed.parts.push_back(part);
  }
  if (speed.parts.empty() && !options.Wants(kAttach)) return {};
  const Scratch scratch(options.speed.dir);
  std::error_code ec;
  if (!std::filesystem::create_directory(scratch.dir, ec)) {
    return Error{Code::kIo, "cannot create '" + scratch.dir.string() + "': " + ec.message()};
  }
  speed.dir = scratch.dir;
  speed.source = true;
  std::fprintf(stderr, "   making %u tokens of keys and values ...\n", options.tokens);
  const Prompt prompt = SyntheticPrompt(Llama1B(), options.tokens, options.source_pages == "huge");
  if (!speed.parts.empty()) {
    PREFIXD_TRY(MeasureLines(prompt, speed, options.source_pages, report));
  }
  if (options.Wants(kAttach)) {
    PREFIXD_TRY(MeasureAttaching(options, prompt, scratch.dir, report));
  }
  return {};
}

Status MeasureAmplification(const Options& options, const RetrievalTrace& trace, json& report) {
  const Scratch scratch(options.speed.dir);
  PREFIXD_ASSIGN(const auto stored, MeasureStoredReads(trace, scratch.dir));
  std::printf(
      "\nbytes of pages a store read from the disk for one cold step, over those of the rows, key\n"
      "and value (%u tokens, %zu steps; ms: all layers and heads, one after the other)\n",
      trace.n_tokens, trace.heads[0].sets[0].size());
  std::printf("%-32s", "");
  for (const double f : options.trace.fractions) {
    std::printf("   K = %2g%%  best packing   ms", 100 * f);
  }
  std::printf("\n");
  for (const StoredReads& result : stored) {
    std::printf("%-32s", result.name.c_str());
    json reads = json::array();
    for (size_t f = 0; f < result.reads.size(); ++f) {
      const PageReads& r = result.reads[f];
      std::printf("   %7.2f %13.2f %4.0f", r.amplification, r.best, result.ms_per_step[f]);
      reads.push_back({{"fraction", options.trace.fractions[f]},
                       {"rows", r.rows},
                       {"pages", r.pages},
                       {"amplification", r.amplification},
                       {"best_packing", r.best},
                       {"ms_per_step", result.ms_per_step[f]}});
    }
    std::printf("\n");
    report["amplification"].push_back({{"order", result.name}, {"reads", reads}});
  }
  // Steps read values alone where selection has the exact keys in memory.
  json& ratios = report["ratios"];
  ratios["ssd_amplification"] = stored.back().reads.front().amplification;
  ratios["ssd_amplification_rows"] = stored[1].reads.front().amplification;
  ratios["ssd_amplification_arrival"] = stored.front().reads.front().amplification;
  ratios["ssd_amplification_best"] = stored.back().reads.front().best;
  return {};
}

// Measures what int8 rows change on the real model's keys.
void MeasureEncoding(const RetrievalTrace& trace, uint32_t rounds, json& report) {
  std::printf("\nkeys of the model stored as int8\n%9s %9s %9s %11s %9s\n", "bytes", "rms",
              "largest", "score rms", "recall@1%");
  const Int8Error e = MeasureInt8Error(trace);
  std::printf("%9.0f %9.4f %9.4f %11.4f %9.4f\n", e.bytes_per_key, e.key_rms, e.key_max,
              e.score_rms, e.recall);
  report["encoding"] = {{"bytes_per_key", e.bytes_per_key},
                        {"key_error_rms", e.key_rms},
                        {"key_error_max", e.key_max},
                        {"score_error_rms", e.score_rms},
                        {"recall", e.recall}};
  const EncodingSpeed speed = MeasureEncodingSpeed(128, rounds);
  std::printf("one thread, rows of 128 + 128 bf16: encodes %.2f GB/s, decodes %.2f GB/s\n",
              speed.encode / 1e9, speed.decode / 1e9);
  report["encoding_speed"] = {{"encode_bytes_per_second", speed.encode},
                              {"decode_bytes_per_second", speed.decode}};
}

Status Run(const Options& options) {
  json report;
  PREFIXD_TRY(MeasureDisk(options, report));
  if (options.Wants(kAmplification) || options.Wants(kEncoding)) {
    std::fprintf(stderr, "   capturing what a real model retrieves ...\n");
    PREFIXD_ASSIGN(const RetrievalTrace trace, MakeTrace(options.trace));
    if (options.Wants(kAmplification)) PREFIXD_TRY(MeasureAmplification(options, trace, report));
    if (options.Wants(kEncoding)) MeasureEncoding(trace, options.speed.pairs, report);
  }
  if (options.json_file.empty()) return {};
  PREFIXD_TRY(WriteJson(options.json_file, report));
  return {};
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  prefixd::bench::Options options;
  CLI::App app("Storage beside the disk's and the memory's own speed, on this machine.");
  app.add_option("--tokens", options.tokens, "Tokens of the stored prompt")
      ->check(CLI::Range(1024, 1 << 18))
      ->capture_default_str();
  app.add_option("--pairs", options.speed.pairs, "Measured pairs per line")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--threads", options.speed.threads, "Threads of a restore; 0: one per core")
      ->capture_default_str();
  app.add_option("--io", options.speed.io, "How the store reads and writes")
      ->check(CLI::IsMember({"auto", "uring", "threads"}))
      ->capture_default_str();
  app.add_option("--source-pages", options.source_pages,
                 "Memory pages of the keys and values that are put: small as malloc gives, or huge")
      ->check(CLI::IsMember({"huge", "small"}))
      ->capture_default_str();
  app.add_option("--keep", options.keep,
                 "Attach to a store in this directory, made if missing and left there: building "
                 "summaries and indexes takes minutes, and a second call finds them");
  app.add_option("--dir", options.speed.dir,
                 "Where temporary files lie: on the disk to be measured")
      ->capture_default_str();
  prefixd::bench::AddTraceSource(app, options.trace);
  std::vector<std::string> parts = {prefixd::bench::kAttach, prefixd::bench::kAmplification,
                                    prefixd::bench::kEncoding};
  for (const auto& [part, ratio] : prefixd::bench::kLines) parts.push_back(part);
  app.add_option("--only", options.parts, "Only these parts of the report")
      ->check(CLI::IsMember(parts));
  return prefixd::bench::BenchMain(app, argc, argv, options.json_file,
                                   [&] { return prefixd::bench::Run(options); });
}
