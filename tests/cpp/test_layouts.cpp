// Shared-memory layouts: bijections, equal to what TMA's swizzled boxes write, and transposed views name the same
// bytes; those of every row of both tables.
#include <cutlass/numeric_types.h>

#include <cute/pointer_flagged.hpp>
#include <cute/tensor.hpp>
#include <vector>

#include "check.hpp"
#include "core/backward_config.hpp"
#include "core/layouts.hpp"

using namespace flashhopper;
using Element = cutlass::bfloat16_t;

namespace {

// Where TMA puts element (row, column) of a tile of `rows` rows: boxes of 64 or 32 columns one after another, 16-byte
// chunks of a row permuted by the row number (CUDA programming guide, tensor map swizzle modes).
int tma_offset(int row, int column, int rows, int width) {
  int const box = column / width, within = column % width;
  int const chunk = within / 8;
  int const swizzled = width == 64 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
  return box * rows * width + row * width + swizzled * 8 + within % 8;
}

template <int kRows, int kHeadDim, int kStages, int kBox = box_columns(kHeadDim)>
void compare() {
  // The layouts swizzle addresses; as offsets from an aligned base they are these.
  auto const tile = cute::as_position_independent_swizzle_layout(TileLayout<Element, kRows, kHeadDim, kStages, kBox>{});
  auto const transposed =
      cute::as_position_independent_swizzle_layout(TransposedTileLayout<Element, kRows, kHeadDim, kStages, kBox>{});
  constexpr int kSize = kRows * kHeadDim * kStages;
  CHECK(cute::size(tile) == kSize && cute::cosize(tile) == kSize);
  CHECK(cute::size(transposed) == kSize && cute::cosize(transposed) == kSize);
  std::vector<int> hits(kSize, 0);
  for (int s = 0; s < kStages; ++s) {
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kHeadDim; ++c) {
        int const offset = static_cast<int>(tile(r, c, s));
        if (CHECK(offset >= 0 && offset < kSize)) ++hits[offset];
        CHECK(offset == s * kRows * kHeadDim + tma_offset(r, c, kRows, kBox));
        CHECK(offset == static_cast<int>(transposed(c, r, s)));
      }
    }
  }
  for (int count : hits) CHECK(count == 1);
}

// The flat accumulator order is the operand order of the second GEMM.
template <int kColumns>
void probabilities() {
  ProbabilityLayout<kColumns> const layout{};
  CHECK(cute::size(layout) == kColumns / 2);
  for (int e = 0; e < kColumns / 2; ++e) CHECK(static_cast<int>(layout(e)) == e);
}

template <int... kIndex>
void forward_table(std::integer_sequence<int, kIndex...>) {
  (compare<kWarpgroupRows, kForwardConfigs[kIndex].head_dim, kForwardConfigs[kIndex].q_stages>(), ...);
  (compare<kWarpgroupRows, kForwardConfigs[kIndex].head_dim_v, 1>(), ...);
  (compare<kForwardConfigs[kIndex].tile_n, kForwardConfigs[kIndex].head_dim, kForwardConfigs[kIndex].stages>(), ...);
  (compare<kForwardConfigs[kIndex].tile_n, kForwardConfigs[kIndex].head_dim_v, kForwardConfigs[kIndex].stages>(), ...);
  (probabilities<kForwardConfigs[kIndex].tile_n>(), ...);
}

// Q, dO, K (and dK), V (and dV), and the score tiles that pass through shared memory.
template <int kIndex>
void backward_row() {
  constexpr BackwardConfig kRow = kBackwardConfigs[kIndex];
  constexpr int kBox = box_columns(kRow, kRow.head_dim), kBoxV = box_columns(kRow, kRow.head_dim_v);
  compare<kRow.tile_m, kRow.head_dim, kRow.q_stages, kBox>();
  compare<kRow.tile_m, kRow.head_dim_v, kRow.dout_stages, kBoxV>();
  compare<kRow.tile_n, kRow.head_dim, 1, kBox>();
  compare<kRow.tile_n, kRow.head_dim_v, 1, kBoxV>();
  compare<kRow.tile_n, kRow.tile_m, exchange_tiles(kRow), 64>();
  probabilities<kRow.tile_m>();
}

template <int... kIndex>
void backward_table(std::integer_sequence<int, kIndex...>) {
  (backward_row<kIndex>(), ...);
}

// The same tile in either width of box: 192 columns, say, in boxes of 32, so that half of them is whole boxes.
void narrow_boxes() {
  compare<64, 192, 2, 32>();
  compare<64, 128, 1, 32>();
  compare<128, 64, 2, 32>();
}

}  // namespace

int main() {
  forward_table(std::make_integer_sequence<int, kForwardConfigCount>{});
  backward_table(std::make_integer_sequence<int, kBackwardConfigCount>{});
  narrow_boxes();
  return check::report("layouts");
}
