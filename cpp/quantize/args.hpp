// What the host hands to the quantiser's kernels. Before it: src/quantize_dispatch.cpp; after it: rows.hpp, values.hpp,
// column_sums.hpp, column_means.hpp, transpose.hpp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/divisor.hpp"
#include "core/launch.hpp"
#include "core/seqlen.hpp"
#include "core/value_layout.hpp"

namespace flashhopper {

// How the rows of all heads of a tensor divide into blocks, of 128 rows but for means, and where what belongs to them
// stands: in a dense batch by (batch, head), in a packed one by head alone, rows and blocks of the sequences one behind
// the other (first_packed_chunk()).
struct RowBlocks {
  PackedRows packed;  // cu_seqlens null: a dense batch
  int batch, heads;
  int rows;                       // of one head: dense, of one sequence; packed, of the tensor
  int per_head;                   // blocks of these rows; packed: most_packed_blocks()
  int tasks;                      // blocks of all heads
  Divisor by_heads, by_per_head;  // divide by heads and per_head: a warp does it for every block

  FLASHHOPPER_HOST_DEVICE bool is_packed() const { return packed.cu_seqlens != nullptr; }
};

// A tensor (batch, seqlen, heads, head_dim), or (total, heads, head_dim), that is read; strides in elements, the last
// one 1.
struct SourceView {
  void const* data;
  int64_t batch_stride, row_stride, head_stride;
  int head_dim;  // as given; columns beyond it are zeros
  int vectors;   // 1: every 16-byte vector of a row is aligned (transpose: every 4-byte word)
};

// Q or K: rows that are rotated, scaled and cast. Work is a block of 128 rows of one head; heads are the inner index,
// because the rows of all heads lie side by side in memory. Shapes are a dense batch's; a packed one has no batch
// dimension, but for the means.
struct RowsOperand {
  SourceView source;
  RowBlocks blocks;
  uint8_t* data;      // (batch, seqlen, heads, computed head dim)
  float* scale;       // (batch, heads, scales of one head)
  float const* mean;  // (batch, mean_heads, computed head dim), rotated as the rows will be, or null
  float* shift;       // Q alone: (batch, heads, seqlen) row . mean, or null
  int mean_heads;
  Divisor by_group;  // divides by heads / mean_heads
  int per_row;       // a scale for each row, not for each block
  int power_scales;  // scales are powers of two: equal rows of several blocks become the same numbers
};

struct RowsArgs {
  RowsOperand operands[2];   // q, k
  float const* signs;        // (computed head dim), +1 or -1, before the Hadamard matrix; null: no rotation
  int is_int8, is_by_quads;  // the latter: a Hadamard matrix for every four columns
};

struct ValuesArgs {
  SourceView source;
  RowBlocks blocks;
  uint8_t* data;      // (batch, heads, computed head dim, keys), keys = 128 * blocks.per_head
  float* scale;       // (batch, heads, blocks)
  float const* mean;  // (batch, heads, computed head dim), or null
};

// One tensor whose column means are wanted, in two stages: sums of chunks of rows, then their sum in order. A chunk is
// a block of a size of its own, that of its sequence.
struct MeansOperand {
  SourceView source;
  RowBlocks chunks;
  float* sums;  // (batch, heads, chunks, columns)
  float* mean;  // (batch, heads, columns)
  int columns;
  int most_chunks;  // of a sequence
  int batch_heads;  // 0: not wanted
};

// How a sequence divides into chunks: of at least 128 rows.
struct Chunks {
  int count, rows;
};
FLASHHOPPER_HOST_DEVICE Chunks chunks_of(int seqlen, int most) {
  int const count = max_of(1, min_of(seqlen / kScaleBlock, most));
  return {seqlen > 0 ? count : 0, ceil_div(seqlen, count)};
}

struct MeansArgs {
  MeansOperand operands[2];  // k, v
  float* rotated_k;          // like k's mean: times the signs and the Hadamard matrix, which is not divided by its root
  float const* signs;        // of RowsArgs
  int hadamard;              // columns of the matrix; 1: none
};

// Launches of one element type and computed head dimension; src/quantize_instance.cu.in defines them.
using LaunchRows = cudaError_t (*)(RowsArgs const& args, int num_sms, int device, cudaStream_t stream, Start start);
using LaunchValues = cudaError_t (*)(ValuesArgs const& args, int num_sms, int device, cudaStream_t stream, Start start);
using LaunchSums = cudaError_t (*)(MeansArgs const& args, int device, cudaStream_t stream);

cudaError_t launch_column_means(MeansArgs const& args, int device, cudaStream_t stream, Start start);
cudaError_t launch_transpose_values(ValuesArgs const& args, int columns, int device, cudaStream_t stream);

}  // namespace flashhopper
