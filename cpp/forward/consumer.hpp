// What consumer warpgroups share, whatever the width of their operands: where a thread's scores lie, turns, rings, the
// mask, the next tile. Before it: kernel.hpp. Its partner: producer.hpp. Used by consumer16.hpp and consumer8.hpp.
#pragma once

#include "core/softmax.hpp"
#include "core/tile_queue.hpp"
#include "forward/args.hpp"
#include "forward/epilogue.hpp"
#include "forward/storage.hpp"

namespace flashhopper {

template <class Traits>
struct ForwardConsumer {
  using Args = typename Traits::Args;
  static constexpr int kScores = Traits::kTileN / 2;      // floats of S in one thread
  static constexpr int kOutputs = Traits::kHeadDimV / 2;  // floats of O in one thread
  static constexpr bool kShares = Traits::kConfig.cluster > 1;
  // Keys are passed on while the tile before still holds values: no more blocks than the ring has slots, or values
  // would block the way of the keys.
  static_assert(!kShares || Traits::kTileM <= Traits::kStages * Traits::kTileN);

  Args const& args;
  ForwardStorage<Traits>& storage;
  int const warpgroup;
  int const thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
  int const lane = thread % 32;
  // Row of accumulator row 0 within the warpgroup's 64, and first column within an 8-column group.
  int const thread_row = thread / 32 * 16 + lane / 4;
  int const thread_column = lane % 4 * 2;

  RingPosition<Traits::kStages> at_k, at_v;
  RingPosition<Traits::kQStages> at_q;

  FLASHHOPPER_DEVICE ForwardConsumer(Args const& args, ForwardStorage<Traits>& storage, int warpgroup)
      : args(args), storage(storage), warpgroup(warpgroup) {}

  // Turns of issuing GEMMs, where the row of the table has them.
  FLASHHOPPER_DEVICE void wait_turn() {
    if constexpr (Traits::kPingPong) named_barrier_sync<2 * kWarpgroupThreads>(kTurnOfWarpgroup + warpgroup);
  }
  FLASHHOPPER_DEVICE void pass_turn() {
    if constexpr (!Traits::kPingPong) return;
    int const next = warpgroup + 1 == Traits::kWarpgroups ? 0 : warpgroup + 1;
    named_barrier_arrive<2 * kWarpgroupThreads>(kTurnOfWarpgroup + next);
  }

  // One arrival a warp: its wgmma reads of the queries are over.
  FLASHHOPPER_DEVICE void release_queries() {
    if (lane == 0) storage.q_empty[warpgroup][at_q.slot].arrive();
    at_q.advance();
  }

  // The same of a slot of keys or values, at every CTA that shares them. offset: as of Barrier::arrive.
  template <class Ring>
  FLASHHOPPER_DEVICE void release(Barrier* empty, Ring& ring, uint32_t offset = 0) {
    if constexpr (kShares) {
      if (lane < args.cluster) empty[ring.slot].arrive_at(lane, offset);
    } else {
      if (lane == 0) empty[ring.slot].arrive(offset);
    }
    ring.advance();
  }

  // The same, but not before `value` is known. The alignment bits of the workspace are zero, which the compiler cannot
  // know.
  template <class Ring>
  FLASHHOPPER_DEVICE void release_after(Barrier* empty, Ring& ring, float value) {
    release(empty, ring,
            __float_as_uint(value) & static_cast<uint32_t>(reinterpret_cast<uintptr_t>(args.workspace) & 3));
  }

  // Blocks of keys or values that the tile does not see, and other CTAs do: passed on unread.
  template <class Ring>
  FLASHHOPPER_DEVICE void pass_on(Barrier* full, Barrier* empty, Ring& ring, int count) {
    if constexpr (kShares) {
      for (; count > 0; --count) {
        full[ring.slot].wait(ring.phase);
        __syncwarp();  // no lane still looks at a phase that the release lets pass
        release(empty, ring);
      }
    }
  }
  // All blocks of a tile that sees none, in the order in which they come.
  FLASHHOPPER_DEVICE void pass_on_all(int count) {
    if constexpr (!kShares) return;
    auto at = at_k;  // nothing is in flight: values stand where keys stand
    for (int i = 0; i < count; ++i) {
      pass_on(storage.k_full, storage.k_empty, at_k, 1);
      if (i > 0) pass_on(storage.v_full, storage.v_empty, at, 1);
    }
    if (count > 0) pass_on(storage.v_full, storage.v_empty, at, 1);
    at_v = at;
  }

  // Scores of key block n outside the mask become -inf.
  FLASHHOPPER_DEVICE void apply_mask(float (&scores)[kScores], SequenceTile const& tile, int n) const {
    int const origin = n * Traits::kTileN + thread_column;
    Mask const mask = mask_of(args, tile);
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      int const end = mask.key_end(position(tile, r)) - origin;
      FLASHHOPPER_UNROLL
      for (int e = 0; e < kScores; ++e) {
        if (accumulator_row(e) == r && accumulator_column(e) >= end) scores[e] = -INFINITY;
      }
    }
    if (mask.window_left < 0) return;  // the same for all threads
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      int const begin = mask.key_begin(position(tile, r)) - origin;
      FLASHHOPPER_UNROLL
      for (int e = 0; e < kScores; ++e) {
        if (accumulator_row(e) == r && accumulator_column(e) < begin) scores[e] = -INFINITY;
      }
    }
  }

  // The slot of the next tile that has keys, negative after the last; those that have none are finished on the way. For
  // a warp that holds no slot: the queue has few, and behind so many tiles without keys it would wait for its own.
  FLASHHOPPER_DEVICE int next_tile(TileReader<ForwardStorage<Traits>>& reader) {
    while (true) {
      int const slot = reader.await();
      SequenceTile const& tile = storage.tile[slot];
      if (tile.block < 0) return -1;
      if (visited_blocks<Traits>(args, tile).size() > 0) return slot;
      pass_on_all(foreign_blocks<Traits>(args, tile));
      ThreadRows const rows = rows_of(tile);
      float lse[kRowsPerThread];
      load_sinks(args, rows.head, lse);
      store_nothing_seen<Traits::kHeadDimV>(args, tile, {0, tile.rows.q.seqlen}, lse, rows, lane);
      store_unused<Traits::kHeadDimV>(args, tile, rows, lane);
      reader.hand_back(slot, lane == 0);
    }
  }
  // The same for a warp that still holds the slot of its tile: negative too where the next tile has no keys, which is
  // then left for next_tile.
  FLASHHOPPER_DEVICE int next_tile_early(TileReader<ForwardStorage<Traits>>& reader) const {
    SequenceTile const& tile = storage.tile[reader.look()];
    return tile.block >= 0 && visited_blocks<Traits>(args, tile).size() > 0 ? reader.await() : -1;
  }
  // The sequence position of the thread's accumulator row r, and its query head.
  FLASHHOPPER_DEVICE int position(Tile const& tile, int r) const {
    return first_position<Traits>(args, tile, warpgroup) + row_map_of<Traits>(args).position(thread_row + 8 * r);
  }
  FLASHHOPPER_DEVICE int head(Tile const& tile, int r) const {
    RowMap const map = row_map_of<Traits>(args);
    return tile.head * map.heads + map.head(thread_row + 8 * r);
  }
  FLASHHOPPER_DEVICE ThreadRows rows_of(Tile const& tile) const {
    ThreadRows rows;
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      bool const is_used = thread_row + 8 * r < row_map_of<Traits>(args).rows();
      rows.position[r] = is_used ? position(tile, r) : -1;
      rows.head[r] = head(tile, r);
    }
    return rows;
  }
};

}  // namespace flashhopper
