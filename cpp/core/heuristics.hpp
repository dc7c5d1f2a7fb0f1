// Which row of the config table serves a problem. docs/lab/forward.md has the measurements behind the rules.
#pragma once

#include "core/backward_config.hpp"
#include "core/mask.hpp"

namespace flashhopper {

// The smallest computed head dimensions that hold the given ones, -1 when none does.
// Among rows of the same head dimensions full attention takes the one with the widest key tile (fewer steps, fewer
// rescales), masked attention the narrowest (fewer wasted keys at the diagonal).
// is_served(row index): the build has a kernel for the row.
template <class IsServed>
constexpr int choose_forward_config(int64_t head_dim, int64_t head_dim_v, Mask const& mask, IsServed const& is_served) {
  bool const masked = mask.window_left >= 0 || mask.window_right >= 0;
  int best = -1;
  for (int i = 0; i < kForwardConfigCount; ++i) {
    ForwardConfig const& row = kForwardConfigs[i];
    if (row.head_dim < head_dim || row.head_dim_v < head_dim_v || !is_served(i)) continue;
    if (best >= 0) {
      ForwardConfig const& held = kForwardConfigs[best];
      int const cost = row.head_dim + row.head_dim_v, held_cost = held.head_dim + held.head_dim_v;
      if (cost > held_cost) continue;
      if (cost == held_cost && (masked ? row.tile_n >= held.tile_n : row.tile_n <= held.tile_n)) continue;
    }
    best = i;
  }
  return best;
}

// The backward's, by the same rule: the smallest computed head dimensions; among equals full attention takes the widest
// query step and masked attention the narrowest.
template <class IsServed>
constexpr int choose_backward_config(int64_t head_dim, int64_t head_dim_v, Mask const& mask,
                                     IsServed const& is_served) {
  bool const masked = mask.window_left >= 0 || mask.window_right >= 0;
  int best = -1;
  for (int i = 0; i < kBackwardConfigCount; ++i) {
    BackwardConfig const& row = kBackwardConfigs[i];
    if (row.head_dim < head_dim || row.head_dim_v < head_dim_v || !is_served(i)) continue;
    if (best >= 0) {
      BackwardConfig const& held = kBackwardConfigs[best];
      int const cost = row.head_dim + row.head_dim_v, held_cost = held.head_dim + held.head_dim_v;
      if (cost > held_cost) continue;
      if (cost == held_cost && (masked ? row.tile_m >= held.tile_m : row.tile_m <= held.tile_m)) continue;
    }
    best = i;
  }
  return best;
}

}  // namespace flashhopper
