// The table of forward tile configurations and everything that follows from a row: threads, registers, shared memory.
// Before it: heuristics.hpp picks a row. After it: forward/traits.hpp turns a row into types.
#pragma once

#include <cstdint>
#include <string_view>

namespace flashhopper {

inline constexpr int kMaxSmemBytes = 227 * 1024;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;  // rows of one wgmma, and of the query slice that one consumer warpgroup owns
inline constexpr int kTileSlots = 4;       // work tiles in flight between the scheduler and its readers
inline constexpr int kBarrierBytes = 1024;  // room for all mbarriers and tile slots

// One row: what was chosen by measurement. Everything else is derived below.
struct ForwardConfig {
  std::string_view name;
  int head_dim;    // of q and k as computed; smaller sizes are zero-filled by TMA
  int head_dim_v;  // of v and out as computed
  int tile_m;      // query rows of a work tile, kWarpgroupRows for each consumer warpgroup
  int tile_n;      // keys of one step
  int stages;      // depth of the K ring and of the V ring
  int q_stages;    // 2: the next tile's Q is loaded during this one, 1: where shared memory does not suffice
  bool ping_pong;  // consumer warpgroups take turns at issuing their GEMMs
  bool ping_pong_int8 = false;  // the same of 8 bits with int8 queries and keys
  int element_bytes = 2;        // of q, k and v
  int partial_columns = 0;  // columns of V whose product with one key block has an accumulator of its own; 0: none has
  bool overlap = true;  // a step's softmax runs under the P V of the step before; false: other warpgroups fill the gaps
  int cluster = 1;      // CTAs that load K and V for one another where they can (core/cluster.hpp)
};

// clang-format off: one row a line, cmake/instances.cmake reads them.
inline constexpr ForwardConfig kForwardConfigs[] = {
    {.name = "fwd_hd64_m192_n128", .head_dim = 64, .head_dim_v = 64, .tile_m = 192, .tile_n = 128, .stages = 2, .q_stages = 2, .ping_pong = true},
    {.name = "fwd_hd96_m128_n160", .head_dim = 96, .head_dim_v = 96, .tile_m = 128, .tile_n = 160, .stages = 2, .q_stages = 2, .ping_pong = true},
    {.name = "fwd_hd128_m128_n128", .head_dim = 128, .head_dim_v = 128, .tile_m = 128, .tile_n = 128, .stages = 2, .q_stages = 2, .ping_pong = true, .cluster = 2},
    {.name = "fwd_hd128_m128_n160", .head_dim = 128, .head_dim_v = 128, .tile_m = 128, .tile_n = 160, .stages = 2, .q_stages = 2, .ping_pong = false, .cluster = 2},
    {.name = "fwd_hd192_m128_n112", .head_dim = 192, .head_dim_v = 192, .tile_m = 128, .tile_n = 112, .stages = 2, .q_stages = 1, .ping_pong = false, .cluster = 2},
    {.name = "fwd_hd192_dv128_m128_n128", .head_dim = 192, .head_dim_v = 128, .tile_m = 128, .tile_n = 128, .stages = 2, .q_stages = 1, .ping_pong = false, .cluster = 2},
    {.name = "fwd_hd256_m128_n80", .head_dim = 256, .head_dim_v = 256, .tile_m = 128, .tile_n = 80, .stages = 2, .q_stages = 1, .ping_pong = false, .cluster = 2},
};
// clang-format on
inline constexpr int kForwardConfigCount = sizeof(kForwardConfigs) / sizeof(kForwardConfigs[0]);

constexpr int consumer_warpgroups(ForwardConfig const& config) { return config.tile_m / kWarpgroupRows; }
constexpr int threads(ForwardConfig const& config) { return (consumer_warpgroups(config) + 1) * kWarpgroupThreads; }
// setmaxnreg values; 64 K registers a multiprocessor, in steps of 8 a thread.
constexpr int producer_registers(ForwardConfig const& config) {
  return consumer_warpgroups(config) == 3 ? 32 : config.cluster > 1 ? 40 : 24;
}
constexpr int consumer_registers(ForwardConfig const& config) {
  return consumer_warpgroups(config) == 3 ? 160 : config.cluster > 1 ? 232 : 240;
}

// Elements of one TMA box row: a 128-byte swizzle row where the head dimension allows, else 64 or 32 bytes.
constexpr int box_columns(int head_dim, int element_bytes = 2) {
  int const bytes = head_dim * element_bytes;
  return (bytes % 128 == 0 ? 128 : bytes % 64 == 0 ? 64 : 32) / element_bytes;
}

// 8 bits: eight columns more than V has, a one and zeros, so that the accumulator of the last of the products with V
// also holds the sum of the probabilities as they were rounded.
constexpr int sum_columns(ForwardConfig const& config) { return config.partial_columns > 0 ? 8 : 0; }

// 8 bits: what the rows of the tiles in flight bring along (RowFactors in forward/storage.hpp), in whole KiB because
// that is how the struct is padded.
constexpr int64_t row_factor_bytes(ForwardConfig const& config) {
  if (config.partial_columns == 0) return 0;
  int64_t const floats = config.q_stages * int64_t{2 * config.tile_m + consumer_warpgroups(config) * config.head_dim_v};
  return (floats * 4 + 1023) / 1024 * 1024;
}

constexpr int64_t smem_bytes(ForwardConfig const& config) {
  int64_t const q = int64_t{config.q_stages} * config.tile_m * config.head_dim;
  int64_t const kv =
      int64_t{config.stages} * config.tile_n * (config.head_dim + config.head_dim_v + sum_columns(config));
  return (q + kv) * config.element_bytes + row_factor_bytes(config) + kBarrierBytes;
}

constexpr bool is_valid(ForwardConfig const& config) {
  // S, P, O and what of P V has its own accumulator, in one thread.
  int const row_registers = config.tile_n / 2 + config.tile_n * config.element_bytes / 8 + config.head_dim_v / 2 +
                            (config.overlap ? config.partial_columns / 2 : 0);
  return smem_bytes(config) <= kMaxSmemBytes && config.tile_m % kWarpgroupRows == 0 && config.tile_n % 16 == 0 &&
         config.tile_n <= 256 && config.head_dim_v <= config.head_dim && config.head_dim % 32 == 0 &&
         config.head_dim_v % 32 == 0 && (consumer_warpgroups(config) == 2 || consumer_warpgroups(config) == 3) &&
         config.cluster >= 1 && config.cluster <= 2 && row_registers <= consumer_registers(config) - 24;
}

// The row of this name, or -1.
constexpr int find_forward_config(std::string_view name) {
  for (int i = 0; i < kForwardConfigCount; ++i) {
    if (kForwardConfigs[i].name == name) return i;
  }
  return -1;
}

constexpr bool all_forward_configs_valid() {
  for (auto const& config : kForwardConfigs) {
    if (!is_valid(config)) return false;
  }
  return true;
}
static_assert(all_forward_configs_valid(), "a row of kForwardConfigs breaks is_valid()");

}  // namespace flashhopper
