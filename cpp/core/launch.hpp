// Launches a kernel, with the opt-in for large shared memory once a device. Used by forward/launch.hpp and
// backward/launch.hpp.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace flashhopper {

// kernel: a __global__ function; a different one for each instantiation, so the static below is its own.
template <auto kKernel>
cudaError_t launch(int grid, int threads, void** parameters, int smem_bytes, int device, cudaStream_t stream) {
  constexpr int kDefaultSmemBytes = 44 * 1024;       // 48 KiB, less what a kernel may hold beside smem_bytes
  static std::atomic<uint64_t> prepared_devices{0};  // a bit each; devices beyond 63 are prepared at every call
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if (smem_bytes > kDefaultSmemBytes && (prepared_devices.load(std::memory_order_relaxed) & bit) == 0) {
    cudaError_t const error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error != cudaSuccess) return error;
    prepared_devices.fetch_or(bit, std::memory_order_relaxed);
  }
  // The call's own status: cudaGetLastError would also report what an earlier call left behind.
  return cudaLaunchKernel(reinterpret_cast<void const*>(kKernel), dim3(grid), dim3(threads), parameters, smem_bytes,
                          stream);
}

}  // namespace flashhopper
