// Keeps phi features of single tokens beside the segment, so that a step need not recompute phi_k
// for the tokens that it retrieves (attention/estimators/stored_features.h). Each (maps, layer, KV
// head) has one blob, "features.<length>.<layer>.<kv head>"; codes are relative to m of chunks of
// 4096 tokens.
//
// Where the store keeps features, the phi caches are built from them: a step subtracts the same
// rounded values, so a retrieved token leaves exactly what it added.
//
// Thread-safety: free functions and const methods may be called concurrently.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/estimators/stored_features.h"
#include "runtime/summaries/summaries.h"

namespace prefixd {

// name: "none", "u8", "u16" (linear), "log8" or "log16".
Result<std::optional<FeatureFormat>> FeatureFormatFromName(std::string_view name);

// Holds the codes of one head's tokens.
class TokenFeatures {
 public:
  // Encodes a segment's own tokens from its rows; the segment is the end of `prefix`.
  static Result<TokenFeatures> Encode(const Model& model, const FeatureMapSet& maps,
                                      const FeatureFormat& format,
                                      const storage::StoredPrefix& prefix, TokenRange tokens,
                                      size_t head, const WorkProgress& progress);
  std::vector<std::byte> Serialize() const;
  // kCorrupt when malformed, or when format or d_phi differ.
  static Result<TokenFeatures> Deserialize(const FeatureFormat& format, uint32_t d_phi,
                                           std::span<const std::byte> bytes);
  // Loads the features of a chain's mid region. kFailedPrecondition when some are not built yet.
  //   loaded: counts the bytes read, unless null
  static Result<TokenFeatures> OfMid(const DerivedContext& context, const Model& model,
                                     const FeatureMapSet& maps, const FeatureFormat& format,
                                     const std::vector<SegmentPart>& parts, TokenRange mid,
                                     size_t head, uint64_t* loaded);

  TokenRange tokens() const { return tokens_; }
  // Returns log phi of a run of tokens: [run.size()][d_phi], -inf where the code stands for zero.
  std::vector<float> LogPhi(TokenRange run) const;
  // Returns the tokens of the run, relative to its begin, that have a chunk of their own: those
  // whose features may outweigh all others'.
  std::vector<uint32_t> Alone(TokenRange run) const;
  // Gathers the codes of tokens `ids`; the result borrows from this object, `codes` and `chunks`.
  StoredFeatures Gather(std::span<const uint32_t> ids, std::vector<std::byte>& codes,
                        std::vector<uint32_t>& chunks) const;

 private:
  TokenFeatures(const FeatureFormat& format, uint32_t d_phi, TokenRange tokens)
      : format_(format), d_phi_(d_phi), tokens_(tokens) {}
  // Appends a chunk's codes and m. log_phi: [chunk.size()][d_phi]
  void EncodeChunk(TokenRange chunk, std::span<const float> log_phi);
  const std::byte* code(uint32_t token) const {
    return codes_.data() + (token - tokens_.begin) * format_.RowBytes(d_phi_);
  }

  FeatureFormat format_;
  uint32_t d_phi_;
  TokenRange tokens_;
  std::vector<uint32_t> chunk_ends_;  // ascending
  std::vector<float> m_;              // [chunks][d_phi]
  std::vector<std::byte> codes_;      // [tokens][RowBytes]
};

std::string FeaturesBlobName(const Model& model, const FeatureMapSet& maps, size_t head);
std::string FeaturesProducer(const RuntimeOptions& options, const FeatureMapSet& maps);
// Makes the missing features of all heads. Counts heads in `progress`.
Status BuildFeatures(const DerivedContext& context, const Model& model, const FeatureMapSet& maps,
                     const FeatureFormat& format, const storage::StoredPrefix& prefix,
                     const SegmentPart& segment, WorkProgress& progress);
// Loads the features of one segment's own tokens. kFailedPrecondition when they are not built yet.
Result<TokenFeatures> LoadFeatures(const DerivedContext& context, const Model& model,
                                   const FeatureMapSet& maps, const FeatureFormat& format,
                                   const storage::SegmentId& id, size_t head, uint64_t* loaded);

}  // namespace prefixd
