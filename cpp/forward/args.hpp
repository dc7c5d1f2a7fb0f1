// What the host hands to the forward kernel, as one kernel parameter.
#pragma once

#include <cuda.h>

#include "core/config8.hpp"
#include "core/mask.hpp"
#include "core/row_map.hpp"
#include "core/scheduler.hpp"
#include "core/softmax.hpp"

namespace flashhopper {

// (batch, seqlen_q, heads, head_dim_v), strides in elements; address and strides are multiples of 16 bytes. Of a packed
// batch (total_q, heads, head_dim_v), with batch_stride 0.
struct OutputTensor {
  void* data;
  int64_t batch_stride, row_stride, head_stride;
  int head_dim_v;
};

// (batch, heads, seqlen_q) contiguous; of a packed batch (heads, total_q), with batch_stride 0.
struct LseTensor {
  float* data;
  int64_t batch_stride, head_stride;
};

struct ForwardArgs {
  CUtensorMap q, k, v;  // boxes: the rows of one consumer warpgroup for q, tile_n rows for k and v
  OutputTensor out;
  LseTensor lse;
  float const* sink;         // (heads), natural log; null: none
  int* workspace;            // [0] places taken beyond the first of each CTA, [1] CTAs done; zero before and after
  float softmax_scale_log2;  // turns scores, after the cap if there is one, into base 2
  SoftCap softcap;
  RowMap row_map;  // 8 bits: of one head
  int group;       // packs (tile.head counts them, core/row_map.hpp) of one kv head
  int cluster;  // CTAs that load K and V for one another: 1, or as many as the row of the table says; their tiles are
                // neighbouring blocks, and a block of the schedule is those of all of them
  int wrap;     // coordinate of the tensor maps' last dimension, core/seqlen.hpp
  Window window;
  BatchSchedule schedule;
};

// What 8-bit operands bring along. Element = data * scale. In a packed batch all of it but v_mean is without the batch
// dimension, the scales of a sequence beginning at first_packed_chunk().
struct Forward8Args : ForwardArgs {
  float const* q_scale;    // (batch, heads, scales of one head)
  float const* k_scale;    // (batch, kv_heads, k_scales): of each block of kScaleBlock keys, or one for all
  float const* v_scale;    // likewise
  float const* lse_shift;  // as lse, times softmax_scale is added to it; or null
  float const* v_mean;     // (batch, kv_heads, head_dim_v), added to each row that sees a key; or null
  int q_block;             // rows of one scale
  int64_t q_scale_batch,
      q_scale_head;        // strides; packed, q_scale_batch steps over the chunk that sequences do not share
  int k_scales, v_scales;  // of one head
  int v_mean_columns;      // of one head
  float softmax_scale;
  bool out_is_bf16;
};

// Index of a tile's (batch, kv head).
FLASHHOPPER_DEVICE int64_t kv_head_of(ForwardArgs const& args, Tile const& tile) {
  return int64_t{tile.batch} * (args.schedule.dense.heads / args.group) + tile.head / args.group;
}

// The mask of a tile's sequence.
FLASHHOPPER_DEVICE Mask mask_of(ForwardArgs const& args, SequenceTile const& tile) {
  return {tile.rows.q.seqlen, tile.rows.k.seqlen, args.window.left, args.window.right};
}

// How rows of a tile are positions and heads. A constant in 8 bits, whose consumers have no register to spare.
template <class Traits>
FLASHHOPPER_DEVICE RowMap row_map_of(ForwardArgs const& args) {
  if constexpr (Traits::kIs8Bit) return make_row_map(1);
  return args.row_map;
}
// The first position of a warpgroup of a tile.
template <class Traits>
FLASHHOPPER_DEVICE int first_position(ForwardArgs const& args, Tile const& tile, int warpgroup) {
  return (tile.block * Traits::kWarpgroups + warpgroup) * row_map_of<Traits>(args).positions;
}

// The key blocks of a tile; producer and consumers pass over tiles that have none.
template <class Traits>
FLASHHOPPER_DEVICE BlockRange visited_blocks(ForwardArgs const& args, SequenceTile const& tile) {
  int const begin = first_position<Traits>(args, tile, 0),
            end = first_position<Traits>(args, tile, Traits::kWarpgroups);
  return begin < tile.rows.q.seqlen ? mask_of(args, tile).visited(begin, end, Traits::kTileN) : BlockRange{0, 0};
}
// Those of all CTAs that share keys with this one. Without a left bound they begin where the tile's begin.
template <class Traits>
FLASHHOPPER_DEVICE BlockRange shared_blocks(ForwardArgs const& args, SequenceTile const& tile) {
  if (Traits::kConfig.cluster == 1 || args.cluster == 1) return visited_blocks<Traits>(args, tile);
  int const positions = args.cluster * Traits::kWarpgroups * row_map_of<Traits>(args).positions;
  int const begin = tile.block / args.cluster * positions;
  return begin < tile.rows.q.seqlen ? mask_of(args, tile).visited(begin, begin + positions, Traits::kTileN)
                                    : BlockRange{0, 0};
}
// How many of them, the last ones, the tile does not see.
template <class Traits>
FLASHHOPPER_DEVICE int foreign_blocks(ForwardArgs const& args, SequenceTile const& tile) {
  if (Traits::kConfig.cluster == 1 || args.cluster == 1) return 0;
  return shared_blocks<Traits>(args, tile).size() - visited_blocks<Traits>(args, tile).size();
}

// The visited blocks that need no test of single elements.
template <class Traits>
FLASHHOPPER_DEVICE BlockRange unmasked_blocks(ForwardArgs const& args, SequenceTile const& tile) {
  int const begin = first_position<Traits>(args, tile, 0),
            end = first_position<Traits>(args, tile, Traits::kWarpgroups);
  return mask_of(args, tile).unmasked(begin, end, Traits::kTileN);
}

// The work tiles as the queue hands them out.
template <class Traits>
struct QueryTiles {
  ForwardArgs const& args;
  int rank;  // of this CTA in its cluster

  FLASHHOPPER_DEVICE int total() const { return args.schedule.total(); }
  FLASHHOPPER_DEVICE void put(int place, SequenceTile& tile) const {
    args.schedule.put(place, tile);
    if constexpr (Traits::kConfig.cluster > 1) tile.block = tile.block * args.cluster + rank;
  }
};

}  // namespace flashhopper
