// How tests put work on a stream, on a device also from a graph, on an emulated one just so; and
// get its results.
#pragma once

#include <functional>
#include <vector>

#include "gpu/device/device_buffer.h"
#include "prefixd/result.h"

namespace prefixd::gpu::testing {

// launcher(stream, enqueue) calls enqueue() once or more, and may wait for the stream.
using Launcher = std::function<Status(Stream, const std::function<Status()>&)>;

inline Status LaunchOnce(Stream, const std::function<Status()>& enqueue) { return enqueue(); }

// Fills `to` from device memory; ordered on `stream`.
template <typename T>
Status Fetch(std::vector<T>& to, const T* from, Stream stream) {
  return CopyToHost(to.data(), reinterpret_cast<const std::byte*>(from), to.size() * sizeof(T),
                    stream);
}

}  // namespace prefixd::gpu::testing
