// Means of the columns of K and V over sampled keys, for one element type. A cluster has the samples of one head, its
// CTAs a part of them each; nothing depends on the order in which they run. Before it: launch.hpp. What it writes is
// read by values.hpp and rows.hpp.
#pragma once

#include <type_traits>

#include "core/cluster.hpp"
#include "quantize/io.hpp"

namespace flashhopper {

inline constexpr int kMeanThreads = 256;  // no fewer than columns

template <class Element>
FLASHHOPPER_DEVICE uint4 load_vector(Element const* from, bool is_aligned) {
  if (is_aligned) return *reinterpret_cast<uint4 const*>(from);
  auto const* const halves = reinterpret_cast<uint16_t const*>(from);
  uint32_t words[4];
  FLASHHOPPER_UNROLL
  for (int i = 0; i < 4; ++i) words[i] = halves[2 * i] | static_cast<uint32_t>(halves[2 * i + 1]) << 16;
  return {words[0], words[1], words[2], words[3]};
}

// Adds 8 columns of samples begin, begin + step, ... before end to `sum`. column: the first row's.
template <class Element, bool kAligned>
FLASHHOPPER_DEVICE void add_samples(Element const* column, int64_t row_stride, int seqlen, int begin, int end, int step,
                                    float (&sum)[8]) {
  constexpr int kInFlight = 8;
  for (int first = begin; first < end; first += kInFlight * step) {
    uint4 raw[kInFlight];
    FLASHHOPPER_UNROLL
    for (int i = 0; i < kInFlight; ++i) {  // without a branch, behind which they would be waited for one by one
      int64_t const row = sampled_row(min_of(first + i * step, end - 1), seqlen);
      raw[i] = load_vector(column + row * row_stride, kAligned);
    }
    FLASHHOPPER_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      float x[8];
      unpack_vector<Element>(raw[i], x);
      FLASHHOPPER_UNROLL
      for (int j = 0; j < 8; ++j) sum[j] += first + i * step < end ? x[j] : 0.f;
    }
  }
}

// What lies at this address in the shared memory of another CTA of the cluster.
FLASHHOPPER_DEVICE float load_shared_of(int rank, float const* address) {
  float value;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n"
      "}\n"
      : "=f"(value)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(rank)
      : "memory");
  return value;
}

// The mean of K is also wanted as rows.hpp meets it: times signs and Hadamard matrix.
template <class Element>
__global__ void __launch_bounds__(kMeanThreads, 4) column_means_kernel(__grid_constant__ MeansArgs const args) {
  __shared__ float sums[kMeanThreads * 8];
  __shared__ float totals[kMeanThreads];  // of columns
  await_previous();
  allow_next();  // now: the values' kernel reads V without waiting
  int const index = static_cast<int>(blockIdx.x) / kMeanCtas, rank = cluster_rank();
  bool const is_v = index >= args.operands[0].batch_heads;
  MeansOperand const& operand = args.operands[is_v];
  int const batch_head = index - (is_v ? args.operands[0].batch_heads : 0);
  int const sequence = batch_head / operand.rows.heads;
  QuantizeTask const at = first_task_of(operand.rows, sequence, batch_head - sequence * operand.rows.heads);
  int const samples = samples_of(at.seqlen), begin = samples * rank / kMeanCtas, end = samples * (rank + 1) / kMeanCtas;
  int const vectors = operand.columns / 8, groups = kMeanThreads / vectors;
  int const thread = thread_index(), group = thread / vectors, column = thread % vectors * 8;
  float sum[8] = {};
  if (group < groups && column < operand.source.head_dim) {
    Element const* const from = source_row<Element>(operand.source, at, 0) + column;
    int64_t const stride = operand.source.row_stride;
    if (operand.source.vectors) {
      add_samples<Element, true>(from, stride, at.seqlen, begin + group, end, groups, sum);
    } else {
      add_samples<Element, false>(from, stride, at.seqlen, begin + group, end, groups, sum);
    }
  }
  if (group < groups) {
    FLASHHOPPER_UNROLL
    for (int j = 0; j < 8; ++j) sums[group * operand.columns + column + j] = sum[j];
  }
  __syncthreads();
  float total = 0.f;
  if (thread < operand.columns) {
    for (int g = 0; g < groups; ++g) total += sums[g * operand.columns + thread];
  }
  totals[thread] = total;
  cluster_sync();
  float mean = 0.f;
  int64_t const place = int64_t{batch_head} * operand.columns + thread;
  bool const writes = rank == 0 && thread < operand.columns;
  if (writes) {
    float all = 0.f;
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kMeanCtas; ++r) all += load_shared_of(r, totals + thread);
    mean = samples > 0 ? __fdiv_rn(all, static_cast<float>(samples)) : 0.f;
    operand.mean[place] = mean;
  }
  cluster_sync();  // nobody ends, or writes its totals again, before they have been read
  if (rank > 0 || is_v) return;
  if (args.signs != nullptr && writes) mean *= args.signs[thread];
  for (int stride = 1; stride < args.hadamard; stride *= 2) {
    __syncthreads();
    totals[thread] = mean;
    __syncthreads();
    float const other = totals[thread ^ stride];
    mean = (thread & stride) == 0 ? mean + other : other - mean;
  }
  if (writes) args.rotated_k[place] = mean;
}

}  // namespace flashhopper
