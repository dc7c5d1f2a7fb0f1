// How work tiles travel inside a CTA: one thread takes them from the device-wide counter and publishes them in shared
// memory, the other warps read them. Forward and backward storage hold the ring: tile[], tile_full[], tile_empty[].
#pragma once

#include <type_traits>
#include <utility>

#include "core/barriers.hpp"
#include "core/config.hpp"
#include "core/scheduler.hpp"

namespace flashhopper {

// Takes tiles from the device-wide counter; one thread of the CTA.
template <class Storage, class Schedule>
struct TileSource {
  int* counters;  // [0] places taken beyond the first of each CTA, [1] CTAs done; zero before and after
  Schedule const& schedule;
  Storage& storage;
  int const total;
  RingPosition<kTileSlots> position;

  FLASHHOPPER_DEVICE TileSource(int* counters, Schedule const& schedule, Storage& storage)
      : counters(counters), schedule(schedule), storage(storage), total(schedule.total()) {}

  // Both return the slot that holds the tile; its block is negative after the last.
  // The CTA's first tile is its block index, later ones come from the counter.
  FLASHHOPPER_DEVICE int first() { return publish(static_cast<int>(blockIdx.x)); }
  FLASHHOPPER_DEVICE int next() { return publish(take()); }
  // The two halves of next(), for a caller that has work to do while the counter answers.
  FLASHHOPPER_DEVICE int take() { return atomicAdd(&counters[0], 1) + static_cast<int>(gridDim.x); }
  FLASHHOPPER_DEVICE int publish(int place) {
    int const slot = position.slot;
    storage.tile_empty[slot].wait(position.phase ^ 1);
    if (place < total) {
      schedule.put(place, storage.tile[slot]);
    } else {
      storage.tile[slot].block = -1;
    }
    storage.tile_full[slot].arrive();
    position.advance();
    return slot;
  }

  // Leaves the workspace zero for the next launch: the last CTA knows that nobody will take a place any more.
  FLASHHOPPER_DEVICE void finish() {
    __threadfence();
    if (atomicAdd(&counters[1], 1) == static_cast<int>(gridDim.x) - 1) {
      counters[0] = 0;
      counters[1] = 0;
    }
  }
};

// How the warps that follow the scheduler read its tiles; one arrival a warp hands the slot back.
template <class Storage>
struct TileReader {
  using Tile = std::remove_reference_t<decltype(std::declval<Storage>().tile[0])>;

  Storage& storage;
  RingPosition<kTileSlots> position;

  // The slot of the next tile, which stays until its return, when every lane has seen enough of it.
  FLASHHOPPER_DEVICE int await() {
    int const slot = look();
    position.advance();
    return slot;
  }
  // The slot of the next tile, which stays the next.
  FLASHHOPPER_DEVICE int look() const {
    storage.tile_full[position.slot].wait(position.phase);
    return position.slot;
  }
  FLASHHOPPER_DEVICE void hand_back(int slot, bool is_elected) {
    __syncwarp();
    if (is_elected) hand_back(slot);
  }
  // By one thread that stands for its warp: the return, and all at once.
  FLASHHOPPER_DEVICE void hand_back(int slot) { storage.tile_empty[slot].arrive(); }
  FLASHHOPPER_DEVICE bool next(Tile& tile) {
    int const slot = await();
    tile = storage.tile[slot];
    hand_back(slot);
    return tile.block >= 0;
  }
};

}  // namespace flashhopper
