// Clusters: CTAs that walk neighbouring tiles together, so that each loads a part of the keys and values for all.
// Before it: tile_queue.hpp. Used by the forward, where a row of the config table says how many CTAs a cluster has.
#pragma once

#include "core/tile_queue.hpp"

namespace flashhopper {

FLASHHOPPER_DEVICE int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster that have not ended wait for one another.
FLASHHOPPER_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// How the CTA of rank 0 tells the other one a number. Both hold a mailbox and use one end of it.
struct Mailbox {
  int letter;
  Barrier full;   // Arrives: its reader, which expects the letter's bytes. Waits: the same.
  Barrier empty;  // Arrives: the reader, at the box of rank 0. Waits: rank 0.

  FLASHHOPPER_DEVICE void init() {
    full.init(1);
    empty.init(1);
  }
  FLASHHOPPER_DEVICE void send(int value, int rank, uint32_t phase) {
    empty.wait(phase ^ 1);
    asm volatile(
        "{\n"
        ".reg .b32 box, barrier;\n"
        "mapa.shared::cluster.u32 box, %0, %3;\n"
        "mapa.shared::cluster.u32 barrier, %1, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [box], %2, [barrier];\n"
        "}\n" ::"r"(cute::cast_smem_ptr_to_uint(&letter)),
        "r"(full.address()), "r"(value), "r"(rank)
        : "memory");
  }
  FLASHHOPPER_DEVICE int receive(uint32_t phase) {
    full.arrive_and_expect(int{sizeof(letter)});
    full.wait(phase);
    int const value = *static_cast<int volatile*>(&letter);
    empty.arrive_at(0);
    return value;
  }
};

// The places of a cluster of one or two: rank 0 takes them from the device-wide counter for both. A place is that of
// all their tiles together (forward/args.hpp).
struct ClusterPlaces {
  PlaceCounter counter;
  Mailbox& mailbox;
  int const cluster;
  int const rank;
  uint32_t phase = 0;

  FLASHHOPPER_DEVICE ClusterPlaces(int* counters, Mailbox& mailbox, int cluster)
      : counter{counters}, mailbox(mailbox), cluster(cluster), rank(cluster > 1 ? cluster_rank() : 0) {}

  FLASHHOPPER_DEVICE int first() const { return static_cast<int>(blockIdx.x) / cluster; }
  FLASHHOPPER_DEVICE int take() const {
    return rank == 0 ? atomicAdd(&counter.counters[0], 1) + static_cast<int>(gridDim.x) / cluster : 0;
  }
  FLASHHOPPER_DEVICE int settle(int taken) {
    if (cluster == 1) return taken;
    uint32_t const now = phase;
    phase ^= 1;
    if (rank > 0) return mailbox.receive(now);
    mailbox.send(taken, 1, now);
    return taken;
  }
  FLASHHOPPER_DEVICE void finish() const {
    if (rank == 0) counter.finish(static_cast<int>(gridDim.x) / cluster);
  }
};

}  // namespace flashhopper
