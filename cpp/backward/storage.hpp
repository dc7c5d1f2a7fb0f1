// Shared memory of the backward kernel: one struct, with every barrier's arrivers and waiters.
#pragma once

#include "backward/traits.hpp"
#include "core/barriers.hpp"
#include "core/mask.hpp"
#include "core/scheduler.hpp"

namespace flashhopper {

// By keys: the tile of the dS ring that takes a warpgroup's dK, given the one that the tile's last dS still occupies.
FLASHHOPPER_DEVICE int dk_tile(int last_ds, int warpgroup) { return (last_ds + 1 + warpgroup) % 3; }

// A work tile with what its steps need of the mask and of its sequence's place.
struct BackwardTile : SequenceTile {
  BlockRange visited;   // query blocks that see any of its keys; walked once for each query head of the group
  BlockRange unmasked;  // those of them that need no test of single elements
  RowOrigin q;          // of Q and dO
  int first_chunk;      // of head 0; the next head's is QueryBlocks::count away
  int steps;
};

// What consumers need to know of a step; the query warp writes it beside Q.
struct alignas(16) Step {
  BlockMask mask;
  int is_masked;  // 0: every query sees every key
};

// By keys: how a tile ends.
struct KeyTileEnd {
  // Arrives: each consumer warp, when its part of dV, or of dK, is staged; after its last dQ of the tile. Waits: the
  // key warp.
  Barrier dv_full;
  Barrier dk_full;
  Barrier k_empty;
  // Arrives: the key warp, when dK has left. Waits: both consumer warpgroups, before they write dS there.
  Barrier dk_empty;
  int last_ds;  // where in its ring the last dS of the tile lies; written before dk_full
};
// By columns nothing of it.
struct NoTileEnd {};

template <class Traits>
struct BackwardStorage {
  using Element = typename Traits::Element;
  static constexpr int kConsumerWarps = kBackwardWarpgroups * 4;
  static constexpr int kDsTiles = Traits::kByKeys ? Traits::kExchangeTiles : 2;

  alignas(1024) Element q[Traits::kQStages][Traits::kTileM * Traits::kHeadDim];
  alignas(1024) Element dout[Traits::kDoutStages][Traits::kTileM * Traits::kHeadDimV];
  // dK and dV are staged here once K and V have been used for the last time.
  alignas(1024) Element k[Traits::kTileN * Traits::kHeadDim];
  alignas(1024) Element v[Traits::kTileN * Traits::kHeadDimV];
  // By keys: dS^T of three steps. By columns: dS^T of two steps, then P^T of two steps.
  alignas(1024) Element exchange[Traits::kExchangeTiles][Traits::kTileN * Traits::kTileM];
  // dQ of a step, or half of its columns, in the order of the warpgroup's registers.
  alignas(128) float dq[kBackwardWarpgroups][dq_slot_floats(Traits::kConfig)];
  Step step[Traits::kQStages];
  alignas(16) float lse_log2[Traits::kQStages][Traits::kTileM];
  alignas(16) float delta[Traits::kDoutStages][Traits::kTileM];

  // Arrives: TMA through the query warp (Q with lse) and the warp itself, when it has written what the step is; TMA
  // through the output-gradient warp (dO with delta). Waits: both consumer warpgroups.
  Barrier q_full[Traits::kQStages];
  Barrier dout_full[Traits::kDoutStages];
  // Arrives: each consumer warp. Waits: the query and the output-gradient warp.
  Barrier q_empty[Traits::kQStages];
  Barrier dout_empty[Traits::kDoutStages];
  // Arrives: TMA through the key warp. Waits: both consumer warpgroups.
  Barrier k_full;
  Barrier v_full;
  // By columns only. Arrives: each consumer warp, when its part of dK and dV lies in the slots of K and V. Waits: the
  // key warp.
  Barrier gradients_full;
  // By columns. Arrives: each warp of the warpgroup that writes the tile (P: 0, dS: 1). Waits: the other one, for dS
  // both. By keys, of dS alone: all consumer warps arrive, each for its part, and wait. That a tile may be written
  // again needs no barrier: its readers have finished with it before they arrive for the next step (by keys: the next
  // but one), which its writer waits for.
  Barrier p_full[2];
  Barrier ds_full[kDsTiles];
  // Arrives: each warp of the consumer warpgroup. Waits: the dQ warp.
  Barrier dq_full[kBackwardWarpgroups];
  // Arrives: the dQ warp, when the slot has been read. Waits: the consumer warpgroup.
  Barrier dq_empty[kBackwardWarpgroups];
  // Arrives: the query warp, which runs the scheduler. Waits: the other producer warps and the consumers.
  Barrier tile_full[kTileSlots];
  // Arrives: each of them. Waits: the query warp.
  Barrier tile_empty[kTileSlots];

  BackwardTile tile[kTileSlots];  // block < 0: no more work
  [[no_unique_address]] std::conditional_t<Traits::kByKeys, KeyTileEnd, NoTileEnd> end;

  FLASHHOPPER_DEVICE void init_barriers() {
    for (int s = 0; s < Traits::kQStages; ++s) {
      q_full[s].init(2);
      q_empty[s].init(kConsumerWarps);
    }
    for (int s = 0; s < Traits::kDoutStages; ++s) {
      dout_full[s].init(1);
      dout_empty[s].init(kConsumerWarps);
    }
    for (int w = 0; w < kBackwardWarpgroups; ++w) {
      dq_full[w].init(4);
      dq_empty[w].init(1);
    }
    k_full.init(1);
    v_full.init(1);
    gradients_full.init(kConsumerWarps);
    if constexpr (Traits::kByKeys) {
      end.dv_full.init(kConsumerWarps);
      end.dk_full.init(kConsumerWarps);
      end.k_empty.init(kConsumerWarps);
      end.dk_empty.init(1);
    }
    for (int s = 0; s < 2; ++s) p_full[s].init(4);
    for (int s = 0; s < kDsTiles; ++s) ds_full[s].init(Traits::kByKeys ? kConsumerWarps : 4);
    for (int s = 0; s < kTileSlots; ++s) {
      tile_full[s].init(1);
      tile_empty[s].init(kConsumerWarps + 3);
    }
  }
};

}  // namespace flashhopper
