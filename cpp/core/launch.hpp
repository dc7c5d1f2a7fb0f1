// Launches a kernel, with the opt-in for large shared memory once a device. Used by forward/launch.hpp and
// backward/launch.hpp.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace flashhopper {

// When a kernel may start: after all that is before it on its stream, or as soon as the kernel before it allows
// (allow_next), whose results it then waits for itself (await_previous).
enum class Start { kAfterPrevious, kWithPrevious };

// kernel: a __global__ function; a different one for each instantiation, so the static below is its own.
template <auto kKernel>
cudaError_t launch(int grid, int threads, void** parameters, int smem_bytes, int device, cudaStream_t stream,
                   Start start = Start::kAfterPrevious, int cluster = 1) {
  constexpr int kDefaultSmemBytes = 44 * 1024;       // 48 KiB, less what a kernel may hold beside smem_bytes
  static std::atomic<uint64_t> prepared_devices{0};  // a bit each; devices beyond 63 are prepared at every call
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if (smem_bytes > kDefaultSmemBytes && (prepared_devices.load(std::memory_order_relaxed) & bit) == 0) {
    cudaError_t const error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error != cudaSuccess) return error;
    prepared_devices.fetch_or(bit, std::memory_order_relaxed);
  }
  // The call's own status: cudaGetLastError would also report what an earlier call left behind.
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (start == Start::kWithPrevious) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(kKernel), parameters);
}

}  // namespace flashhopper
