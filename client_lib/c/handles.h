// Defines the handles of the C API, reads options structs of any age, and turns errors and
// exceptions into codes.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/opened_here.h"
#include "prefixd/client.h"
#include "prefixd/prefixd.h"
#include "prefixd/restore.h"

struct pfx_store {
  std::shared_ptr<prefixd::Store> client;
  prefixd::OpenedHere opened = {};
};
struct pfx_put {
  std::shared_ptr<prefixd::Store> client;
  std::unique_ptr<prefixd::PutStream> put;
  prefixd::OpenedHere opened = {};
};
struct pfx_session {
  std::shared_ptr<prefixd::Store> client;
  std::shared_ptr<prefixd::Session> session;
  prefixd::OpenedHere opened = {};
};
struct pfx_restore {
  std::shared_ptr<prefixd::Store> client;
  std::unique_ptr<prefixd::Restore> restore;
  prefixd::OpenedHere opened = {};
};
struct pfx_pending_match {
  std::unique_ptr<prefixd::PendingMatch> match;
};

namespace prefixd::capi {

// Remembers the message for the calling thread.
pfx_code Fail(const Error& error);

// Runs `body` and turns its error or exception into a code; no exception escapes to C.
template <typename F>
pfx_code Guard(F&& body) {
  try {
    const Status status = body();
    return status.ok() ? PFX_OK : Fail(status.error());
  } catch (const std::bad_alloc&) {
    return Fail({Code::kResourceExhausted, "out of memory"});
  } catch (const std::exception& e) {
    return Fail({Code::kInternal, e.what()});
  } catch (...) {
    return Fail({Code::kInternal, "an exception of unknown kind"});
  }
}

// Frees a handle, which may be null. A child of fork() leaves its copy as it is: the handle's
// threads and what it would say to the daemon are its parent's.
template <typename Handle>
void End(Handle* handle) {
  if (handle != nullptr && handle->opened.holds()) delete handle;
}

inline Error Null(const char* what) { return InvalidArgument(std::string(what) + " is NULL"); }
inline std::string_view Text(const char* text) { return text ? text : ""; }

inline std::span<const std::byte> Bytes(const void* data, size_t bytes) {
  return {static_cast<const std::byte*>(data), bytes};
}
inline std::span<std::byte> Bytes(void* data, size_t bytes) {
  return {static_cast<std::byte*>(data), bytes};
}

// Refuses a NULL array whose count is above 0.
inline Status CheckPointers(std::initializer_list<std::pair<const void*, size_t>> arrays) {
  for (const auto& [data, count] : arrays) {
    if (data == nullptr && count > 0) return InvalidArgument("an array of this call is NULL");
  }
  return {};
}

// Reads a caller's struct of any size up to this library's; members that the caller's struct lacks
// are zero.
template <typename T>
Result<T> ReadOptions(const T* given, const char* name) {
  if (given == nullptr) return Null(name);
  const size_t size = given->struct_size;
  if (size < sizeof(size_t) || size > sizeof(T)) {
    return InvalidArgument(std::string(name) + ".struct_size is " + std::to_string(size) +
                           "; initialise the struct with its _INIT macro" +
                           (size > sizeof(T) ? " (or the caller was built against a newer "
                                               "prefixd.h than this library)"
                                             : ""));
  }
  T options{};
  std::memcpy(&options, given, size);
  return options;
}

// Fills a caller's struct, up to the size that it has.
template <typename T>
Status WriteResult(T filled, T* out, const char* name) {
  PREFIXD_ASSIGN(const T given, ReadOptions(out, name));
  filled.struct_size = given.struct_size;
  std::memcpy(out, &filled, given.struct_size);
  return {};
}

inline pfx_estimate EstimateOf(const ReuseEstimate& e) {
  static_assert(int(EstimateSource::kLearnt) == PFX_SOURCE_LEARNT &&
                int(ReuseAdvice::kRecompute) == PFX_ADVICE_RECOMPUTE);
  return {e.tokens,
          e.memory_bytes,
          e.disk_bytes,
          e.restore.seconds,
          e.retrieve.seconds,
          e.recompute.seconds,
          e.prefill_tokens_per_second,
          static_cast<pfx_source>(e.restore.source),
          static_cast<pfx_source>(e.retrieve.source),
          static_cast<pfx_source>(e.recompute.source),
          static_cast<pfx_advice>(e.advice)};
}

template <size_t n>
void CopyText(std::string_view text, char (&out)[n]) {
  const size_t length = std::min(text.size(), n - 1);
  std::memcpy(out, text.data(), length);
  out[length] = '\0';
}

// Returns a copy that the caller frees with pfx_free; none when `out` is NULL.
Status ReturnText(const std::string& text, char** out);

ProgressFn Progress(pfx_progress progress, void* user);

}  // namespace prefixd::capi
