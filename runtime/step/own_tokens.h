// Keeps a session's own tokens: the rows of what was asked and generated behind the stored prefix.
//
// The rows of a KV head lie in chunks, each linked to the one before it. Rows that anyone may read
// never change: a fork shares them, and whoever appends behind the same row second copies the last
// chunk. So a fork, a truncation and a view of the rows cost no more with many tokens than with
// few.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/rows/rows.h"
#include "base/memory_budget.h"
#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd {

// Some rows, and those of all chunks before. Counts its holders.
struct OwnChunk;
class OwnChunkRef {
 public:
  OwnChunkRef() = default;
  explicit OwnChunkRef(OwnChunk* chunk) : chunk_(chunk) {}  // takes over one count
  OwnChunkRef(const OwnChunkRef& other);
  OwnChunkRef(OwnChunkRef&& other) noexcept : chunk_(std::exchange(other.chunk_, nullptr)) {}
  OwnChunkRef& operator=(OwnChunkRef other) noexcept {
    std::swap(chunk_, other.chunk_);
    return *this;
  }
  ~OwnChunkRef();

  OwnChunk* get() const { return chunk_; }
  OwnChunk* operator->() const { return chunk_; }
  explicit operator bool() const { return chunk_ != nullptr; }
  OwnChunk* Leave() { return std::exchange(chunk_, nullptr); }  // hands its count over

 private:
  OwnChunk* chunk_ = nullptr;
};

// The rows of a chunk; chunks of several chains may have the same.
struct OwnChunkRows {
  // Rows that are taken: whoever moves it on writes the rows between, once.
  std::atomic<uint32_t> taken{0};
  MemoryCharge memory;
  std::unique_ptr<std::byte[]> bytes;  // [kRows][row bytes]
};

struct OwnChunk {
  static constexpr uint32_t kRows = 64;

  std::atomic<uint32_t> holders{1};
  uint32_t begin = 0;  // the first row's token: a multiple of kRows
  OwnChunkRef before;
  std::shared_ptr<OwnChunkRows> rows;
};

// The first own rows of one KV head, as they were at one moment, of which the very first may be
// forgotten. Keeps them. A plain value.
class OwnRows {
 public:
  OwnRows() = default;
  OwnRows(OwnChunkRef last, uint32_t n) : last_(std::move(last)), n_(n) {}
  uint32_t size() const { return n_; }
  const OwnChunkRef& last() const { return last_; }
  // Calls visit(const RowsView&) for the rows of tokens [begin, end) of size(), the last run first,
  // until it returns false; returns its last answer.
  template <typename Visitor>
  bool Visit(uint32_t begin, uint32_t end, const RowShape& shape, const Visitor& visit) const {
    const OwnChunk* chunk = last_.get();
    for (; chunk != nullptr && begin < end; chunk = chunk->before.get()) {
      const uint32_t first = std::max(begin, chunk->begin);
      if (first >= end) continue;
      const size_t stride = shape.bytes();
      const RowsView rows{&chunk->rows->bytes[(first - chunk->begin) * stride], end - first, stride,
                          shape};
      if (!visit(rows)) return false;
      end = first;
    }
    return true;
  }

 private:
  OwnChunkRef last_;
  uint32_t n_ = 0;
};

// Thread-safety: all methods may be called concurrently; a head takes rows of one Growth at a time.
class OwnTokens {
 public:
  OwnTokens(const KvGeometry& geometry, MemoryAccount account);

  // Rows that are written and not there yet; destroyed without Commit they never are.
  class Growth {
   public:
    Growth() = default;
    Growth(Growth&& other) noexcept { *this = std::move(other); }
    Growth& operator=(Growth&& other) noexcept;
    ~Growth() { Withdraw(); }

    // The rows of the h-th head, with the new ones, from forgotten() on.
    OwnRows rows(size_t h) const { return {heads_[h].last, heads_[h].n}; }
    uint32_t forgotten() const { return forgotten_; }
    void Commit();

   private:
    friend class OwnTokens;
    void Withdraw();
    struct Head {
      OwnChunkRef last;
      uint32_t n = 0;
    };
    OwnTokens* of_ = nullptr;
    size_t first_ = 0;        // head
    uint32_t forgotten_ = 0;  // when it began
    std::vector<Head> heads_;
  };
  // Adds n rows of each of `heads` (resolved) of a layer: k [n][heads.n][key_dim] and v likewise,
  // of the geometry's dtype. Nothing has changed when it is refused: kInvalidArgument for NaN and
  // Inf, kResourceExhausted without memory, kFailedPrecondition while one of the heads grows
  // already. The growth must end before this object does.
  Result<Growth> Grow(uint32_t layer, HeadRange heads, uint32_t n, std::span<const std::byte> k,
                      std::span<const std::byte> v);

  OwnRows rows(size_t head) const;
  uint32_t size() const;  // of the head with the most

  // Notes that a step which does not read everything begins. Rows that are not whole in all heads
  // by then may have been computed behind it. appends: it brings its token's row, and what it
  // computes goes into that one and those behind it; otherwise its rows come by an Append that
  // nothing tells apart from others.
  void NoteApproximate(bool appends);

  // What a Persist has stored of the first own tokens.
  struct Stored {
    std::string prefix;   // "": nothing
    uint32_t tokens = 0;  // own tokens of it
    std::string lineage;  // of the derived ones, once there were some
  };
  // The least number of tokens that they were truncated to since a moment; kNone: to none. mutex_
  // guards it.
  using LeastTruncated = std::shared_ptr<uint32_t>;
  // All own tokens as they are at one moment.
  struct Snapshot {
    std::vector<OwnRows> heads;
    uint32_t derived_from = 0;  // the first token that may be derived; kNone: none
    bool rows_unknown = false;
    Stored stored;
    LeastTruncated least_truncated;  // since that moment; null of a snapshot that nobody took
    uint32_t forgotten = 0;          // tokens that lack their rows

    // The head with the fewest rows.
    size_t shortest() const;
  };
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  Snapshot Take() const;
  // Notes what was stored of `taken`, without the tokens that were truncated since.
  void NoteStored(const Snapshot& taken, Stored stored);
  // Keeps the first n rows of each head. kInvalidArgument when no head has so many,
  // kFailedPrecondition while a head grows.
  Status Truncate(uint32_t n);
  // Takes over what `taken` has. It has none yet.
  void Share(const Snapshot& taken);
  // Reads the rows of forgotten tokens of a head: out [tokens.size()][row bytes].
  using ReadForgotten =
      std::function<Status(size_t head, TokenRange tokens, std::span<std::byte> out)>;
  // Takes over what `taken` has from its token `first` on, as copies: they keep no memory of those
  // before. It has none yet.
  Status CopyFrom(const Snapshot& taken, uint32_t first, const ReadForgotten& read);

  // Whether a head has more than `n` rows in memory, and all others, too.
  bool Exceeds(size_t head, uint32_t n) const;
  // From now on the session attends over the first n tokens elsewhere, and Cut may free their rows.
  // n: a multiple of OwnChunk::kRows that every head has. False, and nothing has changed: some of
  // these tokens were truncated since the snapshot that `since` is of, or it is closed.
  bool Forget(uint32_t n, const LeastTruncated& since);
  // Frees what was forgotten and nobody shares, but not of heads that grow now: false, and it is to
  // be called again.
  Result<bool> Cut();
  // A copy of a head's rows: those of forgotten tokens [from, rows of `behind` that are not
  // forgotten) as `read` has them, then those of `behind`. from: a multiple of OwnChunk::kRows.
  Result<OwnRows> Restored(size_t head, uint32_t from, uint32_t forgotten, const OwnRows& behind,
                           const ReadForgotten& read) const;
  // Truncates as Truncate does, into the forgotten tokens: all heads have n from then on, and
  // `rows` [heads] has those behind `forgotten`.
  Status Truncate(uint32_t n, uint32_t forgotten, std::vector<OwnRows> rows);
  // Forgets all for ever: a growth that ends later adds nothing.
  void Close();

 private:
  struct Head {
    OwnChunkRef last;
    uint32_t n = 0;
    bool grows = false;
  };
  // What a truncation to n changes beside the rows; mutex_ is held.
  void NoteTruncation(uint32_t n);
  Error Grows(size_t head) const;
  Status CopyForgotten(size_t head, TokenRange tokens, const ReadForgotten& read,
                       Growth::Head& to) const;
  Status CopyRow(const RowShape& row, const OwnRows& from, TokenRange tokens,
                 Growth::Head& to) const;
  Status Begin(size_t first, HeadRange heads, uint32_t n, Growth& growth);
  Status Write(const RowShape& row, uint32_t stride, uint32_t n, const std::byte* k,
               const std::byte* v, Growth::Head& head) const;
  Result<OwnChunkRef> NewChunk(const RowShape& row, uint32_t begin, OwnChunkRef before) const;

  const KvGeometry& geometry_;  // the session's
  const HeadIndex index_;
  const MemoryAccount account_;
  uint32_t Whole() const;  // tokens that every head has; mutex_ is held

  mutable std::mutex mutex_;
  bool closed_ = false;
  std::vector<Head> heads_;        // by index_
  uint32_t derived_from_ = kNone;  // the first token that may be derived
  bool rows_unknown_ = false;      // a step that did not append was approximate
  Stored stored_;
  // Of the snapshots that somebody has.
  mutable std::vector<std::weak_ptr<uint32_t>> watches_;
  uint32_t forgotten_ = 0;     // tokens
  std::vector<uint32_t> cut_;  // [heads] tokens whose rows are gone
};

}  // namespace prefixd
