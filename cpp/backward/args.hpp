// What the host hands to the backward kernels, as one kernel parameter. Pre- and postprocess read the plain tensors,
// the main kernel the tensor maps.
#pragma once

#include <cuda.h>

#include "core/mask.hpp"
#include "core/scheduler.hpp"
#include "core/softcap.hpp"

namespace flashhopper {

// A 16-bit tensor (batch, seqlen, heads, head_dim), strides in elements.
struct TensorView {
  void* data;
  int64_t batch_stride, row_stride, head_stride;
};

struct BackwardArgs {
  CUtensorMap q, dout;   // boxes of tile_m rows
  CUtensorMap k, v, dv;  // boxes of tile_n rows
  CUtensorMap dk;        // boxes of dk_box_rows() rows
  // Workspace, one chunk for each (batch, head, query block of tile_m rows).
  float* dq_sum;      // tile_m * head_dim floats a chunk, in the order of the consumers' registers (core/dq_layout.hpp)
  float* lse_log2;    // tile_m a chunk: lse * log2(e); +inf for rows that see nothing or do not exist
  float* delta;       // tile_m a chunk: rowsum(dO * O) - dlse
  float* dsink_sums;  // one a chunk: its rows' share of dsink
  int* turns;         // one a chunk: key blocks added so far; null unless deterministic
  int* counters;      // of the tile queue
  TensorView out, dout_plain, dq;
  float const* lse;   // (batch, heads, seqlen_q), natural log
  float const* dlse;  // the same shape, or null
  float const* sink;  // (heads), a logit each in the denominator, or null
  float* dsink;       // (heads)
  float softmax_scale;
  float softmax_scale_log2;  // log2(e) times it, or times softcap where there is one
  Softcap softcap;
  int heads, group;          // query heads, query heads of one kv head
  int head_dim, head_dim_v;  // as given, not padded
  int m_blocks;              // query blocks of one head
  Mask mask;
  TileSchedule schedule;  // key blocks x kv heads x batch
};

}  // namespace flashhopper
