// Synchronisation inside a CTA: mbarriers, ring positions and named barriers.
// Who arrives and who waits on each barrier stands in forward/storage.hpp.
#pragma once

#include <cstdint>

#include <cute/arch/util.hpp>

#include "core/platform.hpp"

namespace flashhopper {

// A barrier in shared memory whose phase completes after its arrivals and, for TMA loads, its expected bytes.
struct Barrier {
  uint64_t state;

  FLASHHOPPER_DEVICE uint32_t address() const { return cute::cast_smem_ptr_to_uint(&state); }

  FLASHHOPPER_DEVICE void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  // offset: 0, in a register that orders the arrival behind its computation.
  FLASHHOPPER_DEVICE void arrive(uint32_t offset = 0) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address() + offset) : "memory");
  }
  // The same at the barrier that lies there in the CTA of this rank in the cluster. That CTA runs, its barriers are
  // initialised and it has not ended: between the cluster_sync() at the start and the one at the end of both.
  FLASHHOPPER_DEVICE void arrive_at(int rank, uint32_t offset = 0) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(address() + offset),
        "r"(rank)
        : "memory");
  }
  FLASHHOPPER_DEVICE void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  // Returns once the phase of this parity has completed; a fresh barrier lets waiters for parity 1 pass.
  FLASHHOPPER_DEVICE void wait(uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        "@done bra finished;\n"
        "bra retry;\n"
        "finished:\n"
        "}\n" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
};

// Position in a ring of kDepth slots. A reader waits on full barriers with phase, a writer on empty ones with
// phase ^ 1.
template <int kDepth>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;

  FLASHHOPPER_DEVICE void advance() {
    if (++slot == kDepth) {
      slot = 0;
      phase ^= 1;
    }
  }
  FLASHHOPPER_DEVICE RingPosition before() const {
    return slot == 0 ? RingPosition{kDepth - 1, phase ^ 1} : RingPosition{slot - 1, phase};
  }
};

// Hardware named barriers; 0 is __syncthreads.
enum NamedBarrier : int { kTurnOfWarpgroup = 1 };  // + consumer warpgroup index

template <int kThreads>
FLASHHOPPER_DEVICE void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
FLASHHOPPER_DEVICE void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// Makes initialised barriers visible to TMA; a __syncthreads then shows them to the other threads.
FLASHHOPPER_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Makes ordinary shared-memory writes of this thread visible to TMA and wgmma.
FLASHHOPPER_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Between a kernel and the next on its stream that starts with it (core/launch.hpp): the next may be put on the
// multiprocessors from now on; what the previous one wrote is there. Without such a start both do nothing.
FLASHHOPPER_DEVICE void allow_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
FLASHHOPPER_DEVICE void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A value in device memory that passes from one CTA to the next: what was done before its release is seen after it.
FLASHHOPPER_DEVICE void await_value(int const* address, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(address) : "memory");
  } while (seen != value);
}
FLASHHOPPER_DEVICE void release_value(int* address, int value) {
  __threadfence();
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace flashhopper
