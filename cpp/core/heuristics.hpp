// Which row of a config table serves a problem, and how many query heads share a forward tile. docs/lab/forward.md has
// the measurements behind the rules.
#pragma once

#include "core/backward_config.hpp"
#include "core/config8.hpp"
#include "core/mask.hpp"
#include "core/row_map.hpp"

namespace flashhopper {

// The smallest computed head dimensions that hold the given ones, -1 when none does. Among rows of the same head
// dimensions full attention takes the one with the widest step (fewer steps, fewer rescales), masked attention the
// narrowest (less waste at the diagonal).
// width(row): what a step advances by. is_served(row index): the build has a kernel for the row.
template <class Row, int kRows, class Width, class IsServed>
constexpr int choose_row(Row const (&rows)[kRows], Width const& width, int64_t head_dim, int64_t head_dim_v,
                         Mask const& mask, IsServed const& is_served) {
  bool const masked = mask.window_left >= 0 || mask.window_right >= 0;
  int best = -1;
  for (int i = 0; i < kRows; ++i) {
    Row const& row = rows[i];
    if (row.head_dim < head_dim || row.head_dim_v < head_dim_v || !is_served(i)) continue;
    if (best >= 0) {
      Row const& held = rows[best];
      int const cost = row.head_dim + row.head_dim_v, held_cost = held.head_dim + held.head_dim_v;
      if (cost > held_cost) continue;
      if (cost == held_cost && (masked ? width(row) >= width(held) : width(row) <= width(held))) continue;
    }
    best = i;
  }
  return best;
}

template <class IsServed>
constexpr int choose_forward_config(int64_t head_dim, int64_t head_dim_v, Mask const& mask, IsServed const& is_served) {
  auto const width = [](ForwardConfig const& row) { return row.tile_n; };
  return choose_row(kForwardConfigs, width, head_dim, head_dim_v, mask, is_served);
}

// CTAs that load K and V for one another, with neighbouring query blocks of a head as their tiles. The last of an odd
// number of blocks has a neighbour without rows, which computes nothing: among many that does not matter. A left bound
// of the window would make blocks of keys foreign at both ends.
constexpr int choose_cluster(ForwardConfig const& row, Mask const& mask, bool is_packed, int64_t blocks) {
  constexpr int kMany = 16;
  bool const is_even = blocks % row.cluster == 0;
  return is_packed || mask.window_left >= 0 || (!is_even && blocks < kMany) ? 1 : row.cluster;
}

template <class IsServed>
constexpr int choose_forward8_config(int64_t head_dim, int64_t head_dim_v, Mask const& mask,
                                     IsServed const& is_served) {
  auto const width = [](ForwardConfig const& row) { return row.tile_n; };
  return choose_row(kForward8Configs, width, head_dim, head_dim_v, mask, is_served);
}

// Tiles of the query heads of one kv head, of which `heads` share a tile (core/row_map.hpp).
constexpr int64_t tiles_of_group(int64_t seqlen_q, int group, ForwardConfig const& config, int heads) {
  int64_t const positions = int64_t{consumer_warpgroups(config)} * make_row_map(heads).positions;
  return (seqlen_q + positions - 1) / positions * (group / heads);
}

// The number of heads above 1 that makes the fewest tiles; of equals the largest, whose tiles hold fewer positions and
// so visit fewer masked keys. 1 where no such number divides the group and fits a warpgroup.
constexpr int choose_packed_heads(int64_t seqlen_q, int group, ForwardConfig const& config) {
  int best = 1;
  int64_t fewest = INT64_MAX;
  for (int heads = 2; heads <= min_of(group, kWarpgroupRows); ++heads) {
    if (group % heads != 0 || tiles_of_group(seqlen_q, group, config, heads) > fewest) continue;
    fewest = tiles_of_group(seqlen_q, group, config, heads);
    best = heads;
  }
  return best;
}

// Whether so many heads a tile save at least an eighth of the tiles. Each costs the same time, whatever its rows are;
// for a smaller saving, as long queries have it, tiles stay those of one head.
constexpr bool packing_pays(int64_t seqlen_q, int group, ForwardConfig const& config, int heads) {
  return 8 * tiles_of_group(seqlen_q, group, config, heads) <= 7 * tiles_of_group(seqlen_q, group, config, 1);
}

template <class IsServed>
constexpr int choose_backward_config(int64_t head_dim, int64_t head_dim_v, Mask const& mask,
                                     IsServed const& is_served) {
  auto const width = [](BackwardConfig const& row) { return row.tile_m; };
  return choose_row(kBackwardConfigs, width, head_dim, head_dim_v, mask, is_served);
}

}  // namespace flashhopper
