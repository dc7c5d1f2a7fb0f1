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

// The work tiles as the queue hands them out. Producers have few registers: a tile is made in its slot.
template <class Traits>
struct KeyTiles {
  BackwardArgs const& args;

  FLASHHOPPER_DEVICE int total() const { return args.schedule.total(); }
  FLASHHOPPER_DEVICE void put(int place, BackwardTile& tile) const {
    args.schedule.put(place, tile);
    int const begin = tile.block * Traits::kTileN, end = begin + Traits::kTileN;
    Mask const mask = mask_of(args, tile.rows);
    tile.unmasked = mask.unmasked_queries(begin, end, Traits::kTileM);
    BlockRange const visited = mask.visited_queries(begin, end, Traits::kTileM);
    tile.visited = visited;
    tile.steps = visited.size() * args.group;
    tile.q = row_origin(args.wrap != 0, tile.rows.q, tile.batch);
    tile.first_chunk = args.wrap != 0 ? first_packed_chunk(tile.rows.q.begin, tile.batch, Traits::kTileM)
                                      : tile.batch * args.heads * args.query_blocks.count;
  }
};

// The steps of a tile: all query heads of the group, in each the query blocks that see any of its keys.
// load(query block, head, chunk) brings the operands of one step. What steps need of the tile is read once: behind the
// wait for an empty slot every load from shared memory would delay the TMA.
template <class Load>
FLASHHOPPER_DEVICE void for_each_step(BackwardArgs const& args, BackwardTile const& tile, Load const& load) {
  BlockRange const visited = tile.visited;
  int const first_head = tile.head * args.group;
  int chunk = tile.first_chunk + first_head * args.query_blocks.count;  // fewer than 2^31, the host checked
#pragma unroll 1
  for (int head = first_head; head < first_head + args.group; ++head, chunk += args.query_blocks.count) {
#pragma unroll 1
    for (int m = visited.begin; m < visited.end; ++m) load(m, head, chunk + m);
  }
}

// Q with lse, and the scheduler.
template <class Traits>
FLASHHOPPER_DEVICE void produce_queries(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  constexpr int kRowBytes = Traits::kTileM * int{sizeof(float)};
  RingPosition<Traits::kQStages> at;
  KeyTiles<Traits> const tiles{args};
  // Where turns are kept, first places too: a CTA then waits only for CTAs that run.
  TileSource source(PlaceCounter{args.counters, args.turns != nullptr}, tiles, storage);
  int slot = source.first();
  while (storage.tile[slot].block >= 0) {
    BackwardTile const& tile = storage.tile[slot];
    RowOrigin const origin = tile.q;
    for_each_step(args, tile, [&](int m, int head, int chunk) {
      int const row = m * Traits::kTileM;
      float const* const lse_log2 = args.lse_log2 + int64_t{chunk} * Traits::kTileM;
      storage.q_empty[at.slot].wait(at.phase ^ 1);
      tma_load_sequence<Traits::kTileM, Traits::kHeadDim, Traits::kBoxColumns>(
          args.q, storage.q_full[at.slot], L2Hint::kEvictLast, storage.q[at.slot], origin, args.wrap, row, head, 0,
          kRowBytes);
      bulk_load(lse_log2, storage.q_full[at.slot], storage.lse_log2[at.slot], kRowBytes);
      storage.step[at.slot] = {mask_of(args, tile.rows).block(tile.block * Traits::kTileN, row),
                               m < tile.unmasked.begin || m >= tile.unmasked.end};
      storage.q_full[at.slot].arrive();
      at.advance();
    });
    slot = source.next();
  }
  source.finish();
}

// dO with delta.
template <class Traits>
FLASHHOPPER_DEVICE void produce_output_gradients(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  constexpr int kRowBytes = Traits::kTileM * int{sizeof(float)};
  RingPosition<Traits::kDoutStages> at;
  TileReader<BackwardStorage<Traits>> reader{storage};
  int slot = reader.await();
  while (storage.tile[slot].block >= 0) {
    BackwardTile const& tile = storage.tile[slot];
    RowOrigin const origin = tile.q;
    for_each_step(args, tile, [&](int m, int head, int chunk) {
      float const* const delta = args.delta + int64_t{chunk} * Traits::kTileM;
      storage.dout_empty[at.slot].wait(at.phase ^ 1);
      tma_load_sequence<Traits::kTileM, Traits::kHeadDimV, Traits::kBoxColumnsV>(
          args.dout, storage.dout_full[at.slot], L2Hint::kEvictLast, storage.dout[at.slot], origin, args.wrap,
          m * Traits::kTileM, head, 0, kRowBytes);
      bulk_load(delta, storage.dout_full[at.slot], storage.delta[at.slot], kRowBytes);
      at.advance();
    });
    reader.hand_back(slot);
    slot = reader.await();
  }
}

// Of K and V, whose rows past the used ones arrive as zeros; of dK and dV, which are written up to the next sequence.
FLASHHOPPER_DEVICE RowOrigin key_origin(BackwardArgs const& args, BackwardTile const& tile) {
  return row_origin(args.wrap != 0, tile.rows.k, tile.batch);
}
FLASHHOPPER_DEVICE RowOrigin key_gradient_origin(BackwardArgs const& args, BackwardTile const& tile) {
  SequenceRows const& k = tile.rows.k;
  return row_origin(args.wrap != 0, {k.begin, k.rows, k.rows}, tile.batch);
}

template <class Traits>
FLASHHOPPER_DEVICE void load_keys(BackwardArgs const& args, BackwardStorage<Traits>& storage, int slot) {
  BackwardTile const& tile = storage.tile[slot];
  tma_load_sequence<Traits::kTileN, Traits::kHeadDim, Traits::kBoxColumns>(args.k, storage.k_full, L2Hint::kEvictFirst,
                                                                           storage.k, key_origin(args, tile), args.wrap,
                                                                           tile.block * Traits::kTileN, tile.head);
}
template <class Traits>
FLASHHOPPER_DEVICE void load_values(BackwardArgs const& args, BackwardStorage<Traits>& storage, int slot) {
  BackwardTile const& tile = storage.tile[slot];
  tma_load_sequence<Traits::kTileN, Traits::kHeadDimV, Traits::kBoxColumnsV>(
      args.v, storage.v_full, L2Hint::kEvictFirst, storage.v, key_origin(args, tile), args.wrap,
      tile.block * Traits::kTileN, tile.head);
}
template <class Traits>
FLASHHOPPER_DEVICE void store_value_gradients(BackwardArgs const& args, BackwardStorage<Traits>& storage, int slot) {
  BackwardTile const& tile = storage.tile[slot];
  tma_store_sequence<Traits::kTileN, Traits::kHeadDimV, Traits::kBoxColumnsV>(
      args.dv, storage.v, key_gradient_origin(args, tile), args.wrap, tile.block * Traits::kTileN, tile.head);
}

// By keys: the next V is fetched once dV, which is staged in its place, has left; the next K as soon as the last dQ of
// the tile has been computed, while dK leaves from the dS ring.
template <class Traits>
FLASHHOPPER_DEVICE void serve_keys_early(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  TileReader<BackwardStorage<Traits>> reader{storage};
  int slot = reader.await();
  bool has_tile = storage.tile[slot].block >= 0;
  if (!has_tile) return;
  load_keys(args, storage, slot);
  load_values(args, storage, slot);
  uint32_t phase = 0;
  while (has_tile) {
    int const next = reader.await();
    has_tile = storage.tile[next].block >= 0;
    storage.end.k_empty.wait(phase);
    if (has_tile) load_keys(args, storage, next);
    storage.end.dv_full.wait(phase);
    store_value_gradients(args, storage, slot);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
    if (has_tile) load_values(args, storage, next);
    storage.end.dk_full.wait(phase);
    BackwardTile const& tile = storage.tile[slot];
#pragma unroll 1
    for (int w = 0; w < kBackwardWarpgroups; ++w) {
      tma_store_sequence<kWarpgroupRows, Traits::kHeadDim, Traits::kBoxColumns>(
          args.dk, storage.exchange[dk_tile(storage.end.last_ds, w)], key_gradient_origin(args, tile), args.wrap,
          tile.block * Traits::kTileN + w * kWarpgroupRows, tile.head);
    }
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
    storage.end.dk_empty.arrive();
    reader.hand_back(slot);
    slot = next;
    phase ^= 1;
  }
}

// By columns: K and V stay for the whole tile; dK and dV leave from where they lay.
template <class Traits>
FLASHHOPPER_DEVICE void serve_keys_and_gradients(BackwardArgs const& args, BackwardStorage<Traits>& storage) {
  TileReader<BackwardStorage<Traits>> reader{storage};
  uint32_t phase = 0;
  int slot = reader.await();
  while (storage.tile[slot].block >= 0) {
    load_keys(args, storage, slot);
    load_values(args, storage, slot);
    storage.gradients_full.wait(phase);
    phase ^= 1;
    store_value_gradients(args, storage, slot);
    BackwardTile const& tile = storage.tile[slot];
    tma_store_sequence<Traits::kTileN, Traits::kHeadDim, Traits::kBoxColumns>(
        args.dk, storage.k, key_gradient_origin(args, tile), args.wrap, tile.block * Traits::kTileN, tile.head);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
    reader.hand_back(slot);
    slot = reader.await();
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
  int slot = reader.await();
  while (storage.tile[slot].block >= 0) {
    BackwardTile const& tile = storage.tile[slot];
    for_each_step(args, tile, [&](int m, int, int chunk) {
      int turn = 0;
      if (args.turns != nullptr) {
        int const row = m * Traits::kTileM;
        // The last key block that sees the row block has turn 0.
        turn = mask_of(args, tile.rows).visited(row, row + Traits::kTileM, Traits::kTileN).end - 1 - tile.block;
        await_value(args.turns + chunk, turn);
      }
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
    reader.hand_back(slot);
    slot = reader.await();
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
