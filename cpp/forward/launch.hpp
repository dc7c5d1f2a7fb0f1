// Launches one instance of the forward kernel: shared memory opt-in once a device, then the launch.
// Before it: src/dispatch.cpp, which filled the arguments. After it: kernel.hpp.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "forward/kernel.hpp"

namespace flashhopper {

template <class Traits>
cudaError_t launch_forward(ForwardArgs const& args, int grid, int device, cudaStream_t stream) {
  static_assert(sizeof(ForwardStorage<Traits>) <= smem_bytes(Traits::kConfig), "barriers outgrew kBarrierBytes");
  constexpr int kSmemBytes = static_cast<int>(smem_bytes(Traits::kConfig));
  static std::atomic<uint64_t> prepared_devices{0};  // a bit each; devices beyond 63 are prepared at every call
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if ((prepared_devices.load(std::memory_order_relaxed) & bit) == 0) {
    cudaError_t const error =
        cudaFuncSetAttribute(forward_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
    if (error != cudaSuccess) return error;
    prepared_devices.fetch_or(bit, std::memory_order_relaxed);
  }
  // The call's own status: cudaGetLastError would also report what an earlier call left behind.
  void* parameters[] = {const_cast<ForwardArgs*>(&args)};
  return cudaLaunchKernel(reinterpret_cast<void const*>(&forward_kernel<Traits>), dim3(grid), dim3(Traits::kThreads),
                          parameters, kSmemBytes, stream);
}

}  // namespace flashhopper
