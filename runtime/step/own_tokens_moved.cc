// What becomes of own rows once the session attends over their tokens elsewhere.
#include <algorithm>
#include <utility>

#include "base/call_scope.h"
#include "base/capture_errors.h"
#include "runtime/step/own_tokens.h"

namespace prefixd {

bool OwnTokens::Exceeds(size_t head, uint32_t n) const {
  std::lock_guard lock(mutex_);
  // Whether the others have as many is asked only when this head does.
  return head < heads_.size() && heads_[head].n > forgotten_ + uint64_t{n} &&
         Whole() > forgotten_ + uint64_t{n};
}

bool OwnTokens::Forget(uint32_t n, const LeastTruncated& since) {
  std::lock_guard lock(mutex_);
  if (closed_ || *since < n) return false;
  forgotten_ = n;
  return true;
}

// The chunks that stay get new links, the first of them to nothing: forks and steps in flight may
// hold the old ones.
Result<bool> OwnTokens::Cut() {
  bool all = true;
  const Status cut = CaptureErrors([&]() -> Status {
    for (size_t h = 0; h < heads_.size(); ++h) {
      OwnChunkRef last;
      uint32_t from = 0;
      {
        std::lock_guard lock(mutex_);
        from = forgotten_;
        if (cut_[h] >= from) continue;
        all = all && !heads_[h].grows;
        if (heads_[h].grows) continue;
        last = heads_[h].last;
      }
      std::vector<const OwnChunk*> kept;  // the last one first
      for (const OwnChunk* c = last.get(); c && c->begin >= from; c = c->before.get()) {
        kept.push_back(c);
      }
      OwnChunkRef made;  // then what is freed after the lock
      for (auto chunk = kept.rbegin(); chunk != kept.rend(); ++chunk) {
        OwnChunkRef link(new OwnChunk);
        link->begin = (*chunk)->begin;
        link->rows = (*chunk)->rows;
        link->before = std::move(made);
        made = std::move(link);
      }
      std::lock_guard lock(mutex_);
      if (heads_[h].grows || heads_[h].last.get() != last.get()) {
        all = false;
        continue;
      }
      std::swap(heads_[h].last, made);
      cut_[h] = from;
    }
    return {};
  });
  if (!cut.ok()) return cut.error();
  return all;
}

Status OwnTokens::CopyForgotten(size_t head, TokenRange tokens, const ReadForgotten& read,
                                Growth::Head& to) const {
  constexpr uint32_t kAtOnce = 1024;
  const RowShape row = geometry_.row(index_.layer_of(head));
  std::vector<std::byte> rows;
  for (uint32_t at = tokens.begin; at < tokens.end;) {
    PREFIXD_TRY(CheckCall());
    const uint32_t end = std::min(at + kAtOnce, tokens.end);
    rows.resize((end - at) * row.bytes());
    PREFIXD_TRY(read(head, {at, end}, rows));
    for (size_t i = 0; i < rows.size(); i += row.bytes()) {
      PREFIXD_TRY(Write(row, 1, 1, &rows[i], &rows[i] + row.key_bytes(), to));
    }
    at = end;
  }
  return {};
}

Result<OwnRows> OwnTokens::Restored(size_t head, uint32_t from, uint32_t forgotten,
                                    const OwnRows& behind, const ReadForgotten& read) const {
  Growth::Head copied;
  copied.n = from;
  const Status done = CaptureErrors([&]() -> Status {
    PREFIXD_TRY(CopyForgotten(head, {from, forgotten}, read, copied));
    return CopyRow(geometry_.row(index_.layer_of(head)), behind, {forgotten, behind.size()},
                   copied);
  });
  if (!done.ok()) return done.error();
  return OwnRows(std::move(copied.last), copied.n);
}

Status OwnTokens::Truncate(uint32_t n, uint32_t forgotten, std::vector<OwnRows> rows) {
  std::vector<Head> gone(heads_.size());  // freed after the lock
  std::lock_guard lock(mutex_);
  for (size_t h = 0; h < heads_.size(); ++h) {
    if (heads_[h].grows) return Grows(h);
  }
  NoteTruncation(n);
  for (size_t h = 0; h < heads_.size(); ++h) {
    gone[h].last = std::exchange(heads_[h].last, rows[h].last());
    heads_[h].n = n;
    cut_[h] = forgotten;
  }
  forgotten_ = forgotten;
  return {};
}

}  // namespace prefixd
