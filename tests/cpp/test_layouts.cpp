// Shared-memory layouts: bijections, equal to what TMA's swizzled boxes write, and V's transposed view names the same
// bytes.
#include <cutlass/numeric_types.h>

#include <cute/pointer_flagged.hpp>
#include <cute/tensor.hpp>
#include <vector>

#include "check.hpp"
#include "core/layouts.hpp"

using namespace flashhopper;
using Element = cutlass::bfloat16_t;

namespace {

// Where TMA puts element (row, column) of a tile of `rows` rows: boxes of 64 or 32 columns one after another, 16-byte
// chunks of a row permuted by the row number (CUDA programming guide, tensor map swizzle modes).
int tma_offset(int row, int column, int rows, int head_dim) {
  int const width = box_columns(head_dim);
  int const box = column / width, within = column % width;
  int const chunk = within / 8;
  int const swizzled = width == 64 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
  return box * rows * width + row * width + swizzled * 8 + within % 8;
}

template <int kRows, int kHeadDim, int kStages>
void compare() {
  // The layouts swizzle addresses; as offsets from an aligned base they are these.
  auto const tile = cute::as_position_independent_swizzle_layout(TileLayout<Element, kRows, kHeadDim, kStages>{});
  auto const transposed =
      cute::as_position_independent_swizzle_layout(TransposedTileLayout<Element, kRows, kHeadDim, kStages>{});
  constexpr int kSize = kRows * kHeadDim * kStages;
  CHECK(cute::size(tile) == kSize && cute::cosize(tile) == kSize);
  CHECK(cute::size(transposed) == kSize && cute::cosize(transposed) == kSize);
  std::vector<int> hits(kSize, 0);
  for (int s = 0; s < kStages; ++s) {
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kHeadDim; ++c) {
        int const offset = static_cast<int>(tile(r, c, s));
        if (CHECK(offset >= 0 && offset < kSize)) ++hits[offset];
        CHECK(offset == s * kRows * kHeadDim + tma_offset(r, c, kRows, kHeadDim));
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

// Every row of the table.
template <int... kIndex>
void table(std::integer_sequence<int, kIndex...>) {
  (compare<kWarpgroupRows, kForwardConfigs[kIndex].head_dim, kForwardConfigs[kIndex].q_stages>(), ...);
  (compare<kWarpgroupRows, kForwardConfigs[kIndex].head_dim_v, 1>(), ...);
  (compare<kForwardConfigs[kIndex].tile_n, kForwardConfigs[kIndex].head_dim, kForwardConfigs[kIndex].stages>(), ...);
  (compare<kForwardConfigs[kIndex].tile_n, kForwardConfigs[kIndex].head_dim_v, kForwardConfigs[kIndex].stages>(), ...);
  (probabilities<kForwardConfigs[kIndex].tile_n>(), ...);
}

}  // namespace

int main() {
  table(std::make_integer_sequence<int, kForwardConfigCount>{});
  return check::report("layouts");
}
