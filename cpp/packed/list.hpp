// Lists the blocks of a packed batch on the device, so that no length has to reach the host: sequences whose tiles take
// longest first, each with its resolved rows. One CTA. Before it: src/packed_list.cu. After it: core/scheduler.hpp.
#pragma once

#include "packed/args.hpp"

namespace flashhopper {

inline constexpr int kListThreads = 1024;

// Sums over the threads before and up to this one, none above `most`. values: one for each thread, replaced.
FLASHHOPPER_DEVICE void inclusive_sums(int (&values)[kListThreads], int thread, int most) {
  for (int distance = 1; distance < kListThreads; distance *= 2) {
    int const before = thread >= distance ? values[thread - distance] : 0;
    __syncthreads();
    values[thread] = min_of(values[thread] + before, most);
    __syncthreads();
  }
}

// Sequences are taken kListThreads at a time. A batch of no more than that is sorted; in a larger one there is work
// enough behind any sequence to fill the machine.
__global__ void __launch_bounds__(kListThreads) list_blocks_kernel(__grid_constant__ ListArgs const args) {
  __shared__ PackedBlock sequences[kListThreads];
  __shared__ int tile_work[kListThreads];
  __shared__ int ends[kListThreads];  // blocks up to and with a sequence
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
      ends[rank] = min_of(ceil_div(own.rows, args.tile), args.capacity);
    }
    __syncthreads();
    inclusive_sums(ends, thread, args.capacity - listed);
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
