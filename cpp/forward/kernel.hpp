// The forward kernel: a persistent CTA a multiprocessor, one producer warpgroup and two or three consumer warpgroups.
// Before it: launch.hpp. Read on in producer.hpp, consumer16.hpp and consumer8.hpp.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "core/cluster.hpp"
#include "forward/consumer16.hpp"
#include "forward/consumer8.hpp"
#include "forward/producer.hpp"

namespace flashhopper {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel(__grid_constant__ typename Traits::Args const args) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& storage = *reinterpret_cast<ForwardStorage<Traits>*>(smem);

  if (threadIdx.x == 0) {
    storage.init_barriers(args.cluster);
    fence_barrier_init();
  }
  if constexpr (Traits::kSumColumns > 0) storage.fill_sum_columns();
  // Whatever the previous kernel wrote: q, k and v, the list of a packed batch, or the workspace.
  await_previous();
  __syncthreads();
  constexpr bool kShares = Traits::kConfig.cluster > 1;
  if (kShares && args.cluster > 1) cluster_sync();  // the barriers of the other CTAs are there

  int const warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<producer_registers(Traits::kConfig)>();
    produce<Traits>(args, storage);
  } else {
    cutlass::arch::warpgroup_reg_alloc<consumer_registers(Traits::kConfig)>();
    using Consumer = std::conditional_t<Traits::kIs8Bit, Consumer8<Traits>, Consumer16<Traits>>;
    Consumer(args, storage, warpgroup - 1).run();
  }
  if (kShares && args.cluster > 1) {
    __syncwarp();
    cluster_sync();  // nobody brings keys to, or arrives at, a CTA that has ended
  }
}

}  // namespace flashhopper
