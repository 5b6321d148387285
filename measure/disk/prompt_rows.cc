#include "measure/disk/prompt_rows.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <system_error>

#include "storage/segment/segment_format.h"

namespace prefixd::bench {

std::vector<std::vector<std::byte>> InterleavedRows(const Prompt& prompt) {
  const KvGeometry& g = prompt.geometry;
  const RowShape row = g.row(0);
  const size_t n = prompt.tokens.size();
  std::vector<std::vector<std::byte>> rows(g.n_layers);
  for (uint32_t layer = 0; layer < g.n_layers; ++layer) {
    rows[layer].resize(n * g.n_kv_heads * row.bytes());
    std::byte* out = rows[layer].data();
    for (size_t h = 0; h < g.n_kv_heads; ++h) {
      for (size_t t = 0; t < n; ++t, out += row.bytes()) {
        const size_t at = t * g.n_kv_heads + h;
        std::memcpy(out, prompt.k[layer].data() + at * row.key_bytes(), row.key_bytes());
        std::memcpy(out + row.key_bytes(), prompt.v[layer].data() + at * row.value_bytes(),
                    row.value_bytes());
      }
    }
  }
  return rows;
}

std::vector<std::vector<uint32_t>> SparseRows(const Prompt& prompt, uint64_t seed, size_t* count) {
  const KvGeometry& g = prompt.geometry;
  const auto per_page =
      static_cast<uint32_t>(std::max<size_t>(1, storage::kPageBytes / g.row(0).bytes()));
  const auto pages = static_cast<uint32_t>(prompt.tokens.size() / per_page);
  constexpr uint32_t kStride = 6;  // leaves at least three pages between
  std::mt19937_64 rng(seed);
  *count = 0;
  std::vector<std::vector<uint32_t>> ids(size_t{g.n_layers} * g.n_kv_heads);
  for (auto& of_head : ids) {
    for (uint32_t p = 0; p + kStride <= pages; p += kStride) {
      of_head.push_back((p + static_cast<uint32_t>(rng() % 3)) * per_page +
                        static_cast<uint32_t>(rng() % per_page));
    }
    *count += of_head.size();
  }
  return ids;
}

storage::ReclusterOptions AnyOrder(const Prompt& prompt) {
  storage::ReclusterOptions recluster;
  recluster.chunk_tokens = 16384;  // like a daemon
  const size_t row_bytes = prompt.geometry.row(0).bytes();
  recluster.order = [row_bytes](uint32_t layer, uint32_t head, uint32_t chunk,
                                std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
    std::vector<uint32_t> order(rows.size() / row_bytes);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 rng((uint64_t{layer} << 40) + (uint64_t{head} << 20) + chunk);
    std::shuffle(order.begin(), order.end(), rng);
    return order;
  };
  return recluster;
}

std::filesystem::path LargestFile(const std::filesystem::path& dir) {
  std::filesystem::path largest;
  uintmax_t most = 0;
  std::error_code ec;
  for (const auto& entry : std::filesystem::directory_iterator(dir, ec)) {
    const uintmax_t bytes = entry.is_regular_file(ec) ? entry.file_size(ec) : 0;
    if (!ec && bytes > most) most = bytes, largest = entry.path();
  }
  return largest;
}

Result<double> ReadOnce(const Prompt& prompt) {
  uint64_t sum = 0;
  const auto begun = std::chrono::steady_clock::now();
  for (const auto* part : {&prompt.k, &prompt.v}) {
    for (const storage::AlignedBuffer& bytes : *part) {
      for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
        uint64_t word;
        std::memcpy(&word, bytes.data() + at, sizeof(word));
        sum += word;
      }
    }
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  if (sum == 0) return Error{Code::kInternal, "the synthetic prompt is all zero"};
  return seconds;
}

}  // namespace prefixd::bench
