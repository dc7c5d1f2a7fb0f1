// Lists the blocks of a packed batch on the device, so that no length has to reach the host: sequences whose tiles take
// longest first, each with its resolved rows. One CTA. Before it: src/packed_list.cu. After it: core/scheduler.hpp.
#pragma once

#include "core/barriers.hpp"
#include "packed/args.hpp"

namespace flashhopper {

inline constexpr int kListThreads = 1024;

// The sum of the values of the lanes up to this one, never above `most`.
FLASHHOPPER_DEVICE int sum_in_warp(int value, int lane, int most) {
  for (int distance = 1; distance < 32; distance *= 2) {
    int const before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value = min_of(value + before, most);
  }
  return value;
}

// The same over all threads. of_warps: memory for one value a warp.
FLASHHOPPER_DEVICE int sum_in_block(int value, int thread, int most, int (&of_warps)[kListThreads / 32]) {
  int const lane = thread % 32, warp = thread / 32;
  value = sum_in_warp(value, lane, most);
  if (lane == 31) of_warps[warp] = value;
  __syncthreads();
  if (warp == 0) of_warps[lane] = sum_in_warp(of_warps[lane], lane, most);
  __syncthreads();
  return warp == 0 ? value : min_of(value + of_warps[warp - 1], most);
}

// Sequences are taken kListThreads at a time. A batch of no more than that is sorted; in a larger one there is work
// enough behind any sequence to fill the machine.
__global__ void __launch_bounds__(kListThreads) list_blocks_kernel(__grid_constant__ ListArgs const args) {
  __shared__ PackedBlock sequences[kListThreads];
  __shared__ int tile_work[kListThreads];
  __shared__ int ends[kListThreads];  // blocks of a sequence, then with all before it
  __shared__ int of_warps[kListThreads / 32];
  await_previous();  // the lengths may be its work, and the call before may still read the list
  allow_next();
  int const thread = static_cast<int>(threadIdx.x);
  int const sequence_count = args.batch + 1;  // and what lies behind the last
  int listed = 0;
  for (int base = 0; base < sequence_count; base += kListThreads) {
    int const count = min_of(kListThreads, sequence_count - base);
    bool const has_one = thread < count;
    Sequence rows{};
    if (has_one) rows = {args.q.at(base + thread, args.batch), args.k.at(base + thread, args.batch)};
    SequenceRows const& own = args.by_keys ? rows.k : rows.q;
    SequenceRows const& other = args.by_keys ? rows.q : rows.k;
    int rank = thread;
    if (sequence_count <= kListThreads) {
      tile_work[thread] = own.seqlen > 0 ? other.seqlen : 0;
      __syncthreads();
      rank = rank_of(tile_work, count, thread);
    }
    ends[thread] = 0;
    __syncthreads();
    if (has_one) {
      sequences[rank] = {0, base + thread, rows};
      ends[rank] = min_of(ceil_div(own.rows, args.tile), args.capacity - listed);
    }
    __syncthreads();
    ends[thread] = sum_in_block(ends[thread], thread, args.capacity - listed, of_warps);
    __syncthreads();
    sequences[thread].first = listed + (thread == 0 ? 0 : ends[thread - 1]);
    __syncthreads();
    for (int place = thread; place < ends[count - 1]; place += kListThreads) {
      args.blocks[listed + place] = sequences[first_end_beyond(ends, count, place)];
    }
    listed += ends[count - 1];
    __syncthreads();
  }
  if (thread == 0) *args.size = listed;
}

}  // namespace flashhopper
