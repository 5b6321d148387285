// Runs the first half of the demo: cold prefill, answers without prefixd, put.
#pragma once

#include <filesystem>
#include <string>

#include "demo/document.h"
#include "prefixd/result.h"

namespace prefixd::demo {

struct PrefillOptions {
  std::string address;  // the daemon's address
  std::filesystem::path model_dir, state_file;
  DocumentOptions document;  // prompt_tokens = 0: as long as the feature maps are trained for
};

Status RunPrefill(PrefillOptions options);

}  // namespace prefixd::demo
