// Records what a process did to its store before it dies: events in shared memory, which survive
// kill -9 of the writer and which its parent reads. An event counts from the moment it is complete.
//
// Thread-safety: one writing process (any thread of it), read when it is gone; another process may
// call Cut.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace prefixd::storage::reliability {

enum class EventKind : uint32_t {
  kPutBegin,        // prompt, tenant, tokens...
  kPutDone,         // prompt, segment id (4 words): acknowledged
  kPutDropped,      // prompt: failed or aborted before its commit
  kPutFailed,       // prompt: the commit failed; whether it is there is unknown
  kRemoveBegin,     // prompt
  kRemoveDone,      // prompt: acknowledged
  kRemoveRefused,   // prompt: others continue it
  kRemoveFailed,    // prompt: unknown
  kBlobBegin,       // prompt, name, version
  kBlobDone,        // prompt, name, version: acknowledged
  kBlobFailed,      // prompt, name, version: unknown
  kCompactBegin,    // n, (name, version) n times, prompts...: two segments are about to become one,
                    // with these blobs
  kCompactRefused,  // prompts...: they stay two
  kCompactDone,  // segment id (4 words), then as kCompactBegin: acknowledged; the blobs of both are
                 // gone, these are there
  kCompacted,    // segment id (4 words), prompts...: so it was found; its blobs may be there
  kCompressBegin,    // prompt: of its segment's rows some are about to go
  kCompressRefused,  // prompt: all stay
  kCompressDone,     // prompt: acknowledged
  kLifetimeBegin,    // prompt, pinned, expires (2 words)
  kLifetimeDone,     // the same: acknowledged
  kRoomBegin,        // any prefix that is not pinned may be evicted from now on ...
  kEvicted,          // prompt
  kRoomEnd,          // ... until now
  kSpoilBegin,       // prompt, segment id (4 words), file offset, right byte: about to be damaged
  kSpoilEnd,         // prompt: repaired and verified
  kModel,            // the model is acknowledged
  kSeen,       // prompt, name (4 words), segment (4 words), pinned, expires (2), compressed: by
               // a check
  kNotSeen,    // prompt
  kBlobSeen,   // prompt, name, version (0: none)
  kCount,      // number, name...: a figure for the report
  kPoint,      // name...: a crash point was met
  kViolation,  // text...
};

struct Event {
  EventKind kind;
  std::vector<uint32_t> words;
  bool late = false;  // appended after Journal::Cut

  std::string Text(size_t from = 0) const;  // the words from `from` on, as TextEvent packed them
  // 64 bits in two words.
  int64_t Wide(size_t at) const {
    return static_cast<int64_t>(uint64_t{words[at]} | uint64_t{words[at + 1]} << 32);
  }
  void AddWide(int64_t value) {
    words.push_back(static_cast<uint32_t>(static_cast<uint64_t>(value)));
    words.push_back(static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32));
  }
};

class Journal {
 public:
  Journal();
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // A full journal ends the process: a test that writes so much is broken.
  void Append(const Event& event);
  void AppendText(EventKind kind, std::string_view text, std::vector<uint32_t> words = {});
  void Violation(std::string_view text) {
    AppendText(EventKind::kViolation, context_ + std::string(text));
  }
  void Count(uint32_t n, std::string_view name) { AppendText(EventKind::kCount, name, {n}); }

  // Sets the text before every violation from now on, in this process and those forked later.
  void SetContext(std::string context) { context_ = std::move(context); }

  // Marks the power cut: events that the writing process still appends are late.
  void Cut();

  // Returns everything appended since the last Take.
  std::vector<Event> Take();

 private:
  struct Shared;
  std::mutex mutex_;
  Shared* shared_;
  std::string context_;
};

}  // namespace prefixd::storage::reliability
