// Which query head and position a row of a forward tile is (GQA packing). Before it: heuristics.hpp chooses how many
// heads share a tile. After it: the schedule counts tiles of packs, and forward/ loads, masks and stores by this map.
#pragma once

#include "core/config.hpp"
#include "core/platform.hpp"

namespace flashhopper {

// A tile may hold the rows of several query heads of one kv head, a pack, so that short queries fill it and read keys
// and values once. Row r of a warpgroup's 64 is head r % heads of the pack at position r / heads: the order in which
// TMA brings a box of a tensor map (head_dim, head, row, ...). Rows behind the last whole position are unused.
struct RowMap {
  int heads;       // of a pack; 1: each head has tiles of its own
  int positions;   // of a warpgroup
  int reciprocal;  // 2^16 / heads, rounded up: exact for the rows of a warpgroup

  FLASHHOPPER_HOST_DEVICE constexpr int rows() const { return heads * positions; }
  // The position of row r of a warpgroup, counted from the warpgroup's first, and its head, from the pack's first.
  FLASHHOPPER_HOST_DEVICE constexpr int position(int row) const { return (row * reciprocal) >> 16; }
  FLASHHOPPER_HOST_DEVICE constexpr int head(int row) const { return row - position(row) * heads; }
};

// heads: at most kWarpgroupRows.
constexpr RowMap make_row_map(int heads) { return {heads, kWarpgroupRows / heads, ceil_div(1 << 16, heads)}; }

}  // namespace flashhopper
