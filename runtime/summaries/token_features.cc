#include "runtime/summaries/token_features.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "attention/estimators/outweighing.h"
#include "runtime/derived/unread.h"

namespace prefixd {
namespace {

constexpr uint32_t kChunkTokens = 4096;

}  // namespace

Result<TokenFeatures> TokenFeatures::Encode(const Model& model, const FeatureMapSet& maps,
                                            const FeatureFormat& format,
                                            const storage::StoredPrefix& prefix, TokenRange tokens,
                                            size_t head, const WorkProgress& progress) {
  const uint32_t layer = model.heads.layer_of(head), kv_head = model.heads.head_of(head);
  const RowShape row = model.spec.geometry.row(layer);
  const RowShape key{row.key_dim, 0, row.dtype};
  TokenFeatures out(format, maps.d_phi, tokens);
  out.codes_.resize(tokens.size() * format.RowBytes(maps.d_phi));
  std::vector<std::byte> bytes;
  std::vector<float> keys, log_phi;
  for (uint32_t begin = tokens.begin; begin < tokens.end;) {
    PREFIXD_TRY(progress.Check());
    const TokenRange chunk{begin,
                           std::min(tokens.end, RunEnd(prefix.parts(), begin, kChunkTokens))};
    bytes.resize(chunk.size() * key.bytes());
    PREFIXD_TRY(prefix.ReadRange(layer, kv_head, chunk, storage::RowPart::kKey,
                                 {bytes, key.bytes()}, nullptr));
    keys.resize(size_t{chunk.size()} * key.key_dim);
    log_phi.resize(size_t{chunk.size()} * maps.d_phi);
    for (size_t i = 0; i < chunk.size(); ++i) {
      ToFloat(key.dtype, bytes.data() + i * key.bytes(),
              std::span(keys).subspan(i * key.key_dim, key.key_dim));
    }
    maps.phi_k[head].LogPhi(keys, chunk.size(), log_phi);
    // A token that outweighs the others has a chunk of its own: beside it they would all be zero.
    uint32_t at = chunk.begin;
    for (const uint32_t alone : OutweighingRows(log_phi, chunk.size(), maps.d_phi)) {
      const uint32_t token = chunk.begin + alone;
      for (const TokenRange run : {TokenRange{at, token}, TokenRange{token, token + 1}}) {
        out.EncodeChunk(run,
                        std::span(log_phi).subspan(size_t{run.begin - chunk.begin} * maps.d_phi,
                                                   size_t{run.size()} * maps.d_phi));
      }
      at = token + 1;
    }
    out.EncodeChunk({at, chunk.end},
                    std::span(log_phi).subspan(size_t{at - chunk.begin} * maps.d_phi));
    begin = chunk.end;
  }
  return out;
}

void TokenFeatures::EncodeChunk(TokenRange chunk, std::span<const float> log_phi) {
  if (chunk.size() == 0) return;
  std::vector<float> m(d_phi_, -std::numeric_limits<float>::infinity());
  for (size_t i = 0; i < log_phi.size(); ++i) {
    m[i % d_phi_] = std::max(m[i % d_phi_], log_phi[i]);
  }
  const size_t row = format_.RowBytes(d_phi_), at = size_t{chunk.begin - tokens_.begin} * row;
  EncodeFeatures(format_, log_phi, m, std::span(codes_).subspan(at, chunk.size() * row));
  m_.insert(m_.end(), m.begin(), m.end());
  chunk_ends_.push_back(chunk.end);
}

Result<TokenFeatures> TokenFeatures::OfMid(const DerivedContext& context, const Model& model,
                                           const FeatureMapSet& maps, const FeatureFormat& format,
                                           const std::vector<SegmentPart>& parts, TokenRange mid,
                                           size_t head, uint64_t* loaded) {
  TokenFeatures out(format, maps.d_phi, mid);
  out.codes_.reserve(mid.size() * format.RowBytes(maps.d_phi));
  for (const SegmentPart& part : parts) {
    const uint32_t begin = std::max(part.used.begin, mid.begin);
    const uint32_t end = std::min(part.used.end, mid.end);
    if (begin >= end) continue;
    PREFIXD_ASSIGN(const TokenFeatures own,
                   LoadFeatures(context, model, maps, format, part.id, head, loaded));
    if (begin < own.tokens_.begin || end > own.tokens_.end) {
      return Error{Code::kCorrupt, "stored features are malformed: they are of other tokens"};
    }
    out.codes_.insert(out.codes_.end(), own.code(begin),
                      own.code(begin) + (end - begin) * format.RowBytes(maps.d_phi));
    uint32_t first = own.tokens_.begin;
    for (size_t c = 0; c < own.chunk_ends_.size(); ++c) {
      const uint32_t last = own.chunk_ends_[c];
      if (first < end && last > begin) {
        out.chunk_ends_.push_back(std::min(last, end));
        const float* m = own.m_.data() + c * maps.d_phi;
        out.m_.insert(out.m_.end(), m, m + maps.d_phi);
      }
      first = last;
    }
  }
  return out;
}

std::string FeaturesBlobName(const Model& model, const FeatureMapSet& maps, size_t head) {
  return "features." + std::to_string(maps.length) + "." +
         std::to_string(model.heads.layer_of(head)) + "." +
         std::to_string(model.heads.head_of(head));
}

std::string FeaturesProducer(const RuntimeOptions& options, const FeatureMapSet& maps) {
  return "features/2 sinks=" + std::to_string(options.anchors.n_sink) +
         " as=" + options.phi_features + " maps=" + maps.digest;
}

Status BuildFeatures(const DerivedContext& context, const Model& model, const FeatureMapSet& maps,
                     const FeatureFormat& format, const storage::StoredPrefix& prefix,
                     const SegmentPart& segment, WorkProgress& progress) {
  const std::string producer = FeaturesProducer(context.options, maps);
  const TokenRange tokens{std::max(segment.stored.begin, context.options.anchors.n_sink),
                          segment.stored.end};
  const auto build = [&](size_t head) -> Status {
    PREFIXD_TRY(progress.Check());
    const bool wanted = model.Summarised(model.heads.layer_of(head)) && tokens.begin < tokens.end;
    const auto stored = wanted
                            ? LoadFeatures(context, model, maps, format, segment.id, head, nullptr)
                            : Result<TokenFeatures>(Error{});
    if (wanted && !stored.ok()) {
      if (Unread(stored.error())) return stored.error();
      PREFIXD_ASSIGN(const TokenFeatures features,
                     TokenFeatures::Encode(model, maps, format, prefix, tokens, head, progress));
      PREFIXD_TRY(context.segments.PutBlob(segment.id, FeaturesBlobName(model, maps, head),
                                           producer, features.Serialize()));
    }
    ++progress.done;
    return {};
  };
  return context.pool.ParallelFor(HeadCount(model), build, WorkPriority::kBackground);
}

Result<TokenFeatures> LoadFeatures(const DerivedContext& context, const Model& model,
                                   const FeatureMapSet& maps, const FeatureFormat& format,
                                   const storage::SegmentId& id, size_t head, uint64_t* loaded) {
  const auto blob = context.segments.GetBlob(id, FeaturesBlobName(model, maps, head),
                                             FeaturesProducer(context.options, maps));
  if (!blob.ok() && blob.error().code == Code::kNotFound) {
    return Error{Code::kFailedPrecondition,
                 "the stored features of this prefix are not built yet; wait until it is ready "
                 "(WaitReady) or use estimator moment"};
  }
  if (!blob.ok()) return blob.error();
  if (loaded) *loaded += blob->size();
  return TokenFeatures::Deserialize(format, maps.d_phi, *blob);
}

}  // namespace prefixd
