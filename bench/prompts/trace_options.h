// Defines options of benchmarks that read what a real model retrieves; each benchmark adds those
// that it varies.
#pragma once

#include <CLI/CLI.hpp>

#include "bench/prompts/retrieval_trace.h"

namespace prefixd::bench {

// Adds --trace, --model and --document.
inline void AddTraceSource(CLI::App& app, TraceOptions& trace) {
  app.add_option("--trace", trace.file,
                 "What a real model saw, as python -m prefixd.trace recorded it; without it the "
                 "decoder reads --document")
      ->check(CLI::ExistingFile);
  app.add_option("--model", trace.model_dir, "Checkpoint whose retrieval is captured")
      ->capture_default_str();
  app.add_option("--document", trace.document, "What it reads: UTF-8 text")->capture_default_str();
}

// Adds --tokens.
inline void AddTraceTokens(CLI::App& app, TraceOptions& trace) {
  app.add_option("--tokens", trace.prompt_tokens, "At most this many prompt tokens")
      ->check(CLI::Range(2048, 1 << 20))
      ->capture_default_str();
}

// Adds --steps.
inline void AddTraceSteps(CLI::App& app, TraceOptions& trace) {
  app.add_option("--steps", trace.steps, "Decoded steps; of a trace, in runs spread over all of it")
      ->check(CLI::Range(2, 4096))
      ->capture_default_str();
}

}  // namespace prefixd::bench
