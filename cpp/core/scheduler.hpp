// The order of work tiles: which (query block, head, batch) stands at which place of the queue.
// The producer takes places from a device counter (forward/producer.hpp); host tests prove that the order is a
// permutation.
#pragma once

#include <cstdint>

#include "core/platform.hpp"

namespace flashhopper {

struct Tile {
  int m_block;
  int head;
  int batch;
};

// Heads are walked in sections whose keys and values stay in L2 together. Inside a section the query block is the outer
// index and, where blocks differ in length (causal), the longest go first so that the queue drains evenly.
struct TileSchedule {
  int m_blocks;
  int heads;
  int batch_heads;    // batch * heads
  int section_heads;  // heads of one section
  bool longest_first;

  FLASHHOPPER_HOST_DEVICE int total() const { return m_blocks * batch_heads; }

  FLASHHOPPER_HOST_DEVICE Tile at(int place) const {
    int const section_tiles = section_heads * m_blocks;
    int const section = place / section_tiles;
    int const rest = place - section * section_tiles;
    int const first_head = section * section_heads;
    int const width = min_of(section_heads, batch_heads - first_head);  // the last section may be narrower
    int const m = rest / width;
    int const batch_head = first_head + rest - m * width;
    int const batch = batch_head / heads;
    return {longest_first ? m_blocks - 1 - m : m, batch_head - batch * heads, batch};
  }
};

inline constexpr int64_t kL2SectionBytes = 32 << 20;

// Full attention: one head a section, so that all multiprocessors read the same keys at once. Causal: as many kv heads
// as L2 holds, each with its group of query heads.
inline TileSchedule make_tile_schedule(int m_blocks, int batch, int heads, int kv_heads, int64_t kv_head_bytes,
                                       bool longest_first) {
  int64_t section_kv_heads = 1;
  if (longest_first) section_kv_heads = kv_head_bytes > 0 ? kL2SectionBytes / kv_head_bytes : batch * int64_t{kv_heads};
  if (section_kv_heads < 1) section_kv_heads = 1;
  if (section_kv_heads > int64_t{batch} * kv_heads) section_kv_heads = int64_t{batch} * kv_heads;
  int const group = heads / kv_heads;
  return {m_blocks, heads, batch * heads, static_cast<int>(section_kv_heads) * group, longest_first};
}

}  // namespace flashhopper
