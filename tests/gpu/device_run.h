// What tests on a real device share: skipping where there is none, and running from a graph.
#pragma once

#include <cuda_runtime_api.h>

#include "gpu/device/cuda_status.h"
#include "gpu/device/device_buffer.h"
#include "tests/support/test.h"

#define SKIP_WITHOUT_DEVICE()                                                     \
  if (const auto probed = prefixd::gpu::ProbeDevice(); !probed.ok()) {            \
    GTEST_SKIP() << "skipped: no CUDA device (" << probed.error().message << ")"; \
  }

namespace prefixd::gpu::testing {

// Captures launch() into a graph and launches that twice on `stream`.
template <typename Launch>
Status ReplayTwice(Stream stream, Launch launch) {
  using internal::CudaStatus;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  PREFIXD_TRY(CudaStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                         "beginning a capture"));
  const Status launched = launch();
  PREFIXD_TRY(CudaStatus(cudaStreamEndCapture(stream, &graph), "ending a capture"));
  PREFIXD_TRY(launched);
  PREFIXD_TRY(CudaStatus(cudaGraphInstantiate(&exec, graph, 0), "instantiating"));
  for (int i = 0; i < 2; ++i) {
    PREFIXD_TRY(CudaStatus(cudaGraphLaunch(exec, stream), "launching a graph"));
  }
  PREFIXD_TRY(Synchronize(stream));
  PREFIXD_TRY(CudaStatus(cudaGraphExecDestroy(exec), "destroying a graph"));
  return CudaStatus(cudaGraphDestroy(graph), "destroying a graph");
}

}  // namespace prefixd::gpu::testing
