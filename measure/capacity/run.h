// Runs `prefixctl bench capacity`: how many prompts this disk and memory hold, what a hit saves,
// and from which rate of reuse on storing pays; for a log of requests, or for Zipf's law.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "measure/capacity/cache_model.h"
#include "measure/capacity/request_log.h"
#include "measure/disk/medium.h"
#include "measure/models/model_shape.h"
#include "measure/page/report.h"

namespace prefixd::bench {

struct CapacityOptions {
  std::string model = "Llama-3.1-8B";
  std::string log_file;  // empty: Zipf's law
  uint32_t block_tokens = 512;
  ZipfSpec zipf;
  double disk_gb = 0;       // 0: what is free on the disk
  double memory_gb = 0;     // 0: the host tier that a store would take here
  double prefill_rate = 0;  // tokens per second; 0: from the rate of matrix products
  bool quick = false;
};

struct CapacityPlan {
  CapacityOptions options;
  ModelShape model;
  std::filesystem::path dir;
  RequestLog log;
  double disk_bytes = 0, memory_bytes = 0;
  uint32_t layers = 0, tokens = 0;   // of the prompt that is measured
  std::vector<std::string> skipped;  // what is not as the model has it
  Medium medium;
  Plan plan;
};

struct CapacityPoint {
  double bytes = 0;             // on the disk
  std::vector<CacheHits> hits;  // of kPolicies
  const CacheHits& of(Eviction policy) const;
};

struct CapacityOutcome {
  CapacityPlan what;
  double stored_per_row_byte = 0;                    // with summaries and indexes
  double written_per_row_byte = 0;                   // the same, and rows again as reclustered
  double put_rate = 0, ssd_rate = 0, host_rate = 0;  // bytes of rows per second
  // Behind a put, for a byte of rows: until summaries and indexes are made, and from there until
  // rows are reclustered.
  double ingest_seconds_per_byte = 0, recluster_seconds_per_byte = 0;
  double gemm_flops = 0;  // where no prefill rate is given
  double other_work = 0;  // of the machine, while it was measured
  CacheHits endless, disk, memory;
  std::vector<CapacityPoint> curve;  // ascending

  double token_bytes_on_disk() const {
    return double(what.model.token_bytes()) * stored_per_row_byte;
  }
  // To the disk, for what was stored. Compaction of small segments comes on top.
  double WrittenBytes(const CacheHits& hits) const {
    return double(hits.stored_tokens) * double(what.model.token_bytes()) * written_per_row_byte;
  }
  double PrefillSeconds(double tokens) const { return PrefillSeconds(tokens, tokens * tokens); }
  // Of many prompts, by the sum of their tokens and the sum of these squared.
  double PrefillSeconds(double tokens, double squares) const;
  double SsdSeconds(double tokens) const;         // to restore
  double HostSeconds(double tokens) const;        // to restore
  double PutSeconds(double tokens) const;         // until the prompt is durable
  double BackgroundSeconds(double tokens) const;  // of work behind it
  double StoreSeconds(double tokens) const {
    return PutSeconds(tokens) + BackgroundSeconds(tokens);
  }
  // Hits that a stored prompt of this length must have, on average, for storing to take less time
  // than it saves, with the background's work or the put alone; nothing where restoring is no
  // faster than computing.
  std::optional<double> ReuseThatPays(double tokens, bool with_background) const;
};

using CapacityProgress = std::function<void(const std::string&)>;

// Reads the log. Errors are those of ReadRequestLog and ModelShapeOf.
Result<CapacityPlan> PlanCapacity(const CapacityOptions& options, const std::filesystem::path& dir,
                                  const CapacityProgress& progress);
Result<CapacityOutcome> MeasureCapacity(const CapacityPlan& plan, const CapacityProgress& progress);
Report CapacityReport(const CapacityOutcome& outcome,
                      const std::vector<std::pair<std::string, std::string>>& machine);

}  // namespace prefixd::bench
