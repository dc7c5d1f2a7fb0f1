// The second stage of the means of K and V: the sums of the chunks, in order. Before it: column_sums.hpp and
// src/quantize_common.cu, the one file that includes this.
#pragma once

#include "core/barriers.hpp"
#include "quantize/io.hpp"

namespace flashhopper {

inline constexpr int kMeanThreads = 1024;

// One CTA a head. The mean of K is also wanted as rows.hpp meets it: times signs and Hadamard matrix.
__global__ void __launch_bounds__(kMeanThreads) column_means_kernel(__grid_constant__ MeansArgs const args) {
  __shared__ float parts[kMeanThreads];
  allow_next();
  await_previous();  // the sums
  int const index = static_cast<int>(blockIdx.x);
  bool const is_v = index >= args.operands[0].batch_heads;
  MeansOperand const& operand = args.operands[is_v];
  int const batch_head = index - (is_v ? args.operands[0].batch_heads : 0);
  int const sequence = batch_head / operand.chunks.heads;
  QuantizeTask const at = first_task_of(operand.chunks, sequence, batch_head - sequence * operand.chunks.heads);
  int const chunks = chunks_of(at.seqlen, operand.most_chunks).count;
  int const groups = kMeanThreads / operand.columns;
  int const thread = thread_index(), group = thread / operand.columns, column = thread % operand.columns;
  float sum = 0.f;
  if (group < groups) {
    float const* const from = operand.sums + at.block_place(operand.chunks) * operand.columns + column;
#pragma unroll 8
    for (int chunk = group; chunk < chunks; chunk += groups) sum += from[int64_t{chunk} * operand.columns];
  }
  parts[thread] = sum;
  __syncthreads();
  for (int g = 1; g < groups && group == 0; ++g) sum += parts[g * operand.columns + column];
  float mean = at.seqlen > 0 ? __fdiv_rn(sum, static_cast<float>(at.seqlen)) : 0.f;
  int64_t const place = int64_t{batch_head} * operand.columns + column;
  if (group == 0) operand.mean[place] = mean;
  if (is_v) return;
  if (args.signs != nullptr) mean *= args.signs[column];
  for (int stride = 1; stride < args.hadamard; stride *= 2) {
    __syncthreads();
    parts[thread] = mean;
    __syncthreads();
    float const other = parts[thread ^ stride];  // of the same group, for group 0 whose columns are all there
    mean = (column & stride) == 0 ? mean + other : other - mean;
  }
  if (group == 0) args.rotated_k[place] = mean;
}

}  // namespace flashhopper
