// The table of 8-bit forward configurations: rows of the same kind as those of config.hpp, with one-byte operands.
// Before it: heuristics.hpp picks a row. After it: forward/traits8.hpp turns a row into types.
#pragma once

#include "core/config.hpp"

namespace flashhopper {

// Keys that share a scale of K and of V: one step or several, so that a step multiplies by one pair of scales.
inline constexpr int kScaleBlock = 128;

// With overlap O and the product of a whole block with V are both in registers. Without, P V is done in parts of
// partial_columns, each added to O while the next is multiplied, two of them in the registers that scores had. Turns
// pay where P V overlaps, and only with one format of scores each: measured (docs/lab/forward8.md, 18), not understood.
// clang-format off: one row a line, cmake/instances.cmake reads them.
inline constexpr ForwardConfig kForward8Configs[] = {
    {.name = "fwd8_hd64_m192_n128", .head_dim = 64, .head_dim_v = 64, .tile_m = 192, .tile_n = 128, .stages = 4, .q_stages = 2, .ping_pong = false, .element_bytes = 1, .partial_columns = 64, .overlap = false},
    {.name = "fwd8_hd96_m128_n128", .head_dim = 96, .head_dim_v = 96, .tile_m = 128, .tile_n = 128, .stages = 4, .q_stages = 2, .ping_pong = false, .ping_pong_int8 = true, .element_bytes = 1, .partial_columns = 96},
    {.name = "fwd8_hd128_m128_n128", .head_dim = 128, .head_dim_v = 128, .tile_m = 128, .tile_n = 128, .stages = 4, .q_stages = 2, .ping_pong = true, .element_bytes = 1, .partial_columns = 128},
    {.name = "fwd8_hd192_m128_n128", .head_dim = 192, .head_dim_v = 192, .tile_m = 128, .tile_n = 128, .stages = 3, .q_stages = 2, .ping_pong = false, .element_bytes = 1, .partial_columns = 96, .overlap = false},
    {.name = "fwd8_hd256_m128_n128", .head_dim = 256, .head_dim_v = 256, .tile_m = 128, .tile_n = 128, .stages = 2, .q_stages = 2, .ping_pong = false, .element_bytes = 1, .partial_columns = 64, .overlap = false},
};
// clang-format on
inline constexpr int kForward8ConfigCount = sizeof(kForward8Configs) / sizeof(kForward8Configs[0]);

constexpr bool is_valid8(ForwardConfig const& config) {
  return is_valid(config) && config.element_bytes == 1 && kScaleBlock % config.tile_n == 0 &&
         config.partial_columns > 0 && config.head_dim_v % config.partial_columns == 0 &&
         (!config.overlap || config.partial_columns == config.head_dim_v);
}

// The row of this name, or -1.
constexpr int find_forward8_config(std::string_view name) {
  for (int i = 0; i < kForward8ConfigCount; ++i) {
    if (kForward8Configs[i].name == name) return i;
  }
  return -1;
}

constexpr bool all_forward8_configs_valid() {
  for (auto const& config : kForward8Configs) {
    if (!is_valid8(config)) return false;
  }
  return true;
}
static_assert(all_forward8_configs_valid(), "a row of kForward8Configs breaks is_valid8()");

}  // namespace flashhopper
