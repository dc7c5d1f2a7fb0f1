// The order of work tiles: which (query block, head, batch) stands at which place of the queue.
// The producer takes places from a device counter (forward/producer.hpp); host tests prove that the order is a
// permutation.
#pragma once

#include <cstdint>

#include "core/seqlen.hpp"

namespace flashhopper {

struct Tile {
  int block;  // of queries in the forward, of keys in the backward; negative: no more work
  int head;
  int batch;
};

// Heads are walked in sections whose operands stay in L2 together. Inside a section the block is the outer index; where
// blocks differ in length the longest go first so that the queue drains evenly.
struct TileSchedule {
  int blocks;  // of one head
  int heads;
  int batch_heads;    // batch * heads
  int section_heads;  // heads of one section
  bool descending;    // the last block first

  FLASHHOPPER_HOST_DEVICE int total() const { return blocks * batch_heads; }

  FLASHHOPPER_HOST_DEVICE Tile at(int place) const {
    int const section_tiles = section_heads * blocks;
    int const section = place / section_tiles;
    int const rest = place - section * section_tiles;
    int const first_head = section * section_heads;
    int const width = min_of(section_heads, batch_heads - first_head);  // the last section may be narrower
    int const block = rest / width;
    int const batch_head = first_head + rest - block * width;
    int const batch = batch_head / heads;
    return {descending ? blocks - 1 - block : block, batch_head - batch * heads, batch};
  }
};

// A tile and the sequence that it is of.
struct SequenceTile : Tile {
  Sequence rows;
};

// Work tiles of a batch of sequences. Dense: one length for all. Packed: sequence after sequence in the order of the
// list, and within each as TileSchedule has it.
struct BatchSchedule {
  TileSchedule dense;       // packed: of it, heads and descending are read
  Sequence rows;            // of every sequence of a dense batch
  PackedBlock const* list;  // null: dense
  int const* list_size;     // blocks in the list
  int tile;                 // rows of a block
  bool by_keys;             // blocks are of keys, as in the backward, else of queries
  // Packed: a section takes `group` heads, and further groups while the rows of the other side that they read over and
  // over are no more than section_rows together.
  int section_rows;
  int group;

  FLASHHOPPER_HOST_DEVICE bool is_packed() const { return list != nullptr; }
  // Of places. Reads memory where the batch is packed.
  FLASHHOPPER_HOST_DEVICE int total() const { return is_packed() ? *list_size * dense.heads : dense.total(); }

  FLASHHOPPER_HOST_DEVICE SequenceTile at(int place) const {
    if (!is_packed()) return {dense.at(place), rows};
    PackedBlock const block = list[place / dense.heads];
    int const blocks = ceil_div(by_keys ? block.rows.k.rows : block.rows.q.rows, tile);
    int const other = max_of(1, by_keys ? block.rows.q.seqlen : block.rows.k.seqlen);
    int const section_heads = min_of(dense.heads / group, max_of(1, section_rows / other)) * group;
    TileSchedule const schedule{blocks, dense.heads, dense.heads, section_heads, dense.descending};
    Tile const tile = schedule.at(place - block.first * dense.heads);
    return {{tile.block, tile.head, block.sequence}, block.rows};
  }
  FLASHHOPPER_HOST_DEVICE void put(int place, SequenceTile& tile) const { tile = at(place); }
};

inline constexpr int64_t kL2SectionBytes = 32 << 20;

// Blocks of one length: one kv head a section, so that all multiprocessors read the same operands at once. Uneven
// blocks: as many kv heads as L2 holds, each with its group of query heads. head_bytes: what the tiles of one kv head
// read over and over.
inline TileSchedule make_tile_schedule(int blocks, int batch, int heads, int kv_heads, int64_t head_bytes, bool uneven,
                                       bool descending) {
  int64_t section_kv_heads = 1;
  if (uneven) section_kv_heads = head_bytes > 0 ? kL2SectionBytes / head_bytes : batch * int64_t{kv_heads};
  if (section_kv_heads < 1) section_kv_heads = 1;
  if (section_kv_heads > int64_t{batch} * kv_heads) section_kv_heads = int64_t{batch} * kv_heads;
  int const group = heads / kv_heads;
  return {blocks, heads, batch * heads, static_cast<int>(section_kv_heads) * group, descending};
}

}  // namespace flashhopper
