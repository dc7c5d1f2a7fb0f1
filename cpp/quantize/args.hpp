// What the host hands to the quantiser's kernels. Before it: src/quantize_dispatch.cpp; after it: rows.hpp, values.hpp,
// column_means.hpp, transpose.hpp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/divisor.hpp"
#include "core/launch.hpp"
#include "core/seqlen.hpp"
#include "core/value_layout.hpp"

namespace flashhopper {

// How the rows of all heads of a tensor divide into blocks of 128 and where what belongs to them
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
  int power_scales;  // scales are powers of two in blocks without outliers: equal rows become the same numbers
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

// One tensor whose column means are wanted.
struct MeansOperand {
  SourceView source;
  RowBlocks rows;
  float* mean;  // (batch, heads, columns)
  int columns;
  int batch_heads;  // 0: not wanted
};

// A mean is over so many rows of a sequence, spread over it, or over all that it has. Any vector may be taken from all
// keys or all values, so that this is as exact as the mean of all; it spares a second reading of K and V.
inline constexpr int kMeanRows = 1 << 9;
inline constexpr int kMeanCtas = 4;  // of the cluster that has a head's samples
FLASHHOPPER_HOST_DEVICE constexpr int samples_of(int seqlen) { return min_of(seqlen, kMeanRows); }

// The row of sample `index`: one of each kMeanRows-th of the sequence, which of them a hash says, so that no period of
// the rows (rotary embeddings have many) meets that of the samples.
FLASHHOPPER_HOST_DEVICE constexpr int sampled_row(int index, int seqlen) {
  int64_t const rows = max_of(seqlen, kMeanRows);  // of up to kMeanRows each is a sample, without a branch
  int const begin = static_cast<int>(index * rows / kMeanRows), end = static_cast<int>((index + 1) * rows / kMeanRows);
  uint32_t hash = static_cast<uint32_t>(index) * 0x9e3779b1u;
  hash = (hash ^ hash >> 15) * 0x85ebca77u;
  hash ^= hash >> 13;
  return begin + static_cast<int>(uint64_t{hash} * static_cast<uint32_t>(end - begin) >> 32);
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
using LaunchMeans = cudaError_t (*)(MeansArgs const& args, int device, cudaStream_t stream);

cudaError_t launch_transpose_values(ValuesArgs const& args, int columns, int device, cudaStream_t stream);

}  // namespace flashhopper
