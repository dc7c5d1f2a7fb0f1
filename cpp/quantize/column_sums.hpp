// Means of the columns of K and V over their keys, in two stages whose order of additions never changes: sums of chunks
// of rows, then the sum of those. This is the first stage, for one
// element type. Before it: launch.hpp; after it: column_means.hpp.
#pragma once

#include "core/barriers.hpp"
#include "quantize/io.hpp"

namespace flashhopper {

inline constexpr int kSumThreads = 256;

template <class Element>
FLASHHOPPER_DEVICE uint4 load_vector(Element const* from, bool is_aligned) {
  if (is_aligned) return *reinterpret_cast<uint4 const*>(from);
  auto const* const halves = reinterpret_cast<uint16_t const*>(from);
  uint32_t words[4];
  FLASHHOPPER_UNROLL
  for (int i = 0; i < 4; ++i) words[i] = halves[2 * i] | static_cast<uint32_t>(halves[2 * i + 1]) << 16;
  return {words[0], words[1], words[2], words[3]};
}

// One CTA a chunk of rows of one head; a thread sums 8 columns of every `groups`-th row.
template <class Element>
__global__ void __launch_bounds__(kSumThreads) column_sums_kernel(__grid_constant__ MeansArgs const args) {
  __shared__ float sums[kSumThreads * 8];
  await_previous();
  allow_next();  // now: the values' kernel reads V without waiting
  int const k_chunks = args.operands[0].chunks.tasks;
  bool const is_v = static_cast<int>(blockIdx.x) >= k_chunks;
  MeansOperand const& operand = args.operands[is_v];
  QuantizeTask const at = task_at(operand.chunks, static_cast<int>(blockIdx.x) - (is_v ? k_chunks : 0));
  Chunks const chunks = chunks_of(at.seqlen, operand.most_chunks);
  if (at.block < 0 || at.block >= chunks.count) return;
  int const vectors = operand.columns / 8, groups = kSumThreads / vectors;
  int const thread = thread_index(), group = thread / vectors, column = thread % vectors * 8;
  int const begin = at.block * chunks.rows, end = min_of(begin + chunks.rows, at.seqlen);
  float sum[8] = {};
  if (group < groups && column < operand.source.head_dim) {
    Element const* const base = source_row<Element>(operand.source, at, 0) + column;
    constexpr int kInFlight = 8;
    int64_t const step = groups * operand.source.row_stride;
    Element const* from = base + int64_t{begin + group} * operand.source.row_stride;
    for (int row = begin + group; row < end; row += kInFlight * groups) {
      uint4 raw[kInFlight];
      bool const is_whole = row + (kInFlight - 1) * groups < end && operand.source.vectors;
      FLASHHOPPER_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        raw[i] = uint4{0, 0, 0, 0};
        if (is_whole) {
          raw[i] = *reinterpret_cast<uint4 const*>(from);
        } else if (row + i * groups < end) {
          raw[i] = load_vector(from, operand.source.vectors != 0);
        }
        from += step;
      }
      FLASHHOPPER_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        float x[8];
        unpack_vector<Element>(raw[i], x);
        FLASHHOPPER_UNROLL
        for (int j = 0; j < 8; ++j) sum[j] += x[j];
      }
    }
  }
  if (group < groups) {
    FLASHHOPPER_UNROLL
    for (int j = 0; j < 8; ++j) sums[group * operand.columns + column + j] = sum[j];
  }
  __syncthreads();
  if (thread >= operand.columns) return;
  float total = 0.f;
  for (int g = 0; g < groups; ++g) total += sums[g * operand.columns + thread];
  operand.sums[at.block_place(operand.chunks) * operand.columns + thread] = total;
}

}  // namespace flashhopper
