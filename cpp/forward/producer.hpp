// The producer warpgroup: warp 0 schedules tiles and streams K and V, warp 1 + w loads the queries of consumer
// warpgroup w. Before it: kernel.hpp. Its partner: consumer.hpp.
#pragma once

#include <cutlass/cutlass.h>

#include "core/tile_queue.hpp"
#include "core/tma.hpp"
#include "forward/args.hpp"
#include "forward/storage.hpp"

namespace flashhopper {

FLASHHOPPER_DEVICE ScalePlace scale_place(ForwardArgs const& args, SequenceTile const& tile) {
  if (args.wrap == 0) return {static_cast<int>(kv_head_of(args, tile)), 0};
  return {tile.head / args.group, first_packed_chunk(tile.rows.k.begin, tile.batch, kScaleBlock)};
}

// The scales of one step of a tile after the other.
class ScaleReader {
 public:
  FLASHHOPPER_DEVICE StepScales next(Forward8Args const& args, ScalePlace const& place, int key) {
    int64_t const head = place.head;
    int const block = place.first_block + key / kScaleBlock;
    float const k = args.k_scale[head * args.k_scales + min_of(block, args.k_scales - 1)];
    float const v = args.v_scale[head * args.v_scales + min_of(block, args.v_scales - 1)];
    largest_ = fmaxf(largest_, v);
    float const unit = fmaxf(v, largest_ * kLeastUnit);
    float const change = unit == 0.f ? 1.f : unit_ / unit;  // 0 at first, when nothing has been added yet
    unit_ = unit;
    return {k, change, unit};
  }

 private:
  // Values this much smaller than others of the tile count as if they were not smaller, 0 for all that 8 bits can show.
  // In a smaller unit, the sum of the others might leave the range of a float: 2^20 values of 448, weights of 2^8 and
  // 2^16 that the reference of the softmax may fall make 2^117.
  static constexpr float kLeastUnit = 0x1p-64f;
  float largest_ = 0.f, unit_ = 0.f;
};

// A step's rows of K or V in 16 bits, for this CTA or for all that share them.
template <class Traits, int kColumns, int kBoxColumns, class Element>
FLASHHOPPER_DEVICE void load_rows(ForwardArgs const& args, CUtensorMap const& map, Barrier& full, Element* smem,
                                  KeyPlace const& place, int row, int rank) {
  constexpr int kCluster = Traits::kConfig.cluster;
  if (kCluster > 1 && args.cluster > 1) {
    tma_load_shared<Traits::kTileN, kColumns, kBoxColumns, kCluster>(map, full, L2Hint::kEvictLast, smem, place.origin,
                                                                     args.wrap, row, place.kv_head, rank);
  } else {
    tma_load_sequence<Traits::kTileN, kColumns, kBoxColumns>(map, full, L2Hint::kEvictLast, smem, place.origin,
                                                             args.wrap, row, place.kv_head);
  }
}

template <class Traits>
FLASHHOPPER_DEVICE auto make_places(ForwardArgs const& args, ForwardStorage<Traits>& storage) {
  if constexpr (Traits::kConfig.cluster > 1) {
    return ClusterPlaces(args.workspace, storage.mailbox, args.cluster);
  } else {
    return PlaceCounter{args.workspace};
  }
}

// Streams the key blocks of every tile, last block first. V trails K by one block because that is the order of use,
// also across tiles: the first keys of the next tile arrive while this one still multiplies its last values.
template <class Traits>
FLASHHOPPER_DEVICE void produce_keys_and_values(typename Traits::Args const& args, ForwardStorage<Traits>& storage) {
  auto const places = make_places<Traits>(args, storage);
  QueryTiles<Traits> const tiles{args, places.rank};
  RingPosition<Traits::kStages> at_k, at_v;
  // The value block that is due, none while v_row < 0. Its tile's slot is still there: consumers have yet to use it.
  int v_row = -1, v_tile = 0;
  auto load_due_values = [&] {
    if (v_row < 0) return;
    storage.v_empty[at_v.slot].wait(at_v.phase ^ 1);
    KeyPlace const v = storage.keys[v_tile];
    if constexpr (Traits::kIs8Bit) {
      // V lies transposed, zeros behind each sequence: its map needs no bound of a sequence, and never wraps.
      RowOrigin const channels{0, args.wrap != 0 ? 0 : v.origin.outer};
      tma_load_sequence<Traits::kHeadDimV, Traits::kTileN, Traits::kTileN>(
          args.v, storage.v_full[at_v.slot], L2Hint::kEvictLast, storage.v[at_v.slot], channels, 0, 0, v.kv_head,
          storage.scale_places[v_tile].first_block * kScaleBlock + v_row);
    } else {
      load_rows<Traits, Traits::kHeadDimV, Traits::kBoxColumnsV>(args, args.v, storage.v_full[at_v.slot],
                                                                 storage.v[at_v.slot], v, v_row, places.rank);
    }
    at_v.advance();
    v_row = -1;
  };

  TileSource source(places, tiles, storage);
  int slot = source.first();
  while (storage.tile[slot].block >= 0) {
    SequenceTile const& tile = storage.tile[slot];
    BlockRange const blocks = shared_blocks<Traits>(args, tile);
    storage.keys[slot] = {row_origin(args.wrap != 0, tile.rows.k, tile.batch), tile.head / args.group};
    if constexpr (Traits::kIs8Bit) storage.scale_places[slot] = scale_place(args, tile);
    int place = -1;
    [[maybe_unused]] ScaleReader scale_reader;
    if (blocks.size() == 0) {
      // A tile without keys brings no block that the last values could trail: consumers would wait for them for ever.
      load_due_values();
      place = source.take();
    }
    for (int n = blocks.end - 1; n >= blocks.begin; --n) {
      // As late as possible, for a place taken earlier would wait behind this tile while other CTAs run dry; and early
      // enough that the answer is there when the next keys can be loaded.
      if (n == blocks.begin) place = source.take();
      if constexpr (Traits::kIs8Bit) {
        // Asked for in front of the wait, which hides their latency.
        StepScales const scales = scale_reader.next(args, storage.scale_places[slot], n * Traits::kTileN);
        storage.k_empty[at_k.slot].wait(at_k.phase ^ 1);
        storage.scales[at_k.slot] = scales;
      } else {
        storage.k_empty[at_k.slot].wait(at_k.phase ^ 1);
      }
      KeyPlace const k = storage.keys[slot];
      load_rows<Traits, Traits::kHeadDim, Traits::kBoxColumns>(
          args, args.k, storage.k_full[at_k.slot], storage.k[at_k.slot], k, n * Traits::kTileN, places.rank);
      at_k.advance();
      load_due_values();
      v_row = n * Traits::kTileN;
      v_tile = slot;
    }
    slot = source.publish(place);
  }
  load_due_values();
  source.finish();
}

// Loads the queries of a warpgroup's rows; one thread.
template <class Traits>
FLASHHOPPER_DEVICE void load_queries(ForwardArgs const& args, ForwardStorage<Traits>& storage, SequenceTile const& tile,
                                     int warpgroup, int slot) {
  RowMap const map = row_map_of<Traits>(args);
  int const position = first_position<Traits>(args, tile, warpgroup);
  bool const is_pack = map.heads > 1;  // then the map's dimensions are head_dim, head, row, pack, batch
  int const unused_bytes = (kWarpgroupRows - map.rows()) * Traits::kHeadDim * int{sizeof(typename Traits::Element)};
  tma_load_sequence<kWarpgroupRows, Traits::kHeadDim, Traits::kBoxColumns>(
      args.q, storage.q_full[warpgroup][slot], L2Hint::kEvictFirst, storage.q[warpgroup][slot],
      is_pack ? RowOrigin{0, tile.head} : row_origin(args.wrap != 0, tile.rows.q, tile.batch),
      is_pack ? tile.batch : args.wrap, is_pack ? 0 : position, is_pack ? position : tile.head, 0, -unused_bytes);
}

// 8 bits: writes what the rows bring along; a whole warp.
template <class Traits>
FLASHHOPPER_DEVICE void load_row_factors(Forward8Args const& args, RowFactors<Traits::kHeadDimV>& rows,
                                         SequenceTile const& tile, int warpgroup) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  float const* const scale = args.q_scale + tile.batch * args.q_scale_batch + tile.head * args.q_scale_head;
  int64_t const shift = tile.batch * args.lse.batch_stride + tile.head * args.lse.head_stride + tile.rows.q.begin;
  int const first = first_position<Traits>(args, tile, warpgroup);
#pragma unroll 1
  for (int i = lane; i < kWarpgroupRows; i += 32) {
    int const row = min_of(first + i, tile.rows.q.seqlen - 1);
    float const factor = scale[tile.rows.q.begin / args.q_block + row / args.q_block];
    rows.lse_shift[i] = args.lse_shift == nullptr ? 0.f : args.lse_shift[shift + row];
    rows.query[i] = factor * args.softmax_scale_log2;
  }
  float const* const mean =
      args.v_mean == nullptr ? nullptr : args.v_mean + kv_head_of(args, tile) * args.v_mean_columns;
  FLASHHOPPER_UNROLL
  for (int column = lane; column < Traits::kHeadDimV; column += 32) {
    rows.v_mean[column] = mean != nullptr && column < args.v_mean_columns ? mean[column] : 0.f;
  }
}

template <class Traits>
FLASHHOPPER_DEVICE void produce_queries(typename Traits::Args const& args, ForwardStorage<Traits>& storage,
                                        int warpgroup, bool is_elected) {
  RingPosition<Traits::kQStages> at;
  TileReader<ForwardStorage<Traits>> reader{storage};
  while (true) {
    int const slot = reader.await();
    SequenceTile const tile = storage.tile[slot];
    if constexpr (Traits::kIs8Bit) __syncwarp();  // every lane has it
    if (is_elected) reader.hand_back(slot);
    if (tile.block < 0) return;
    if (visited_blocks<Traits>(args, tile).size() == 0) continue;
    storage.q_empty[warpgroup][at.slot].wait(at.phase ^ 1);
    if constexpr (Traits::kIs8Bit) {
      load_row_factors<Traits>(args, storage.rows[warpgroup][at.slot], tile, warpgroup);
      __syncwarp();  // the arrival of one thread stands for what all have written
    }
    if (is_elected) load_queries<Traits>(args, storage, tile, warpgroup, at.slot);
    at.advance();
  }
}

template <class Traits>
FLASHHOPPER_DEVICE void produce(typename Traits::Args const& args, ForwardStorage<Traits>& storage) {
  int const warp = cutlass::canonical_warp_idx_sync();
  if constexpr (Traits::kIs8Bit) {
    static_assert(Traits::kConfig.cluster == 1);  // or they would have to wait for one another at the end
    if (warp > 0) {                               // whole warps, for the sake of what comes with the queries
      if (warp <= Traits::kWarpgroups) produce_queries<Traits>(args, storage, warp - 1, cute::elect_one_sync());
      // Not a return, where they would meet warp 0: ptxas would then spill what its one thread has in uniform
      // registers.
      asm volatile("exit;");
    }
  }
  if (!cute::elect_one_sync()) return;
  if (warp == 0) {
    produce_keys_and_values<Traits>(args, storage);
  } else if constexpr (!Traits::kIs8Bit) {
    if (warp <= Traits::kWarpgroups) produce_queries<Traits>(args, storage, warp - 1, true);
  }
}

}  // namespace flashhopper
