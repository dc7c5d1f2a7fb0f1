// The order of dQ in the float accumulator: a bijection between a chunk and the elements of its query block, equal to
// what the threads of the consumer warpgroups hold, and the same in both directions.
#include <algorithm>
#include <random>
#include <vector>

#include "check.hpp"
#include "core/dq_layout.hpp"
#include "core/seqlen.hpp"

using namespace flashhopper;

namespace {

// Which element of a 64-row wgmma accumulator float e of thread t is (PTX ISA, wgmma register fragments of D).
DqElement held(int t, int e) {
  int const warp = t / 32, lane = t % 32;
  return {16 * warp + lane / 4 + 8 * (e / 2 % 2), 8 * (e / 4) + 2 * (lane % 4) + e % 2};
}

void is_bijection(BackwardConfig const& row) {
  int const tile_m = row.tile_m, head_dim = row.head_dim, size = tile_m * head_dim;
  // Two warpgroups share the block: its columns where it has 64 rows, its rows where it has 128.
  int const own_columns = tile_m == 64 ? head_dim / 2 : head_dim;
  CHECK(dq_columns(tile_m, head_dim) == own_columns);
  std::vector<int> vectors(size / 4, 0), elements(size, 0);
  for (int warpgroup = 0; warpgroup < kBackwardWarpgroups; ++warpgroup) {
    for (int group = 0; group < own_columns / 8; ++group) {
      for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
        int const vector = dq_vector(tile_m, head_dim, warpgroup, group, thread);
        if (!CHECK(vector >= 0 && vector < size / 4)) continue;
        ++vectors[vector];
        // A warp's vectors are one piece of memory, whole lines of it.
        CHECK(vector == dq_vector(tile_m, head_dim, warpgroup, group, thread / 32 * 32) + thread % 32);
        CHECK(vector / 32 * 32 + thread % 32 == vector);
        for (int i = 0; i < 4; ++i) {
          DqElement const at = dq_element(tile_m, head_dim, vector, i);
          DqElement const own = held(thread, 4 * group + i);
          CHECK(at.row == own.row + (tile_m == 64 ? 0 : 64 * warpgroup));
          CHECK(at.column == own.column + (tile_m == 64 ? own_columns * warpgroup : 0));
          bool const inside = at.row >= 0 && at.row < tile_m && at.column >= 0 && at.column < head_dim;
          if (CHECK(inside)) ++elements[at.row * head_dim + at.column];
        }
      }
    }
  }
  for (int count : vectors) CHECK(count == 1);
  for (int count : elements) CHECK(count == 1);
}

// What a warpgroup stages in one slot of shared memory is one piece of the chunk: thread after thread, group after
// group.
void slots_are_contiguous(BackwardConfig const& row) {
  int const slot_vectors = dq_slot_floats(row) / 4;
  int const groups = slot_vectors / kWarpgroupThreads;
  CHECK(slot_vectors % kWarpgroupThreads == 0);
  CHECK(slot_vectors * kBackwardWarpgroups * dq_parts(row) == row.tile_m * row.head_dim / 4);
  for (int warpgroup = 0; warpgroup < kBackwardWarpgroups; ++warpgroup) {
    for (int part = 0; part < dq_parts(row); ++part) {
      int const begin = (warpgroup * dq_parts(row) + part) * slot_vectors;
      for (int group = 0; group < groups; ++group) {
        for (int thread = 0; thread < kWarpgroupThreads; ++thread) {
          CHECK(dq_vector(row.tile_m, row.head_dim, warpgroup, part * groups + group, thread) ==
                begin + group * kWarpgroupThreads + thread);
        }
      }
    }
  }
}

// Sequences of a packed batch share no chunk, whatever their lengths, and none lies past the last.
void packed_chunks_are_apart(int tile_m) {
  std::mt19937 random(static_cast<unsigned>(tile_m));
  for (int round = 0; round < 200; ++round) {
    int const batch = std::uniform_int_distribution<int>(0, 12)(random);
    int begin = 0, free = 0;
    for (int sequence = 0; sequence <= batch; ++sequence) {  // and what lies behind the last
      int const rows = std::max(0, std::uniform_int_distribution<int>(-100, 3 * tile_m)(random));
      int const first = first_packed_chunk(begin, sequence, tile_m);
      CHECK(first >= free);
      free = first + ceil_div(rows, tile_m);
      begin += rows;
    }
    CHECK(free <= most_packed_blocks(batch, begin, tile_m));
  }
}

}  // namespace

int main() {
  packed_chunks_are_apart(64);
  packed_chunks_are_apart(128);
  for (BackwardConfig const& row : kBackwardConfigs) {
    is_bijection(row);
    slots_are_contiguous(row);
  }
  return check::report("dq_layout");
}
