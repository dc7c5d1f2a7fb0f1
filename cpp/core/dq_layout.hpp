// Where an element of dQ stands in its chunk of the float accumulator: in the order in which the consumer threads hold
// it, so that every warp adds whole lines. The main kernel adds through it, postprocess reads it back; host tests prove
// that it is a bijection.
#pragma once

#include "core/backward_config.hpp"
#include "core/seqlen.hpp"
#include "core/softmax.hpp"

namespace flashhopper {

struct DqElement {
  int row;     // query within the block
  int column;  // head_dim
};

// Each warpgroup holds 64 rows: all rows of its half of the columns (tile_m 64), or its half of the rows (128).
FLASHHOPPER_HOST_DEVICE constexpr bool dq_splits_columns(int tile_m) { return tile_m == kWarpgroupRows; }
FLASHHOPPER_HOST_DEVICE constexpr int dq_columns(int tile_m, int head_dim) {
  return dq_splits_columns(tile_m) ? head_dim / kBackwardWarpgroups : head_dim;
}

// A chunk is a list of 4-float vectors: [warpgroup][group of 4 accumulator elements][thread].
FLASHHOPPER_HOST_DEVICE constexpr int dq_vector(int tile_m, int head_dim, int warpgroup, int group, int thread) {
  return (warpgroup * (dq_columns(tile_m, head_dim) / 8) + group) * kWarpgroupThreads + thread;
}

// Element i of vector `vector`.
FLASHHOPPER_HOST_DEVICE constexpr DqElement dq_element(int tile_m, int head_dim, int vector, int i) {
  int const thread = vector % kWarpgroupThreads, rest = vector / kWarpgroupThreads;
  int const groups = dq_columns(tile_m, head_dim) / 8;
  int const warpgroup = rest / groups, group = rest % groups;
  int const row = thread / 32 * 16 + thread % 32 / 4 + 8 * accumulator_row(i);
  int const column = accumulator_column(4 * group + i) + thread % 4 * 2;
  return dq_splits_columns(tile_m) ? DqElement{row, warpgroup * 8 * groups + column}
                                   : DqElement{warpgroup * kWarpgroupRows + row, column};
}

}  // namespace flashhopper
