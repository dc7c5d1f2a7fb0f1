// The table of backward tile configurations and everything that follows from a row. The forward's table: config.hpp.
// Before it: backward dispatch picks a row. After it: backward/traits.hpp turns a row into types.
#pragma once

#include "core/config.hpp"

namespace flashhopper {

// How the two consumer warpgroups share a tile of keys.
enum class Share {
  kKeys,     // each owns 64 of 128 keys: its dK and dV, and its part of the scores in registers only
  kColumns,  // 64 keys, of whose dK and dV each owns half of the columns; one computes the scores, one their gradient
};

// One row: what was chosen by measurement. Everything else is derived below.
struct BackwardConfig {
  std::string_view name;
  int head_dim;     // of q and k as computed; smaller sizes are zero-filled by TMA
  int head_dim_v;   // of v, out and their gradients as computed
  int tile_m;       // query rows of a step
  int tile_n;       // keys of a work tile
  int q_stages;     // depth of the Q ring
  int dout_stages;  // depth of the dO ring; 1 where shared memory does not suffice
  Share share;
  bool scores_first = false;  // by keys: the next step's scores are issued before a step's dQ leaves the registers
};

// clang-format off: one row a line, cmake/instances.cmake reads them.
inline constexpr BackwardConfig kBackwardConfigs[] = {
    {.name = "bwd_hd64_m128_n128", .head_dim = 64, .head_dim_v = 64, .tile_m = 128, .tile_n = 128, .q_stages = 2, .dout_stages = 2, .share = Share::kKeys, .scores_first = true},
    {.name = "bwd_hd128_m64_n128", .head_dim = 128, .head_dim_v = 128, .tile_m = 64, .tile_n = 128, .q_stages = 2, .dout_stages = 2, .share = Share::kKeys},
    {.name = "bwd_hd192_dv128_m64_n64", .head_dim = 192, .head_dim_v = 128, .tile_m = 64, .tile_n = 64, .q_stages = 2, .dout_stages = 2, .share = Share::kColumns},
    {.name = "bwd_hd192_m64_n64", .head_dim = 192, .head_dim_v = 192, .tile_m = 64, .tile_n = 64, .q_stages = 2, .dout_stages = 2, .share = Share::kColumns},
    {.name = "bwd_hd256_m64_n64", .head_dim = 256, .head_dim_v = 256, .tile_m = 64, .tile_n = 64, .q_stages = 2, .dout_stages = 1, .share = Share::kColumns},
};
// clang-format on
inline constexpr int kBackwardConfigCount = sizeof(kBackwardConfigs) / sizeof(kBackwardConfigs[0]);

inline constexpr int kBackwardWarpgroups = 2;
inline constexpr int kBackwardThreads = (kBackwardWarpgroups + 1) * kWarpgroupThreads;
// setmaxnreg values. Together they are what the launch gives, 168 for each of 384 threads: one more would wait for
// ever.
inline constexpr int kBackwardProducerRegisters = 24;
inline constexpr int kBackwardConsumerRegisters = 240;
static_assert(kBackwardProducerRegisters + kBackwardWarpgroups * kBackwardConsumerRegisters ==
              (kBackwardWarpgroups + 1) * 168);

// Tiles of scores that pass through shared memory. By keys three of dS, so that the warpgroups may be a step apart; by
// columns two of dS and two of P.
constexpr int exchange_tiles(BackwardConfig const& config) { return config.share == Share::kKeys ? 3 : 4; }

// 16-bit elements of one TMA box row. Where warpgroups share columns, half of the head dimension is whole boxes.
constexpr int box_columns(BackwardConfig const& config, int head_dim) {
  return head_dim % (config.share == Share::kKeys ? 64 : 128) == 0 ? 64 : 32;
}

// dK of a tile leaves as the warpgroups stage it: by keys each its own rows.
constexpr int dk_box_rows(BackwardConfig const& config) {
  return config.share == Share::kKeys ? config.tile_n / kBackwardWarpgroups : config.tile_n;
}

// dQ of a step leaves each warpgroup through one slot, in one part or, where that is whole boxes of K, in halves of its
// columns.
constexpr int dq_parts(BackwardConfig const& config) {
  return config.share == Share::kColumns && config.head_dim / 4 % box_columns(config, config.head_dim) == 0 ? 2 : 1;
}
constexpr int dq_slot_floats(BackwardConfig const& config) {
  return config.tile_m * config.head_dim / (kBackwardWarpgroups * dq_parts(config));
}

constexpr int64_t smem_bytes(BackwardConfig const& config) {
  int64_t const element_bytes = 2, float_bytes = 4;
  int64_t const q = int64_t{config.q_stages} * config.tile_m * config.head_dim;
  int64_t const dout = int64_t{config.dout_stages} * config.tile_m * config.head_dim_v;
  int64_t const kv = int64_t{config.tile_n} * (config.head_dim + config.head_dim_v);
  int64_t const exchange = int64_t{exchange_tiles(config)} * config.tile_m * config.tile_n;
  int64_t const row_values = int64_t{config.q_stages + config.dout_stages} * config.tile_m;  // lse and delta
  int64_t const dq = int64_t{kBackwardWarpgroups} * dq_slot_floats(config);
  int64_t const used = (q + dout + kv + exchange) * element_bytes + (row_values + dq) * float_bytes;
  constexpr int64_t kAlignment = 1024;  // of the storage struct, whose size is a multiple of it
  return (used + kAlignment - 1) / kAlignment * kAlignment + kBarrierBytes;
}

constexpr bool is_valid(BackwardConfig const& config) {
  bool const by_keys = config.share == Share::kKeys;
  // Of one thread at the fullest moment: dK and dV, scores and their gradient in float, half of them as operands too.
  int const columns = by_keys ? config.head_dim + config.head_dim_v : (config.head_dim + config.head_dim_v) / 2;
  int const row_registers = columns / 2 + config.tile_m * 5 / 4;
  return smem_bytes(config) <= kMaxSmemBytes && config.tile_n == (by_keys ? 128 : 64) &&
         (config.tile_m == 64 || (by_keys && config.tile_m == 128)) && config.head_dim_v <= config.head_dim &&
         (by_keys || !config.scores_first) && config.head_dim % 64 == 0 && config.head_dim_v % 64 == 0 &&
         row_registers <= kBackwardConsumerRegisters;
}

// The row of this name, or -1.
constexpr int find_backward_config(std::string_view name) {
  for (int i = 0; i < kBackwardConfigCount; ++i) {
    if (kBackwardConfigs[i].name == name) return i;
  }
  return -1;
}

constexpr bool all_backward_configs_valid() {
  for (auto const& config : kBackwardConfigs) {
    if (!is_valid(config)) return false;
  }
  return true;
}
static_assert(all_backward_configs_valid(), "a row of kBackwardConfigs breaks is_valid()");

}  // namespace flashhopper
