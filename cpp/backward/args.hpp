// What the host hands to the backward kernels, as one kernel parameter. Pre- and postprocess read the plain tensors,
// the main kernel the tensor maps.
#pragma once

#include <cuda.h>

#include "core/mask.hpp"
#include "core/scheduler.hpp"
#include "core/softmax.hpp"

namespace flashhopper {

// A 16-bit tensor (batch, seqlen, heads, head_dim), strides in elements; packed (total, heads, head_dim), with
// batch_stride 0.
struct TensorView {
  void* data;
  int64_t batch_stride, row_stride, head_stride;
};

// The query blocks of tile_m rows, each with a chunk of the workspace for every head.
struct QueryBlocks {
  int count;                // dense: of a sequence; packed: of the batch, at most
  int per_head;             // chunks of one head, of all sequences
  PackedBlock const* list;  // null: dense
  int const* list_size;
};

struct BackwardArgs {
  CUtensorMap q, dout;   // boxes of tile_m rows
  CUtensorMap k, v, dv;  // boxes of tile_n rows
  CUtensorMap dk;        // boxes of dk_box_rows() rows
  // Workspace, in chunks: dense (batch, heads, query block), packed (heads, first_packed_chunk() + query block).
  float* dq_sum;      // tile_m * head_dim floats a chunk, in the order of the consumers' registers (core/dq_layout.hpp)
  float* lse_log2;    // tile_m a chunk: (lse + softcap) * log2(e); +inf for rows that see nothing or do not exist
  float* delta;       // tile_m a chunk: rowsum(dO * O) - dlse
  int* turns;         // one a chunk: key blocks added so far; null unless deterministic
  float* dsink_sums;  // (heads, query blocks of all sequences): each block's share of dsink
  int* counters;      // of the tile queue
  TensorView out, dout_plain, dq;
  float const* lse;   // (batch, heads, seqlen_q), natural log; packed (heads, total_q), with batch stride 0
  float const* dlse;  // the same shape, or null
  int64_t lse_batch_stride, lse_head_stride;
  float const* sink;  // (heads), logits that join the denominators, or null
  float* dsink;       // (heads)
  float softmax_scale;
  float softmax_scale_log2;  // turns scores, after the cap if there is one, into base 2
  SoftCap softcap;
  int heads, group;          // query heads, query heads of one kv head
  int head_dim, head_dim_v;  // as given, not padded
  int wrap;                  // coordinate of the tensor maps' last dimension, core/seqlen.hpp
  QueryBlocks query_blocks;
  Window window;
  BatchSchedule schedule;  // key blocks x kv heads x batch
};

// The mask of a tile's sequence.
FLASHHOPPER_DEVICE Mask mask_of(BackwardArgs const& args, Sequence const& rows) {
  return {rows.q.seqlen, rows.k.seqlen, args.window.left, args.window.right};
}

}  // namespace flashhopper
