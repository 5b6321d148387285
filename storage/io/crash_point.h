// Names moments at which a test may let the process die. In the product no hook is ever set, and a
// point costs one relaxed load. The name "what.where" alone identifies a point; tests find points
// by running (tests/reliability/harness/kill_harness.cc).
//
// Thread-safety: the hook is set before stores are opened and may be called from any thread.
#pragma once

#include <atomic>

namespace prefixd::storage {

using CrashPointHook = void (*)(const char* name);
inline std::atomic<CrashPointHook> crash_point_hook{nullptr};  // for tests only

inline void CrashPoint(const char* name) {
  if (const CrashPointHook hook = crash_point_hook.load(std::memory_order_relaxed)) hook(name);
}

}  // namespace prefixd::storage
