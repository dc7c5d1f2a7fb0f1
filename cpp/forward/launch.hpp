// Launches one instance of the forward kernel.
// Before it: src/forward_dispatch.cpp, which filled the arguments. After it: kernel.hpp.
#pragma once

#include "core/launch.hpp"
#include "forward/kernel.hpp"

namespace flashhopper {

template <class Traits>
cudaError_t launch_forward(typename Traits::Args const& args, int grid, int device, cudaStream_t stream) {
  static_assert(sizeof(ForwardStorage<Traits>) <= smem_bytes(Traits::kConfig), "barriers outgrew kBarrierBytes");
  void* parameters[] = {const_cast<typename Traits::Args*>(&args)};
  return launch<forward_kernel<Traits>>(grid, Traits::kThreads, parameters,
                                        static_cast<int>(smem_bytes(Traits::kConfig)), device, stream,
                                        Start::kWithPrevious, args.cluster);
}

}  // namespace flashhopper
