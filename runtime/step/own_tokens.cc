#include "runtime/step/own_tokens.h"

#include <cstring>
#include <limits>
#include <string>

#include "attention/rows/finite_check.h"
#include "base/call_scope.h"
#include "base/capture_errors.h"

namespace prefixd {
namespace {

// Names the first token with a NaN or Inf. bytes: [n][elements].
Status CheckFinite(const char* what, DType dtype, uint32_t layer, uint32_t n, size_t elements,
                   std::span<const std::byte> bytes) {
  if (AllFinite(dtype, bytes.data(), size_t{n} * elements)) return {};
  uint32_t at = 0;
  const size_t token = elements * DTypeBytes(dtype);
  while (at + 1 < n && AllFinite(dtype, bytes.data() + at * token, elements)) ++at;
  return InvalidArgument(std::string(what) + " of layer " + std::to_string(layer) + ", own token " +
                         std::to_string(at) + " of this call, is NaN or Inf; nothing was appended");
}

}  // namespace

Error OwnTokens::Grows(size_t head) const {
  return {Code::kFailedPrecondition,
          "layer " + std::to_string(index_.layer_of(head)) +
              " takes own tokens of another call: append to a head one call after the other"};
}

// ---- chunks -------------------------------------------------------------------------------------

OwnChunkRef::OwnChunkRef(const OwnChunkRef& other) : chunk_(other.chunk_) {
  if (chunk_ != nullptr) chunk_->holders.fetch_add(1, std::memory_order_relaxed);
}

// A chain may be long: each chunk of it gives up the one before it here, and not in its destructor.
OwnChunkRef::~OwnChunkRef() {
  while (chunk_ != nullptr && chunk_->holders.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    OwnChunk* const before = chunk_->before.Leave();
    delete chunk_;
    chunk_ = before;
  }
}

Result<OwnChunkRef> OwnTokens::NewChunk(const RowShape& row, uint32_t begin,
                                        OwnChunkRef before) const {
  const size_t bytes = OwnChunk::kRows * row.bytes();
  PREFIXD_ASSIGN(
      MemoryCharge memory,
      account_.Take(MemoryKind::kOwnTokens, bytes + sizeof(OwnChunk) + sizeof(OwnChunkRows)));
  OwnChunkRef chunk(new OwnChunk);
  chunk->rows = std::make_shared<OwnChunkRows>();
  chunk->rows->bytes = std::make_unique_for_overwrite<std::byte[]>(bytes);
  chunk->rows->memory = std::move(memory);
  chunk->begin = begin;
  chunk->before = std::move(before);
  return chunk;
}

// ---- growing ------------------------------------------------------------------------------------

OwnTokens::OwnTokens(const KvGeometry& geometry, MemoryAccount account)
    : geometry_(geometry),
      index_(geometry.heads()),
      account_(std::move(account)),
      heads_(index_.count()),
      cut_(index_.count()) {}

OwnTokens::Growth& OwnTokens::Growth::operator=(Growth&& other) noexcept {
  if (this == &other) return *this;
  Withdraw();
  of_ = std::exchange(other.of_, nullptr);
  first_ = other.first_;
  forgotten_ = other.forgotten_;
  heads_ = std::move(other.heads_);
  return *this;
}

void OwnTokens::Growth::Withdraw() {
  if (of_ == nullptr) return;
  std::lock_guard lock(of_->mutex_);
  for (size_t h = 0; h < heads_.size(); ++h) of_->heads_[first_ + h].grows = false;
  of_ = nullptr;
}

void OwnTokens::Growth::Commit() {
  if (of_ == nullptr) return;
  {
    std::lock_guard lock(of_->mutex_);
    for (size_t h = 0; h < heads_.size() && !of_->closed_; ++h) {
      Head& grown = heads_[h];
      auto& head = of_->heads_[first_ + h];
      std::swap(head.last, grown.last);  // what goes is freed after the lock
      head.n = grown.n;
    }
  }
  Withdraw();
}

Status OwnTokens::Begin(size_t first, HeadRange heads, uint32_t n, Growth& growth) {
  growth.heads_.resize(heads.n);
  std::lock_guard lock(mutex_);
  for (uint32_t h = 0; h < heads.n; ++h) {
    const Head& head = heads_[first + h];
    if (head.grows) return Grows(first + h);
    if (n > std::numeric_limits<uint32_t>::max() - head.n - OwnChunk::kRows) {
      return InvalidArgument("a session has less than 2^32 own tokens");
    }
    growth.heads_[h] = {head.last, head.n};
  }
  for (uint32_t h = 0; h < heads.n; ++h) heads_[first + h].grows = true;
  growth.first_ = first;
  growth.forgotten_ = forgotten_;
  growth.of_ = this;
  return {};
}

Result<OwnTokens::Growth> OwnTokens::Grow(uint32_t layer, HeadRange heads, uint32_t n,
                                          std::span<const std::byte> k,
                                          std::span<const std::byte> v) {
  const RowShape row = geometry_.row(layer);
  PREFIXD_TRY(CheckFinite("key", row.dtype, layer, n, size_t{heads.n} * row.key_dim, k));
  PREFIXD_TRY(CheckFinite("value", row.dtype, layer, n, size_t{heads.n} * row.value_dim, v));
  Growth growth;
  const Status grown = CaptureErrors([&]() -> Status {
    PREFIXD_TRY(Begin(index_.of(layer, heads.first), heads, n, growth));
    for (uint32_t h = 0; h < heads.n; ++h) {
      PREFIXD_TRY(CheckCall());
      PREFIXD_TRY(Write(row, heads.n, n, k.data() + h * row.key_bytes(),
                        v.data() + h * row.value_bytes(), growth.heads_[h]));
    }
    return {};
  });
  if (!grown.ok()) return grown.error();
  return growth;
}

// Writes n rows behind those of `head`; k and v of one token follow `stride` heads behind the last.
Status OwnTokens::Write(const RowShape& row, uint32_t stride, uint32_t n, const std::byte* k,
                        const std::byte* v, Growth::Head& head) const {
  const size_t bytes = row.bytes();
  for (uint32_t done = 0; done < n;) {
    const uint32_t at = head.n % OwnChunk::kRows;
    const uint32_t m = std::min(n - done, OwnChunk::kRows - at);
    uint32_t free_from = at;
    if (at == 0) {
      PREFIXD_ASSIGN(head.last, NewChunk(row, head.n, std::move(head.last)));
      head.last->rows->taken = m;
    } else if (!head.last->rows->taken.compare_exchange_strong(free_from, at + m)) {
      // The rows behind are a fork's, or were given up. Nobody can see those that were given up
      // when only this session holds the chunk: here and in its list of heads.
      const bool alone = head.last->holders.load(std::memory_order_acquire) == 2 &&
                         head.last->rows.use_count() == 1;
      if (!alone || !head.last->rows->taken.compare_exchange_strong(free_from, at + m)) {
        PREFIXD_ASSIGN(OwnChunkRef copy, NewChunk(row, head.last->begin, head.last->before));
        std::memcpy(copy->rows->bytes.get(), head.last->rows->bytes.get(), at * bytes);
        copy->rows->taken = at + m;
        head.last = std::move(copy);
      }
    }
    std::byte* to = &head.last->rows->bytes[at * bytes];
    for (uint32_t t = done; t < done + m; ++t, to += bytes) {
      std::memcpy(to, k + size_t{t} * stride * row.key_bytes(), row.key_bytes());
      std::memcpy(to + row.key_bytes(), v + size_t{t} * stride * row.value_bytes(),
                  row.value_bytes());
    }
    head.n += m;
    done += m;
  }
  return {};
}

// ---- the rest -----------------------------------------------------------------------------------

OwnRows OwnTokens::rows(size_t head) const {
  std::lock_guard lock(mutex_);
  return {heads_[head].last, heads_[head].n};
}

uint32_t OwnTokens::size() const {
  std::lock_guard lock(mutex_);
  uint32_t most = 0;
  for (const Head& head : heads_) most = std::max(most, head.n);
  return most;
}

Status OwnTokens::Truncate(uint32_t n) {
  std::vector<OwnChunkRef> gone;  // freed after the lock
  std::lock_guard lock(mutex_);
  uint32_t most = 0;
  for (size_t h = 0; h < heads_.size(); ++h) {
    if (heads_[h].grows) return Grows(h);
    most = std::max(most, heads_[h].n);
  }
  if (n > most) {
    return InvalidArgument("the session has " + std::to_string(most) + " own tokens, not " +
                           std::to_string(n) + ": it can be truncated to fewer only");
  }
  gone.reserve(heads_.size());
  NoteTruncation(n);
  for (Head& head : heads_) {
    if (head.n <= n) continue;
    OwnChunkRef last = head.last;
    while (last && last->begin >= n) last = last->before;
    gone.push_back(std::exchange(head.last, std::move(last)));
    head.n = n;
  }
  return {};
}

void OwnTokens::NoteTruncation(uint32_t n) {
  for (const std::weak_ptr<uint32_t>& watch : watches_) {
    if (const LeastTruncated least = watch.lock()) *least = std::min(*least, n);
  }
  stored_.tokens = std::min(stored_.tokens, n);
  if (rows_unknown_) {
    derived_from_ = std::min(derived_from_, n);
  } else if (n <= derived_from_) {
    derived_from_ = kNone;
  }
}

void OwnTokens::Share(const Snapshot& taken) {
  std::lock_guard lock(mutex_);
  for (size_t h = 0; h < heads_.size(); ++h) {
    heads_[h].last = taken.heads[h].last();
    heads_[h].n = taken.heads[h].size();
  }
  derived_from_ = taken.derived_from;
  rows_unknown_ = taken.rows_unknown;
  stored_ = taken.stored;
  forgotten_ = taken.forgotten;
}

// ---- what is stored of them ---------------------------------------------------------------------

uint32_t OwnTokens::Whole() const {
  uint32_t least = kNone;
  for (const Head& head : heads_) least = std::min(least, head.n);
  return least;
}

void OwnTokens::NoteApproximate(bool appends) {
  std::lock_guard lock(mutex_);
  // Later steps find more whole tokens, so that the first one decides.
  if (derived_from_ == kNone) derived_from_ = Whole();
  rows_unknown_ = rows_unknown_ || !appends;
}

size_t OwnTokens::Snapshot::shortest() const {
  const auto fewer = [](const OwnRows& a, const OwnRows& b) { return a.size() < b.size(); };
  return static_cast<size_t>(std::ranges::min_element(heads, fewer) - heads.begin());
}

OwnTokens::Snapshot OwnTokens::Take() const {
  Snapshot taken;
  taken.heads.reserve(heads_.size());
  taken.least_truncated = std::make_shared<uint32_t>(kNone);
  std::lock_guard lock(mutex_);
  std::erase_if(watches_, [](const auto& watch) { return watch.expired(); });
  watches_.push_back(taken.least_truncated);
  for (const Head& head : heads_) taken.heads.emplace_back(head.last, head.n);
  taken.derived_from = derived_from_;
  taken.rows_unknown = rows_unknown_;
  taken.stored = stored_;
  taken.forgotten = forgotten_;
  return taken;
}

void OwnTokens::NoteStored(const Snapshot& taken, Stored stored) {
  std::lock_guard lock(mutex_);
  stored.tokens = std::min(stored.tokens, *taken.least_truncated);
  if (stored.lineage.empty()) stored.lineage = stored_.lineage;
  stored_ = std::move(stored);
}

// Appends copies of these rows of `from` to `to`.
Status OwnTokens::CopyRow(const RowShape& row, const OwnRows& from, TokenRange tokens,
                          Growth::Head& to) const {
  std::vector<RowsView> runs;
  from.Visit(tokens.begin, tokens.end, row, [&](const RowsView& run) {
    runs.push_back(run);
    return true;
  });
  for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
    for (size_t i = 0; i < run->count; ++i) {
      PREFIXD_TRY(Write(row, 1, 1, run->key(i), run->value(i), to));
    }
  }
  return {};
}

Status OwnTokens::CopyFrom(const Snapshot& taken, uint32_t first, const ReadForgotten& read) {
  return CaptureErrors([&]() -> Status {
    std::vector<Head> heads(heads_.size());
    for (size_t h = 0; h < heads.size(); ++h) {
      PREFIXD_TRY(CheckCall());
      Growth::Head copied;
      PREFIXD_TRY(CopyForgotten(h, {first, taken.forgotten}, read, copied));
      const RowShape row = geometry_.row(index_.layer_of(h));
      const OwnRows& from = taken.heads[h];
      PREFIXD_TRY(CopyRow(row, from, {std::max(first, taken.forgotten), from.size()}, copied));
      heads[h].last = std::move(copied.last);
      heads[h].n = copied.n;
    }
    const auto behind = [first](uint32_t token) { return token > first ? token - first : 0; };
    std::lock_guard lock(mutex_);
    heads_.swap(heads);
    derived_from_ = taken.derived_from == kNone ? kNone : behind(taken.derived_from);
    rows_unknown_ = taken.rows_unknown;
    stored_ = taken.stored;
    stored_.tokens = behind(stored_.tokens);
    return {};
  });
}

// ---- the end ------------------------------------------------------------------------------------

void OwnTokens::Close() {
  std::vector<Head> heads(heads_.size());
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (size_t h = 0; h < heads_.size(); ++h) {
    std::swap(heads_[h].last, heads[h].last);
    heads_[h].n = 0;
  }
}

}  // namespace prefixd
