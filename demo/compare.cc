#include "demo/compare.h"

#include <algorithm>
#include <cmath>

#include "attention/reference/diagnostics.h"
#include "attention/step/step.h"
#include "decoder/model/generate.h"

namespace prefixd::demo {
namespace {

using decoder::BlockMode;

double LogSumExp(std::span<const float> logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(double{logit} - max);
  return max + std::log(sum);
}

bool Contains(const std::vector<uint32_t>& tokens, uint32_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

}  // namespace

TokenDifference CompareLogits(std::span<const float> full, std::span<const float> other,
                              uint32_t target) {
  const double norm = LogSumExp(full), other_norm = LogSumExp(other);
  double kl = 0;
  for (size_t i = 0; i < full.size(); ++i) {
    const double log_p = double{full[i]} - norm;
    kl += std::exp(log_p) * (log_p - (double{other[i]} - other_norm));
  }
  return {.kl = std::max(kl, 0.0),
          .nll = other_norm - double{other[target]},
          .same = decoder::Argmax(full) == decoder::Argmax(other)};
}

Comparison::Comparison(const decoder::Model& model, std::shared_ptr<Session> session,
                       std::span<const Passage> passages, uint32_t recorded, bool keep_logits)
    : model_(model),
      session_(std::move(session)),
      passages_(passages),
      recorded_(recorded),
      keep_logits_(keep_logits) {}

Result<ReadingResult> Comparison::Full() {
  PREFIXD_TRY(session_->SetPolicy({.mode = StepMode::kFull}));
  ReadingResult result;
  begun_.clear();
  for (const Passage& passage : passages_) {
    const bool record = begun_.empty() && recorded_ > 0 && passage.generate == 0;
    PREFIXD_ASSIGN(Begun begun, Begin(passage, record));
    result.passages.push_back(Against(begun, begun.logits));
    result.passages.back().text = begun.text;
    begun_.push_back(std::move(begun));
  }
  outputs_.clear();
  norms_.clear();
  const KvGeometry& g = session_->info().geometry;
  for (uint32_t layer = 0; layer < queries_.size(); ++layer) {
    const auto n = static_cast<uint32_t>(queries_[layer].size() / (g.n_q_heads * g.key_dim));
    std::vector<float> y(size_t{n} * g.n_q_heads * g.value_dim), lse(size_t{n} * g.n_q_heads);
    PREFIXD_TRY(session_->AttendExact(layer, n, queries_[layer], y, lse));
    outputs_.push_back(std::move(y));
    norms_.push_back(std::move(lse));
  }
  return result;
}

Result<Comparison::Begun> Comparison::Begin(const Passage& passage, bool record) {
  const uint32_t n = session_->info().n_tokens;
  Begun begun;
  begun.attention = std::make_unique<decoder::SplicedAttention>(session_, BlockMode::kExact);
  if (!passage.exact.empty()) {
    PREFIXD_TRY(model_.Forward(passage.exact, n, *begun.attention, 0, {}));
  }
  const uint32_t position = n + static_cast<uint32_t>(passage.exact.size());
  if (passage.generate > 0) {
    PREFIXD_TRY(Write(passage, position, begun));
  } else {
    begun.read = passage.read;
    begun.targets = passage.targets;
    const auto count = static_cast<uint32_t>(begun.read.size());
    begun.logits.resize(size_t{count} * model_.config().vocab_size);
    if (record) queries_.assign(session_->info().geometry.n_layers, {});
    const uint32_t spacing = std::max(1u, count / std::max(1u, recorded_));
    decoder::ObservedAttention observed(
        *begun.attention,
        [&](uint32_t layer, uint32_t first, uint32_t m, std::span<const float> q) {
          if (!record) return;
          const size_t width = q.size() / m;
          for (uint32_t i = 0; i < m; ++i) {
            const uint32_t at = first + i - position;
            if (at % spacing != 0 || at / spacing >= recorded_) continue;
            const std::span<const float> own = q.subspan(i * width, width);
            queries_[layer].insert(queries_[layer].end(), own.begin(), own.end());
          }
        });
    PREFIXD_TRY(model_.Forward(begun.read, position, observed, count, begun.logits));
  }
  begun.attention->TruncateTo(position);
  return begun;
}

Status Comparison::Write(const Passage& passage, uint32_t position, Begun& begun) {
  begun.read = passage.read;
  std::vector<float> row(model_.config().vocab_size);
  while (true) {
    PREFIXD_TRY(model_.Forward({&begun.read.back(), 1}, position++, *begun.attention, 1, row));
    begun.logits.insert(begun.logits.end(), row.begin(), row.end());
    const uint32_t token = decoder::Argmax(row);
    begun.targets.push_back(token);
    if (Contains(passage.stop, token)) return {};
    begun.text.push_back(token);
    if (begun.text.size() == passage.generate) return {};
    begun.read.push_back(token);
  }
}

Result<ReadingResult> Comparison::Read(const StepPolicy& policy) {
  ReadingResult result;
  if (Status set = session_->SetPolicy(policy); !set.ok()) {
    if (set.error().code != Code::kInfeasible) return std::move(set).error();
    result.infeasible = set.error().message;
    return result;
  }
  PREFIXD_ASSIGN(const SessionReport report_before, session_->report());
  const Ledger& before = report_before.total;
  for (size_t i = 0; i < passages_.size(); ++i) {
    PREFIXD_ASSIGN(PassageResult passage, ReadPassage(passages_[i], begun_[i]));
    result.passages.push_back(std::move(passage));
  }
  PREFIXD_TRY(MeasureHeads(result));
  PREFIXD_ASSIGN(const SessionReport report_after, session_->report());
  const Ledger& after = report_after.total;
  if (after.steps > before.steps) {
    result.tokens_per_step = (after.tokens_per_step() * static_cast<double>(after.steps) -
                              before.tokens_per_step() * static_cast<double>(before.steps)) /
                             static_cast<double>(after.steps - before.steps);
  }
  return result;
}

void Comparison::ReadThrough(std::shared_ptr<Session> session) {
  for (Begun& begun : begun_) begun.attention->set_session(session);
  session_ = std::move(session);
}

Result<PassageResult> Comparison::ReadPassage(const Passage& passage, Begun& begun) {
  decoder::SplicedAttention& attention = *begun.attention;
  const uint32_t position = attention.position();
  const auto count = static_cast<uint32_t>(begun.read.size());
  std::vector<float> logits(size_t{count} * model_.config().vocab_size);
  // Teacher-forced tokens go through the matrices together, each with a step of its own over the
  // document, as if they were decoded one by one.
  attention.set_block_mode(BlockMode::kStep);
  PREFIXD_TRY(model_.Forward(begun.read, position, attention, count, logits));
  std::vector<uint32_t> text;
  if (passage.generate > 0) {
    PREFIXD_ASSIGN(text, OwnText(passage, begun, logits));
  }
  attention.TruncateTo(position);
  PassageResult result = Against(begun, std::move(logits));
  result.text = std::move(text);
  return result;
}

Result<std::vector<uint32_t>> Comparison::OwnText(const Passage& passage, Begun& begun,
                                                  std::span<const float> logits) {
  // As long as this way of reading chooses what full attention wrote, its own text is the same.
  size_t same = 0;
  while (same < begun.targets.size() && decoder::Argmax(Row(logits, same)) == begun.targets[same]) {
    ++same;
  }
  if (same == begun.targets.size()) return begun.text;
  std::vector<uint32_t> text(begun.targets.begin(),
                             begun.targets.begin() + static_cast<ptrdiff_t>(same));
  decoder::SplicedAttention& attention = *begun.attention;
  const uint32_t first = attention.position() - static_cast<uint32_t>(begun.read.size());
  const uint32_t position = first + static_cast<uint32_t>(same) + 1;
  attention.TruncateTo(position);
  PREFIXD_ASSIGN(
      const std::vector<uint32_t> rest,
      decoder::GreedyDecode(
          model_, attention, Row(logits, same), position,
          {.max_tokens = passage.generate - static_cast<uint32_t>(same), .stop = passage.stop}));
  text.insert(text.end(), rest.begin(), rest.end());
  return text;
}

PassageResult Comparison::Against(const Begun& begun, std::vector<float> logits) const {
  PassageResult result;
  for (size_t i = 0; i < begun.read.size(); ++i) {
    result.tokens.push_back(CompareLogits(Row(begun.logits, i), Row(logits, i), begun.targets[i]));
  }
  if (keep_logits_) result.logits = std::move(logits);
  return result;
}

Status Comparison::MeasureHeads(ReadingResult& result) {
  const KvGeometry& g = session_->info().geometry;
  const size_t q_width = size_t{g.n_q_heads} * g.key_dim, dim = g.value_dim;
  std::vector<float> y(g.n_q_heads * dim), lse(g.n_q_heads);
  if (queries_.empty()) return {};
  result.errors.assign(size_t{g.n_layers} * g.n_q_heads, 0);
  result.shifts = result.errors;
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    const size_t count = queries_[layer].size() / q_width;
    for (size_t i = 0; i < count; ++i) {
      PREFIXD_TRY(session_->Step(
          layer, std::span<const float>(queries_[layer]).subspan(i * q_width, q_width), y, lse,
          nullptr));
      for (uint32_t head = 0; head < g.n_q_heads; ++head) {
        const size_t at = size_t{layer} * g.n_q_heads + head, of = i * g.n_q_heads + head;
        const auto truth = std::span<const float>(outputs_[layer]).subspan(of * dim, dim);
        result.errors[at] += RelativeL1(std::span<const float>(y).subspan(head * dim, dim), truth) /
                             static_cast<double>(count);
        result.shifts[at] +=
            (double{lse[head]} - double{norms_[layer][of]}) / static_cast<double>(count);
      }
    }
  }
  return {};
}

Result<std::vector<double>> Comparison::Entropy() {
  const KvGeometry& g = session_->info().geometry;
  if (queries_.empty()) return std::vector<double>{};
  const Partition partition = Partition::Of(session_->info().n_tokens, session_->info().anchors);
  const uint32_t group = g.group_size(0);
  const size_t q_width = size_t{g.n_q_heads} * g.key_dim;
  std::vector<std::byte> rows(partition.mid.size() * g.row(0).bytes());
  std::vector<float> scores(size_t{group} * partition.mid.size());
  std::vector<double> entropy(size_t{g.n_layers} * g.n_q_heads, 0);
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    const size_t count = queries_[layer].size() / q_width;
    for (uint32_t head = 0; head < g.n_kv_heads; ++head) {
      PREFIXD_TRY(session_->ReadRange(layer, head, partition.mid, rows));
      const RowsView view{rows.data(), partition.mid.size(), g.row(0).bytes(), g.row(0)};
      for (size_t i = 0; i < count; ++i) {
        Scores(
            std::span<const float>(queries_[layer])
                .subspan(i * q_width + size_t{head} * group * g.key_dim, size_t{group} * g.key_dim),
            group, g.layers[layer], view, scores);
        for (uint32_t member = 0; member < group; ++member) {
          entropy[size_t{layer} * g.n_q_heads + head * group + member] +=
              NormalizedEntropy(std::span(scores).subspan(member * view.count, view.count)) /
              static_cast<double>(count);
        }
      }
    }
  }
  return entropy;
}

}  // namespace prefixd::demo
