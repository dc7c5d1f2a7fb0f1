// Which row of a config table serves a problem, and how many query heads share a forward tile. docs/lab/forward.md has
// the measurements behind the rules.
#pragma once

#include <numeric>

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

// What a step costs whose keys two CTAs load for one another, beside one whose keys a CTA loads alone.
inline constexpr double kSharedStep = 0.96;

// How far, on average, the next edge of a block of keys lies behind a bound that moves by `step` from tile to tile:
// where it stands in a block takes all values of one remainder.
constexpr int to_block_edge(int bound, int step, int tile_n) {
  int const unit = std::gcd(step, tile_n), rest = bound % unit;
  return (tile_n - unit) / 2 + (rest > 0 ? unit - rest : -rest);
}

// What a tile costs, in keys that it multiplies with or waits for: those that rows of one in the middle and of its
// neighbours in the cluster see, which is the average of all, what they visit beside them at bounds of the mask, and
// one step for the tile's start and end.
constexpr double cost_of_tile(Mask const& mask, ForwardConfig const& row, int positions, int cluster) {
  int const together = positions * cluster, first = mask.query_begin(0);  // rows before it see nothing
  int const begin = max_of(0, first + (mask.seqlen_q - first) / 2 - together / 2);
  int const end = min_of(mask.seqlen_q, begin + together);
  int keys = max_of(0, mask.key_end(end - 1) - mask.key_begin(begin)) + row.tile_n;
  if (mask.window_right >= 0) keys += to_block_edge(mask.shift() + mask.window_right, together, row.tile_n);
  if (mask.window_left >= 0) keys += to_block_edge(mask.window_left - mask.shift(), together, row.tile_n);
  return cluster > 1 ? keys * kSharedStep : keys;
}

// CTAs that load K and V for one another, with neighbouring query blocks of a head as their tiles of so many positions.
// The last of an odd number of blocks has a neighbour without rows, which computes nothing: among many that does not
// matter. lengths_vary: the mask is that of one average sequence of many, of which half have such a neighbour. Behind a
// right bound a tile waits for keys that only its neighbour's rows see, too long where it sees few itself. A left bound
// would make blocks of keys foreign at both ends.
constexpr int choose_cluster(ForwardConfig const& row, Mask const& mask, bool lengths_vary, int positions) {
  constexpr int kMany = 16;
  if (row.cluster == 1 || mask.window_left >= 0) return 1;
  int const blocks = ceil_div(mask.seqlen_q, positions);
  if ((lengths_vary || blocks % row.cluster != 0) && blocks < kMany) return 1;
  return cost_of_tile(mask, row, positions, row.cluster) < cost_of_tile(mask, row, positions, 1) ? row.cluster : 1;
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

// What these tiles cost together. Tiles of more heads hold fewer positions, which see fewer different keys; a number of
// heads that does not divide a warpgroup's rows leaves some of them unused, and its tiles seldom end where a block
// ends.
constexpr double cost_of_group(Mask const& mask, int group, ForwardConfig const& config, int heads) {
  int const positions = consumer_warpgroups(config) * make_row_map(heads).positions;
  double const tile = cost_of_tile(mask, config, positions, choose_cluster(config, mask, false, positions));
  return static_cast<double>(tiles_of_group(mask.seqlen_q, group, config, heads)) * tile;
}

// The number of heads above 1 of the least cost, of equals the largest. 1 where no such number divides the group and
// fits a warpgroup.
constexpr int choose_packed_heads(Mask const& mask, int group, ForwardConfig const& config) {
  int best = 1;
  double least = 0;
  for (int heads = 2; heads <= min_of(group, kWarpgroupRows); ++heads) {
    if (group % heads != 0) continue;
    double const cost = cost_of_group(mask, group, config, heads);
    if (best > 1 && cost > least) continue;
    best = heads;
    least = cost;
  }
  return best;
}

// Whether so many heads a tile cost less than tiles of one head, by however little: where it saves nothing, sharing was
// never slower. Full attention saves tiles, with short queries alone, or finds neighbours; a mask saves keys with any.
constexpr bool packing_pays(Mask const& mask, int group, ForwardConfig const& config, int heads) {
  return cost_of_group(mask, group, config, heads) < cost_of_group(mask, group, config, 1);
}

template <class IsServed>
constexpr int choose_backward_config(int64_t head_dim, int64_t head_dim_v, Mask const& mask,
                                     IsServed const& is_served) {
  auto const width = [](BackwardConfig const& row) { return row.tile_m; };
  return choose_row(kBackwardConfigs, width, head_dim, head_dim_v, mask, is_served);
}

}  // namespace flashhopper
