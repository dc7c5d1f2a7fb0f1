// The producer warpgroup: warp 0 schedules tiles and streams Q, warp 1 streams dO, warp 2 loads K and V of a tile and
// stores its dK and dV, warp 3 adds dQ to the sum. Before it: kernel.hpp. Its partners: key_consumer.hpp,
// column_consumer.hpp.
#pragma once

#include <cutlass/cutlass.h>

#include "backward/args.hpp"
#include "backward/storage.hpp"
#include "core/tile_queue.hpp"
#include "core/tma.hpp"

namespace flashhopper {

// The steps of a tile: all query heads of the group, in each the query blocks that see any of its keys.
// load(first row, head, batch, chunk) brings the operands of one step.
template <class Traits, class Load>
FLASHHOPPER_DEVICE void for_each_step(BackwardArgs const& args, Tile const& tile, Load const& load) {
  int const key_begin = tile.block * Traits::kTileN;
  BlockRange const blocks = args.mask.visited_queries(key_begin, key_begin + Traits::kTileN, Traits::kTileM);
  int const end = (tile.head + 1) * args.group;
#pragma unroll 1
  for (int head = tile.head * args.group; head < end; ++head) {
    int const chunk = (tile.batch * args.heads + head) * args.m_blocks;  // fewer than 2^31, the host checked
#pragma unroll 1
    for (int m = blocks.begin; m < blocks.end; ++m) load(m * Traits::kTileM, head, tile.batch, chunk + m);
  }
}

// Q with lse, and the scheduler.
template <class Traits>
FLASHHOPPER_DEVICE void produce_queries(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  constexpr int kRowBytes = Traits::kTileM * int{sizeof(float)};
  RingPosition<Traits::kQStages> at;
  TileSource source(args.counters, args.schedule, storage);
  Tile tile = storage.tile[source.first()];
  while (tile.block >= 0) {
    for_each_step<Traits>(args, tile, [&](int row, int head, int batch, int chunk) {
      storage.q_empty[at.slot].wait(at.phase ^ 1);
      tma_load_tile<Traits::kTileM, Traits::kHeadDim, Traits::kBoxColumns>(
          args.q, storage.q_full[at.slot], L2Hint::kEvictLast, storage.q[at.slot], row, head, batch, kRowBytes);
      bulk_load(args.lse_log2 + int64_t{chunk} * Traits::kTileM, storage.q_full[at.slot], storage.lse_log2[at.slot],
                kRowBytes);
      at.advance();
    });
    tile = storage.tile[source.next()];
  }
  source.finish();
}

// dO with delta.
template <class Traits>
FLASHHOPPER_DEVICE void produce_output_gradients(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  constexpr int kRowBytes = Traits::kTileM * int{sizeof(float)};
  RingPosition<Traits::kDoutStages> at;
  TileReader<BackwardStorage<Traits>> reader{storage};
  Tile tile;
  while (reader.next(tile)) {
    for_each_step<Traits>(args, tile, [&](int row, int head, int batch, int chunk) {
      storage.dout_empty[at.slot].wait(at.phase ^ 1);
      tma_load_tile<Traits::kTileM, Traits::kHeadDimV, Traits::kBoxColumnsV>(args.dout, storage.dout_full[at.slot],
                                                                             L2Hint::kEvictLast, storage.dout[at.slot],
                                                                             row, head, batch, kRowBytes);
      bulk_load(args.delta + int64_t{chunk} * Traits::kTileM, storage.dout_full[at.slot], storage.delta[at.slot],
                kRowBytes);
      at.advance();
    });
  }
}

// By keys: the next V is fetched once dV, which is staged in its place, has left; the next K as soon as the last dQ of
// the tile has been computed, while dK leaves from the dS ring.
template <class Traits>
FLASHHOPPER_DEVICE void serve_keys_early(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  TileReader<BackwardStorage<Traits>> reader{storage};
  Tile tile, next;
  auto const load_k = [&](Tile const& of) {
    tma_load_tile<Traits::kTileN, Traits::kHeadDim, Traits::kBoxColumns>(
        args.k, storage.k_full, L2Hint::kEvictFirst, storage.k, of.block * Traits::kTileN, of.head, of.batch);
  };
  auto const load_v = [&](Tile const& of) {
    tma_load_tile<Traits::kTileN, Traits::kHeadDimV, Traits::kBoxColumnsV>(
        args.v, storage.v_full, L2Hint::kEvictFirst, storage.v, of.block * Traits::kTileN, of.head, of.batch);
  };
  bool has_next = reader.next(next);
  if (!has_next) return;
  load_k(next);
  load_v(next);
  uint32_t phase = 0;
  while (has_next) {
    tile = next;
    int const row = tile.block * Traits::kTileN;
    has_next = reader.next(next);
    storage.end.k_empty.wait(phase);
    if (has_next) load_k(next);
    storage.end.dv_full.wait(phase);
    tma_store_tile<Traits::kTileN, Traits::kHeadDimV, Traits::kBoxColumnsV>(args.dv, storage.v, row, tile.head,
                                                                            tile.batch);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
    if (has_next) load_v(next);
    storage.end.dk_full.wait(phase);
#pragma unroll 1
    for (int w = 0; w < kBackwardWarpgroups; ++w) {
      tma_store_tile<kWarpgroupRows, Traits::kHeadDim, Traits::kBoxColumns>(
          args.dk, storage.exchange[dk_tile(storage.end.last_ds, w)], row + w * kWarpgroupRows, tile.head, tile.batch);
    }
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
    storage.end.dk_empty.arrive();
    phase ^= 1;
  }
}

// By columns: K and V stay for the whole tile; dK and dV leave from where they lay.
template <class Traits>
FLASHHOPPER_DEVICE void serve_keys_and_gradients(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  TileReader<BackwardStorage<Traits>> reader{storage};
  uint32_t phase = 0;
  Tile tile;
  while (reader.next(tile)) {
    int const row = tile.block * Traits::kTileN;
    tma_load_tile<Traits::kTileN, Traits::kHeadDim, Traits::kBoxColumns>(args.k, storage.k_full, L2Hint::kEvictFirst,
                                                                         storage.k, row, tile.head, tile.batch);
    tma_load_tile<Traits::kTileN, Traits::kHeadDimV, Traits::kBoxColumnsV>(args.v, storage.v_full, L2Hint::kEvictFirst,
                                                                           storage.v, row, tile.head, tile.batch);
    storage.gradients_full.wait(phase);
    phase ^= 1;
    tma_store_tile<Traits::kTileN, Traits::kHeadDimV, Traits::kBoxColumnsV>(args.dv, storage.v, row, tile.head,
                                                                            tile.batch);
    tma_store_tile<Traits::kTileN, Traits::kHeadDim, Traits::kBoxColumns>(args.dk, storage.k, row, tile.head,
                                                                          tile.batch);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
  }
}

// Adds every step's dQ to its chunk of the float sum, as the parts arrive. Where turns are kept, key blocks add in
// descending order: the scheduler hands them out in that order, so whoever is waited for runs already; and in causal
// attention it starts at later queries, so it is ahead.
template <class Traits>
FLASHHOPPER_DEVICE void add_query_gradients(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  constexpr int kSlotFloats = dq_slot_floats(Traits::kConfig);
  uint32_t phase = 0;
  TileReader<BackwardStorage<Traits>> reader{storage};
  Tile tile;
  while (reader.next(tile)) {
    for_each_step<Traits>(args, tile, [&](int row, int, int, int chunk) {
      // The last key block that sees the row block has turn 0.
      int const turn = args.mask.visited(row, row + Traits::kTileM, Traits::kTileN).end - 1 - tile.block;
      if (args.turns != nullptr) await_value(args.turns + chunk, turn);
      float* sum = args.dq_sum + int64_t{chunk} * (Traits::kTileM * Traits::kHeadDim);
#pragma unroll 1
      for (int part = 0; part < Traits::kDqParts; ++part) {
        FLASHHOPPER_UNROLL
        for (int w = 0; w < kBackwardWarpgroups; ++w) {
          storage.dq_full[w].wait(phase);
          bulk_add(sum + w * Traits::kDqParts * kSlotFloats, storage.dq[w], kSlotFloats * int{sizeof(float)});
          cute::tma_store_arrive();
        }
        cute::tma_store_wait<1>();
        storage.dq_empty[0].arrive();
        cute::tma_store_wait<0>();
        storage.dq_empty[1].arrive();
        sum += kSlotFloats;
        phase ^= 1;
      }
      if (args.turns != nullptr) {
        bulk_wait_complete();
        release_value(args.turns + chunk, turn + 1);
      }
    });
  }
}

template <class Traits>
FLASHHOPPER_DEVICE void produce(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  int const warp = cutlass::canonical_warp_idx_sync();
  if (!cute::elect_one_sync()) return;
  if (warp == 0) produce_queries<Traits>(args, storage);
  if (warp == 1) produce_output_gradients<Traits>(args, storage);
  if constexpr (Traits::kByKeys) {
    if (warp == 2) serve_keys_early<Traits>(args, storage);
  } else {
    if (warp == 2) serve_keys_and_gradients<Traits>(args, storage);
  }
  if (warp == 3) add_query_gradients<Traits>(args, storage);
}

}  // namespace flashhopper
