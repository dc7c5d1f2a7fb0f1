// What the host hands to the quantiser's kernels. Before it: src/quantize_dispatch.cpp; after it: rows.hpp, values.hpp,
// column_sums.hpp, column_means.hpp, transpose.hpp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/value_layout.hpp"

namespace flashhopper {

// A tensor (batch, seqlen, heads, head_dim) that is read; strides in elements, the last one 1.
struct SourceView {
  void const* data;
  int64_t batch_stride, row_stride, head_stride;
  int head_dim;  // as given; columns beyond it are zeros
  int vectors;   // 1: every 16-byte vector of a row is aligned (transpose: every 4-byte word)
};

// Q or K: rows that are rotated, scaled and cast. Work is a block of 128 rows of one head; heads are the inner index,
// because the rows of all heads lie side by side in memory.
struct RowsOperand {
  SourceView source;
  uint8_t* data;      // (batch, seqlen, heads, computed head dim)
  float* scale;       // (batch, heads, scales of one head)
  float const* mean;  // (batch, mean_heads, computed head dim), or null
  float* shift;       // Q alone: (batch, heads, seqlen) row . mean, or null
  int subtract;       // K: the mean is taken from the rows. Q: it is only multiplied with them
  int heads, mean_heads;
  int seqlen, blocks;
  int per_row;  // a scale for each row, not for each block
  int tasks;
};

struct RowsArgs {
  RowsOperand operands[2];  // q, k
  float const* signs;       // (computed head dim), +1 or -1, before the Hadamard matrix; null: no rotation
  int is_int8;
};

struct ValuesArgs {
  SourceView source;
  uint8_t* data;      // (batch, heads, computed head dim, keys), keys = 128 * blocks
  float* scale;       // (batch, heads, blocks)
  float const* mean;  // (batch, heads, computed head dim), or null
  int heads, seqlen, blocks, tasks;
};

// One tensor whose column means are wanted, in two stages: sums of chunks of rows, then their sum in order.
struct MeansOperand {
  SourceView source;
  float* sums;  // (batch, heads, chunks, columns)
  float* mean;  // (batch, heads, columns)
  int heads, seqlen, columns, chunk_rows, chunks;
  int batch_heads;  // 0: not wanted
};

struct MeansArgs {
  MeansOperand operands[2];  // k, v
};

// Launches of one element type and computed head dimension; src/quantize_instance.cu.in defines them.
using LaunchRows = cudaError_t (*)(RowsArgs const& args, int num_sms, int device, cudaStream_t stream);
using LaunchValues = cudaError_t (*)(ValuesArgs const& args, int num_sms, int device, cudaStream_t stream);
using LaunchSums = cudaError_t (*)(MeansArgs const& args, int device, cudaStream_t stream);

cudaError_t launch_column_means(MeansArgs const& args, int device, cudaStream_t stream);
cudaError_t launch_transpose_values(ValuesArgs const& args, int columns, int device, cudaStream_t stream);

}  // namespace flashhopper
