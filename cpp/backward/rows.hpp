// The two small kernels around the backward: before it delta = rowsum(dO * O) - dlse, the sink's gradient by blocks and
// the zeroed workspace, after it dQ from the float sums and the sink's gradient. Both bound by memory. One CTA a chunk:
// a query block of tile_m rows of one head. Source: FlashAttention-2, algorithm 2.
#pragma once

#include <cuda_runtime.h>

#include "backward/args.hpp"
#include "core/dq_layout.hpp"
#include "core/elements.hpp"

namespace flashhopper {

inline constexpr int kRowThreads = 256;

// Which query block of which head a CTA works on.
struct Chunk {
  int64_t index = 0;  // of its part of the workspace
  int m = 0, head = 0, batch = 0;
  int place = 0;  // of the block among those of a head, all sequences
  SequenceRows rows{};
  bool exists = true;

  FLASHHOPPER_DEVICE Chunk(BackwardArgs const& args, int tile_m) {
    QueryBlocks const& blocks = args.query_blocks;
    int const outer = static_cast<int>(blockIdx.x) / blocks.count, inner = static_cast<int>(blockIdx.x) % blocks.count;
    if (blocks.list == nullptr) {
      index = blockIdx.x;
      m = inner;
      batch = outer / args.heads;
      head = outer - batch * args.heads;
      place = batch * blocks.count + m;
      rows = args.schedule.rows.q;
      return;
    }
    head = outer;
    place = inner;
    exists = place < *blocks.list_size;
    if (!exists) return;
    PackedBlock const block = blocks.list[place];
    m = place - block.first;
    batch = block.sequence;
    rows = block.rows.q;
    index = int64_t{head} * blocks.count + first_packed_chunk(rows.begin, batch, tile_m) + m;
  }

  // First element of a row of one of the chunk's tensors.
  template <class Element>
  FLASHHOPPER_DEVICE Element* row(TensorView const& view, int position) const {
    return static_cast<Element*>(view.data) + batch * view.batch_stride + (rows.begin + position) * view.row_stride +
           head * view.head_stride;
  }
};

// Eight 16-bit elements as one load or store.
template <class Element>
union Pack {
  uint4 bits;
  Element elements[8];
};

// Sum over the threads of the CTA, always in one order; thread 0 has it.
FLASHHOPPER_DEVICE float block_sum(float value) {
  __shared__ float of_warp[kRowThreads / 32];
  int const thread = static_cast<int>(threadIdx.x);
  FLASHHOPPER_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (thread % 32 == 0) of_warp[thread / 32] = value;
  __syncthreads();
  float sum = 0.f;
  FLASHHOPPER_UNROLL
  for (int w = 0; w < kRowThreads / 32; ++w) sum += of_warp[w];
  return sum;
}

// The gradient of a head's sink from the sums of its query blocks.
FLASHHOPPER_DEVICE void reduce_sink(BackwardArgs const& args, int head) {
  QueryBlocks const& blocks = args.query_blocks;
  int const count = blocks.list == nullptr ? blocks.per_head : *blocks.list_size;
  float const* const sums = args.dsink_sums + int64_t{head} * blocks.per_head;
  float sum = 0.f;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kRowThreads) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) args.dsink[head] = sum;
}

template <class Element>
__global__ void __launch_bounds__(kRowThreads, 3)
    preprocess_kernel(__grid_constant__ BackwardArgs const args, int tile_m, int head_dim) {
  Chunk const chunk(args, tile_m);
  int const thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && thread < 2) args.counters[thread] = 0;
  if (!chunk.exists) return;
  // Stores first: they are on their way while the loads are waited for.
  auto* const zero = reinterpret_cast<float4*>(args.dq_sum + chunk.index * tile_m * head_dim);
  for (int i = thread; i < tile_m * head_dim / 4; i += kRowThreads) zero[i] = float4{0.f, 0.f, 0.f, 0.f};
  if (args.turns != nullptr && thread == 0) args.turns[chunk.index] = 0;
  // Sixteen threads a row, eight elements each; four rows of a thread at once, for that many loads are needed in
  // flight.
  constexpr int kLanes = 16, kRows = kRowThreads / kLanes, kAtOnce = 4;
  int const lane = thread % kLanes;
  float const sink_log2 = args.sink != nullptr ? args.sink[chunk.head] * kLog2e : 0.f;
  float dsink = 0.f;
  int64_t const first_value =
      chunk.batch * args.lse_batch_stride + chunk.head * args.lse_head_stride + chunk.rows.begin;
  for (int first = thread / kLanes; first < tile_m; first += kAtOnce * kRows) {
    // Lane j finishes row first + j * kRows.
    int const own = first + lane * kRows, own_position = chunk.m * tile_m + own;
    bool const has_own = lane < kAtOnce, exists = has_own && own_position < chunk.rows.seqlen;
    float const lse = exists ? args.lse[first_value + own_position] : -INFINITY;
    float const dlse = exists && args.dlse != nullptr ? args.dlse[first_value + own_position] : 0.f;
    float sums[kAtOnce] = {};
    for (int c = lane * 8; c < args.head_dim_v; c += kLanes * 8) {
      Pack<Element> o[kAtOnce] = {}, d[kAtOnce] = {};
      FLASHHOPPER_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        int const position = chunk.m * tile_m + first + j * kRows;
        if (position >= chunk.rows.seqlen) continue;
        o[j].bits = *reinterpret_cast<uint4 const*>(chunk.row<Element const>(args.out, position) + c);
        d[j].bits = *reinterpret_cast<uint4 const*>(chunk.row<Element const>(args.dout_plain, position) + c);
      }
      FLASHHOPPER_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        FLASHHOPPER_UNROLL
        for (int i = 0; i < 8; ++i)
          sums[j] += static_cast<float>(o[j].elements[i]) * static_cast<float>(d[j].elements[i]);
      }
    }
    float own_sum = 0.f;
    FLASHHOPPER_UNROLL
    for (int j = 0; j < kAtOnce; ++j) {
      FLASHHOPPER_UNROLL
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], offset);
      }
      if (lane == j) own_sum = sums[j];
    }
    if (has_own) {
      bool const sees = lse != -INFINITY;
      float const delta = own_sum - dlse;
      args.lse_log2[chunk.index * tile_m + own] = sees ? (lse + args.softcap.shift) * kLog2e : INFINITY;
      args.delta[chunk.index * tile_m + own] = delta;
      // A key of value 0 and weight exp(sink - lse).
      if (args.sink != nullptr && sees) dsink -= fast_exp2(sink_log2 - lse * kLog2e) * delta;
    }
  }
  if (args.sink == nullptr) return;
  dsink = block_sum(dsink);
  if (thread == 0) args.dsink_sums[int64_t{chunk.head} * args.query_blocks.per_head + chunk.place] = dsink;
}

template <class Element>
__global__ void __launch_bounds__(kRowThreads)
    postprocess_kernel(__grid_constant__ BackwardArgs const args, int tile_m, int head_dim) {
  extern __shared__ __align__(1024) unsigned char smem[];
  auto* const tile = reinterpret_cast<Element*>(smem);  // (tile_m, head_dim), rows padded against bank conflicts
  int const pitch = head_dim + 8;
  Chunk const chunk(args, tile_m);
  int const thread = static_cast<int>(threadIdx.x);
  // There are at least as many CTAs as heads.
  if (args.sink != nullptr && blockIdx.x < args.heads) reduce_sink(args, static_cast<int>(blockIdx.x));
  if (!chunk.exists) return;
  auto const* const sums = reinterpret_cast<float4 const*>(args.dq_sum + chunk.index * tile_m * head_dim);
  for (int vector = thread; vector < tile_m * head_dim / 4; vector += kRowThreads) {
    float4 const sum = sums[vector];
    float const values[4] = {sum.x, sum.y, sum.z, sum.w};
    FLASHHOPPER_UNROLL
    for (int i = 0; i < 4; ++i) {
      DqElement const at = dq_element(tile_m, head_dim, vector, i);
      tile[at.row * pitch + at.column] = static_cast<Element>(values[i] * args.softmax_scale);
    }
  }
  __syncthreads();
  int const columns = args.head_dim / 8;
  for (int i = thread; i < tile_m * columns; i += kRowThreads) {
    int const r = i / columns, c = i % columns * 8, position = chunk.m * tile_m + r;
    if (position >= chunk.rows.rows) continue;
    *reinterpret_cast<uint4*>(chunk.row<Element>(args.dq, position) + c) =
        *reinterpret_cast<uint4 const*>(tile + r * pitch + c);
  }
}

}  // namespace flashhopper
