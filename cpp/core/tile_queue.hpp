// How work tiles travel inside a CTA: one thread takes them from the device-wide counter and publishes them in shared
// memory, the other warps read them. Forward and backward storage hold the ring: tile[], tile_full[], tile_empty[].
#pragma once

#include <type_traits>
#include <utility>

#include "core/barriers.hpp"
#include "core/config.hpp"
#include "core/scheduler.hpp"

namespace flashhopper {

// Where the places of a CTA come from: its first is its block index, later ones the device-wide counter gives.
struct PlaceCounter {
  static constexpr int rank = 0;  // of a CTA that walks alone
  int* counters;                  // [0] places counted, [1] CTAs done; zero before and after
  bool counts_first = false;      // first places come from the counter too: only a CTA that runs then has one

  FLASHHOPPER_DEVICE int first() const { return counts_first ? take() : static_cast<int>(blockIdx.x); }
  // Asks for a place; settle() returns it, when the caller has no other work to do.
  FLASHHOPPER_DEVICE int take() const {
    return atomicAdd(&counters[0], 1) + (counts_first ? 0 : static_cast<int>(gridDim.x));
  }
  FLASHHOPPER_DEVICE int settle(int taken) const { return taken; }
  // Leaves the workspace zero for the next launch: the last one knows that nobody will take a place any more.
  FLASHHOPPER_DEVICE void finish() const { finish(static_cast<int>(gridDim.x)); }
  // participants: how many take places.
  FLASHHOPPER_DEVICE void finish(int participants) const {
    __threadfence();
    if (atomicAdd(&counters[1], 1) == participants - 1) {
      counters[0] = 0;
      counters[1] = 0;
    }
  }
};

// Publishes the tiles of the places; one thread of the CTA.
template <class Places, class Schedule, class Storage>
struct TileSource {
  Places places;
  Schedule const& schedule;
  Storage& storage;
  int const total;
  RingPosition<kTileSlots> position;

  FLASHHOPPER_DEVICE TileSource(Places const& places, Schedule const& schedule, Storage& storage)
      : places(places), schedule(schedule), storage(storage), total(schedule.total()) {}

  // All return the slot that holds the tile; its block is negative after the last.
  FLASHHOPPER_DEVICE int first() { return put(places.first()); }
  FLASHHOPPER_DEVICE int next() { return publish(take()); }
  // The two halves of next(), for a caller that has work to do while the counter answers.
  FLASHHOPPER_DEVICE int take() { return places.take(); }
  FLASHHOPPER_DEVICE int publish(int taken) { return put(places.settle(taken)); }
  FLASHHOPPER_DEVICE void finish() { places.finish(); }

 private:
  FLASHHOPPER_DEVICE int put(int place) {
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
