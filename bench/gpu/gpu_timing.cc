#include "bench/gpu/gpu_timing.h"

#include <string>

namespace prefixd::bench {
namespace {

// Owns events and a graph until the end of the scope.
struct Timer {
  cudaEvent_t begin = nullptr, end = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;

  ~Timer() {
    if (exec) (void)cudaGraphExecDestroy(exec);
    if (graph) (void)cudaGraphDestroy(graph);
    if (begin) (void)cudaEventDestroy(begin);
    if (end) (void)cudaEventDestroy(end);
  }
};

}  // namespace

Result<Spread> TimeGraph(gpu::Stream stream, int rounds, double launches,
                         const std::function<Status()>& enqueue) {
  Timer timer;
  PREFIXD_TRY(Cuda(cudaEventCreate(&timer.begin), "making an event"));
  PREFIXD_TRY(Cuda(cudaEventCreate(&timer.end), "making an event"));
  PREFIXD_TRY(Cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                   "beginning a capture"));
  const Status enqueued = enqueue();
  PREFIXD_TRY(Cuda(cudaStreamEndCapture(stream, &timer.graph), "ending a capture"));
  PREFIXD_TRY(enqueued);
  PREFIXD_TRY(Cuda(cudaGraphInstantiate(&timer.exec, timer.graph, 0), "instantiating a graph"));
  std::vector<double> seconds;
  for (int i = -2; i < rounds; ++i) {
    PREFIXD_TRY(Cuda(cudaEventRecord(timer.begin, stream), "recording"));
    PREFIXD_TRY(Cuda(cudaGraphLaunch(timer.exec, stream), "launching a graph"));
    PREFIXD_TRY(Cuda(cudaEventRecord(timer.end, stream), "recording"));
    PREFIXD_TRY(Cuda(cudaEventSynchronize(timer.end), "running a graph"));
    float ms = 0;
    PREFIXD_TRY(Cuda(cudaEventElapsedTime(&ms, timer.begin, timer.end), "timing"));
    if (i >= 0) seconds.push_back(ms * 1e-3 / launches);
  }
  return Summarise(std::move(seconds));
}

Result<CopySpeeds> MeasureCopies(gpu::Stream stream, int rounds) {
  constexpr size_t kBytes = 256u << 20;
  PREFIXD_ASSIGN(gpu::PinnedBuffer host, gpu::PinnedBuffer::Allocate(kBytes));
  PREFIXD_ASSIGN(gpu::DeviceBuffer a, gpu::DeviceBuffer::Allocate(kBytes));
  PREFIXD_ASSIGN(gpu::DeviceBuffer b, gpu::DeviceBuffer::Allocate(kBytes));
  const auto speed = [&](double bytes, const std::function<Status()>& copy) -> Result<Spread> {
    PREFIXD_ASSIGN(const Spread s, TimeGraph(stream, rounds, 1, copy));
    return Spread{bytes / s.median, bytes / s.high, bytes / s.low};
  };
  CopySpeeds out;
  PREFIXD_ASSIGN(out.link, speed(kBytes, [&] {
                   return gpu::CopyToDevice(a.data(), host.data(), kBytes, stream);
                 }));
  PREFIXD_ASSIGN(
      out.device, speed(2.0 * kBytes, [&] {
        return Cuda(cudaMemcpyAsync(b.data(), a.data(), kBytes, cudaMemcpyDeviceToDevice, stream),
                    "copying within the device");
      }));
  return out;
}

}  // namespace prefixd::bench
