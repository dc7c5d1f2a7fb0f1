// The backward kernel: a persistent CTA a multiprocessor, one producer warpgroup and two consumer warpgroups.
// Before it: launch.hpp. Read on in producer.hpp, key_consumer.hpp and column_consumer.hpp.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "backward/column_consumer.hpp"
#include "backward/key_consumer.hpp"
#include "backward/producer.hpp"

namespace flashhopper {

// kCapped: whether there is a softcap. A kernel of its own, for a branch in the loop, taken or not, would part what
// stands before it from what stands behind, where the compiler mixes the two to hide latencies.
template <class Traits, bool kCapped>
__global__ void __launch_bounds__(kBackwardThreads, 1) backward_kernel(__grid_constant__ BackwardArgs const args) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& storage = *reinterpret_cast<BackwardStorage<Traits>*>(smem);

  if (threadIdx.x == 0) {
    storage.init_barriers();
    fence_barrier_init();
  }
  __syncthreads();

  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kBackwardProducerRegisters>();
    produce<Traits>(args, storage);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kBackwardConsumerRegisters>();
    if constexpr (Traits::kByKeys) {
      KeyConsumer<Traits, kCapped>{{args, storage, warpgroup - 1}}.run();
    } else {
      ColumnConsumer<Traits, kCapped>{{args, storage, warpgroup - 1}}.run();
    }
  }
}

}  // namespace flashhopper
