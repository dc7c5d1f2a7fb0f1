// Shared memory of the forward kernel: one struct, with every barrier's arrivers and waiters.
#pragma once

#include "core/barriers.hpp"
#include "core/cluster.hpp"
#include "core/scheduler.hpp"
#include "forward/traits.hpp"

namespace flashhopper {

// Where the keys of a tile's sequence and head lie.
struct KeyPlace {
  RowOrigin origin;
  int kv_head;
};

// 8 bits alone: which row of the scales of K and V is a tile's, and where in it those of its sequence begin. V, whose
// keys are padded to blocks, begins at the same block.
struct ScalePlace {
  int head;
  int first_block;
};

// What a step of 8 bits multiplies by. The output is summed in units of the scale of the values added last.
struct alignas(16) StepScales {
  float k;       // of the keys
  float change;  // from the unit of the step before to that of this one
  float v;       // the unit: the scale of the values
};

// 8 bits alone: what the rows of one warpgroup bring along, loaded a tile ahead so that no consumer waits for memory.
template <int kHeadDimV>
struct RowFactors {
  float query[kWarpgroupRows];      // turns a row's raw scores into base 2, apart from the key block's scale
  float lse_shift[kWarpgroupRows];  // 0 where there is none
  float v_mean[kHeadDimV];          // 0 where there is none, and past the tensor's columns
};
template <>
struct RowFactors<0> {};

template <class Traits>
struct ForwardStorage {
  using Element = typename Traits::Element;
  using ElementV = typename Traits::ElementV;
  static constexpr int kQueryElements = kWarpgroupRows * Traits::kHeadDim;

  alignas(1024) Element q[Traits::kWarpgroups][Traits::kQStages][kQueryElements];
  alignas(1024) Element k[Traits::kStages][Traits::kTileN * Traits::kHeadDim];
  alignas(1024) ElementV v[Traits::kStages][Traits::kTileN * Traits::kRowsVt];

  // Arrives: TMA through the loading warp, behind its row factors. Waits: the consumer warpgroup.
  Barrier q_full[Traits::kWarpgroups][Traits::kQStages];
  // Arrives: each warp of the consumer warpgroup, after its last Q K^T; in 8 bits at the end of the tile, which reads
  // row factors. Waits: the warp that loads the queries.
  Barrier q_empty[Traits::kWarpgroups][Traits::kQStages];
  // Arrives: TMA through the key-value warp. Waits: all consumer warpgroups.
  Barrier k_full[Traits::kStages];
  Barrier v_full[Traits::kStages];
  // Arrives: each consumer warp of all CTAs that share keys. Waits: the key-value warp.
  Barrier k_empty[Traits::kStages];
  Barrier v_empty[Traits::kStages];
  // Arrives: the key-value warp, which runs the scheduler. Waits: query warps and consumers.
  Barrier tile_full[kTileSlots];
  // Arrives: each query warp and each consumer warp. Waits: the key-value warp.
  Barrier tile_empty[kTileSlots];

  SequenceTile tile[kTileSlots];        // block < 0: no more work
  KeyPlace keys[kTileSlots];            // of each tile; the key-value warp alone reads and writes them
  ScalePlace scale_places[kTileSlots];  // likewise
  Mailbox mailbox;                      // of the scheduler, where CTAs share keys
  // 8 bits alone: of the key block in a slot of K and the values that belong to it. There with K.
  StepScales scales[Traits::kStages];
  RowFactors<Traits::kIs8Bit ? Traits::kHeadDimV : 0> rows[Traits::kWarpgroups][Traits::kQStages];  // there with Q

  // The columns that sum probabilities: the first all ones, the others zeros. TMA never writes them.
  FLASHHOPPER_DEVICE void fill_sum_columns() {
    constexpr int kBytes = Traits::kTileN * Traits::kSumColumns;
    constexpr uint32_t kOnes = 0x38383838u;  // e4m3
    for (int i = static_cast<int>(threadIdx.x); i < Traits::kStages * kBytes / 4; i += Traits::kThreads) {
      int const stage = i / (kBytes / 4), word = i % (kBytes / 4);
      auto* const columns = reinterpret_cast<uint32_t*>(v[stage] + Traits::kTileN * Traits::kHeadDimV);
      columns[word] = word < Traits::kTileN / 4 ? kOnes : 0;
    }
    fence_async_shared();
  }

  // cluster: CTAs that share keys.
  FLASHHOPPER_DEVICE void init_barriers(int cluster) {
    constexpr int kConsumerWarps = Traits::kWarpgroups * 4;
    for (int w = 0; w < Traits::kWarpgroups; ++w) {
      for (int s = 0; s < Traits::kQStages; ++s) {
        q_full[w][s].init(1);
        q_empty[w][s].init(4);
      }
    }
    for (int s = 0; s < Traits::kStages; ++s) {
      k_full[s].init(1);
      v_full[s].init(1);
      k_empty[s].init(kConsumerWarps * cluster);
      v_empty[s].init(kConsumerWarps * cluster);
    }
    mailbox.init();
    for (int s = 0; s < kTileSlots; ++s) {
      tile_full[s].init(1);
      tile_empty[s].init(kConsumerWarps + Traits::kWarpgroups);
    }
  }
};

}  // namespace flashhopper
