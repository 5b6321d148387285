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

// Fills n elements of device memory with what no kernel writes, so that what is never written shows
// as that and is nothing uninitialised; on return it is done.
template <typename T>
Status Poison(T* at, size_t n, Stream stream) {
  const std::vector<std::byte> bytes(n * sizeof(T), std::byte{0xff});
  PREFIXD_TRY(CopyToDevice(reinterpret_cast<std::byte*>(at), bytes.data(), bytes.size(), stream));
  return Synchronize(stream);
}

// Fills `to` from device memory; ordered on `stream`.
template <typename T>
Status Fetch(std::vector<T>& to, const T* from, Stream stream) {
  return CopyToHost(to.data(), reinterpret_cast<const std::byte*>(from), to.size() * sizeof(T),
                    stream);
}

}  // namespace prefixd::gpu::testing
