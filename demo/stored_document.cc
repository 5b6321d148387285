#include "demo/stored_document.h"

#include <chrono>
#include <utility>

#include "demo/events.h"

namespace prefixd::demo {

using Clock = std::chrono::steady_clock;

Status StoredDocument::Put() {
  if (!prefilled_) {
    PREFIXD_ASSIGN(Prefilled computed,
                   Prefilled::Compute(model_, spec_.geometry, prompt_, "prefill"));
    prefilled_ = std::move(computed);
  }
  PREFIXD_ASSIGN(const PutResult put, prefilled_->Put(store_, spec_.name, ""));
  prefix_ = put.prefix;
  return {};
}

Result<StoredDocument::Made> StoredDocument::Make() {
  Made made;
  auto start = Clock::now();
  PREFIXD_ASSIGN(PrefixMatch match,
                 store_.Match({.model = spec_.name, .tokens = prompt_, .accept_compressed = true}));
  if (match.compressed) {  // an earlier run ended in the middle
    PREFIXD_TRY(store_.Remove(match.prefix));
    PREFIXD_ASSIGN(match, store_.Match({.model = spec_.name, .tokens = prompt_}));
  }
  made.prefilled = match.n_tokens < prompt_.size();
  prefix_ = match.prefix;
  if (made.prefilled) PREFIXD_TRY(Put());
  made.prefill_s = SecondsSince(start);
  start = Clock::now();
  PREFIXD_TRY(store_.WaitReady(prefix_, nullptr));
  made.ready_s = SecondsSince(start);
  return made;
}

Result<CompressReport> StoredDocument::Compress(const CompressSpec& spec) {
  if (compressed_) {
    PREFIXD_TRY(store_.Remove(prefix_));
    PREFIXD_TRY(Put());
    compressed_ = false;
    PREFIXD_TRY(store_.WaitReady(prefix_, nullptr));
  }
  PREFIXD_ASSIGN(CompressReport report, store_.Compress(prefix_, spec, nullptr));
  compressed_ = true;
  return report;
}

Result<std::shared_ptr<Session>> StoredDocument::Attach() const {
  return store_.Attach({.model = spec_.name,
                        .prefix = prefix_,
                        .n_tokens = static_cast<uint32_t>(prompt_.size()),
                        .policy = {.mode = compressed_ ? StepMode::kAnchors : StepMode::kFull}});
}

}  // namespace prefixd::demo
