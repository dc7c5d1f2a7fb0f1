// TMA on the device: loads and stores of tiles in boxes. The tensor maps are built on the host by src/tensor_map.cpp.
#pragma once

#include <cuda.h>  // types only: the driver function is resolved at run time, libcuda is never linked

#include <cstdint>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "core/barriers.hpp"
#include "core/seqlen.hpp"

namespace flashhopper {

enum class L2Hint : uint64_t {
  kEvictFirst = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
  kEvictLast = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
};

// Loads rows [row, row + kRows) of one head of a sequence (core/seqlen.hpp), columns from first_column, into smem, one
// box of kBoxColumns after another. Rows past its end and columns outside the tensor arrive as zeros; the barrier
// always counts the bytes of the full boxes, and more_bytes that other loads bring (less than 0: what the map's boxes
// lack).
template <int kRows, int kHeadDim, int kBoxColumns, class Element>
FLASHHOPPER_DEVICE void tma_load_sequence(CUtensorMap const& map, Barrier& full, L2Hint hint, Element* smem,
                                          RowOrigin const& origin, int wrap, int row, int head, int first_column = 0,
                                          int more_bytes = 0) {
  full.arrive_and_expect(kRows * kHeadDim * int{sizeof(Element)} + more_bytes);
  FLASHHOPPER_UNROLL
  for (int column = 0; column < kHeadDim; column += kBoxColumns) {
    cute::SM90_TMA_LOAD_5D::copy(&map, &full.state, static_cast<uint64_t>(hint), smem + column * kRows,
                                 first_column + column, origin.row + row, head, origin.outer, wrap);
  }
}

// The same for all CTAs of a cluster, which call it for the same rows: each brings every kCluster-th box, beginning
// with that of its rank, to the same place in all of them, and each barrier counts what arrives in its own CTA.
template <int kRows, int kHeadDim, int kBoxColumns, int kCluster, class Element>
FLASHHOPPER_DEVICE void tma_load_shared(CUtensorMap const& map, Barrier& full, L2Hint hint, Element* smem,
                                        RowOrigin const& origin, int wrap, int row, int head, int rank) {
  full.arrive_and_expect(kRows * kHeadDim * int{sizeof(Element)});
#pragma unroll 1
  for (int column = rank * kBoxColumns; column < kHeadDim; column += kCluster * kBoxColumns) {
    cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&map, &full.state, static_cast<uint16_t>((1 << kCluster) - 1),
                                           static_cast<uint64_t>(hint), smem + column * kRows, column, origin.row + row,
                                           head, origin.outer, wrap);
  }
}

// Loads contiguous bytes, 16 at least; the barrier must expect them.
FLASHHOPPER_DEVICE void bulk_load(void const* source, Barrier& full, void* smem, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cute::cast_smem_ptr_to_uint(smem)),
               "l"(source), "r"(bytes), "r"(full.address())
               : "memory");
}

// Stores a tile the same way; rows and columns outside the sequence are dropped. The caller commits and waits.
template <int kRows, int kHeadDim, int kBoxColumns, class Element>
FLASHHOPPER_DEVICE void tma_store_sequence(CUtensorMap const& map, Element const* smem, RowOrigin const& origin,
                                           int wrap, int row, int head) {
  FLASHHOPPER_UNROLL
  for (int column = 0; column < kHeadDim; column += kBoxColumns) {
    cute::SM90_TMA_STORE_5D::copy(&map, smem + column * kRows, column, origin.row + row, head, origin.outer, wrap);
  }
}

// Adds contiguous floats to device memory; the caller commits and waits.
FLASHHOPPER_DEVICE void bulk_add(float* target, float const* smem, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target),
               "r"(cute::cast_smem_ptr_to_uint(smem)), "r"(bytes)
               : "memory");
}
// Until this thread's bulk stores have been performed, not only read from shared memory.
FLASHHOPPER_DEVICE void bulk_wait_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flashhopper
