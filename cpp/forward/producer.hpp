// The producer warpgroup: warp 0 schedules tiles and streams K and V, warp 1 + w serves consumer warpgroup w by storing
// its output and loading its next queries. Before it: kernel.hpp. Its partner: consumer.hpp.
#pragma once

#include <cutlass/cutlass.h>

#include "core/tile_queue.hpp"
#include "core/tma.hpp"
#include "forward/args.hpp"
#include "forward/storage.hpp"

namespace flashhopper {

// Streams the key blocks of every tile, last block first. V trails K by one block because that is the order of use,
// also across tiles: the first keys of the next tile arrive while this one still multiplies its last values.
template <class Traits>
FLASHHOPPER_DEVICE void produce_keys_and_values(ForwardArgs const& args, ForwardStorage<Traits>& storage) {
  RingPosition<Traits::kStages> at_k, at_v;
  int v_row = -1, v_head = 0, v_batch = 0;  // the value block that is due, none while v_row < 0
  auto load_due_values = [&] {
    if (v_row < 0) return;
    storage.v_empty[at_v.slot].wait(at_v.phase ^ 1);
    tma_load_tile<Traits::kTileN, Traits::kHeadDimV, Traits::kBoxColumnsV>(
        args.v, storage.v_full[at_v.slot], L2Hint::kEvictLast, storage.v[at_v.slot], v_row, v_head, v_batch);
    at_v.advance();
    v_row = -1;
  };

  TileSource<ForwardStorage<Traits>> source{args.workspace, args.schedule, storage};
  Tile tile = source.first();
  while (tile.block >= 0) {
    int const row_begin = tile.block * Traits::kTileM;
    BlockRange const blocks = args.mask.visited(row_begin, row_begin + Traits::kTileM, Traits::kTileN);
    int const kv_head = tile.head / args.group;
    // A tile without keys brings no block that the last values could trail: consumers would wait for them for ever.
    if (blocks.size() == 0) load_due_values();
    for (int n = blocks.end - 1; n >= blocks.begin; --n) {
      storage.k_empty[at_k.slot].wait(at_k.phase ^ 1);
      tma_load_tile<Traits::kTileN, Traits::kHeadDim, Traits::kBoxColumns>(args.k, storage.k_full[at_k.slot],
                                                                           L2Hint::kEvictLast, storage.k[at_k.slot],
                                                                           n * Traits::kTileN, kv_head, tile.batch);
      at_k.advance();
      load_due_values();
      v_row = n * Traits::kTileN;
      v_head = kv_head;
      v_batch = tile.batch;
    }
    // As late as possible: a place taken earlier would wait behind this tile while other CTAs run dry. The blocks
    // loaded ahead hide the latency.
    tile = source.next();
  }
  load_due_values();
  source.finish();
}

// For each tile: when the output that occupied the Q slot is complete, store it; once it is read, load the new queries.
template <class Traits>
FLASHHOPPER_DEVICE void serve_queries_and_outputs(ForwardArgs const& args, ForwardStorage<Traits>& storage,
                                                  int warpgroup) {
  Tile previous[Traits::kQStages];  // whose output a slot holds
  RingPosition<Traits::kQStages> at;
  auto store_output = [&](Tile const& tile) {
    storage.o_full[warpgroup][at.slot].wait(at.phase ^ 1);
    tma_store_tile<kWarpgroupRows, Traits::kHeadDimV, Traits::kBoxColumnsV>(
        args.out, storage.q[warpgroup][at.slot], tile.block * Traits::kTileM + warpgroup * kWarpgroupRows, tile.head,
        tile.batch);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
  };

  TileReader<ForwardStorage<Traits>> reader{storage};
  int count = 0;
  Tile tile;
  for (; reader.next(tile); ++count) {
    if (count >= Traits::kQStages) store_output(previous[Traits::kQStages - 1]);
    tma_load_tile<kWarpgroupRows, Traits::kHeadDim, Traits::kBoxColumns>(
        args.q, storage.q_full[warpgroup][at.slot], L2Hint::kEvictFirst, storage.q[warpgroup][at.slot],
        tile.block * Traits::kTileM + warpgroup * kWarpgroupRows, tile.head, tile.batch);
    FLASHHOPPER_UNROLL
    for (int s = Traits::kQStages - 1; s > 0; --s) previous[s] = previous[s - 1];
    previous[0] = tile;
    at.advance();
  }
  // The outputs still in flight, oldest first.
  FLASHHOPPER_UNROLL
  for (int s = Traits::kQStages; s > 0; --s) {
    if (count >= s) store_output(previous[s - 1]);
    at.advance();
  }
}

template <class Traits>
FLASHHOPPER_DEVICE void produce(ForwardArgs const& args, ForwardStorage<Traits>& storage) {
  int const warp = cutlass::canonical_warp_idx_sync();
  if (!cute::elect_one_sync()) return;
  if (warp == 0) {
    produce_keys_and_values<Traits>(args, storage);
  } else if (warp <= Traits::kWarpgroups) {
    serve_queries_and_outputs<Traits>(args, storage, warp - 1);
  }
}

}  // namespace flashhopper
