// Shared-memory layouts: bijections, equal to what TMA's swizzled boxes write, and transposed views name the same
// bytes; those of every row of both tables.
#include <cutlass/numeric_types.h>

#include <cute/pointer_flagged.hpp>
#include <cute/tensor.hpp>
#include <vector>

#include "check.hpp"
#include "core/backward_config.hpp"
#include "core/config8.hpp"
#include "core/elements.hpp"
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

// One byte an element: boxes of 128, 64 or 32 bytes, 16-byte chunks permuted by the row; kRows need not be whole atoms
// of what TMA writes, for the rows of V^T that sum follow it.
template <class Byte, int kRows, int kColumns, int kStages>
void compare_bytes() {
  auto const tile = cute::as_position_independent_swizzle_layout(TileLayout<Byte, kRows, kColumns, kStages>{});
  constexpr int kSize = kRows * kColumns * kStages, kBox = box_columns(kColumns, 1);
  CHECK(cute::size(tile) == kSize && cute::cosize(tile) == kSize);
  std::vector<int> hits(kSize, 0);
  for (int s = 0; s < kStages; ++s) {
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        int const offset = static_cast<int>(tile(r, c, s));
        if (CHECK(offset >= 0 && offset < kSize)) ++hits[offset];
        int const within = c % kBox, chunk = within / 16;
        int const swizzled = kBox == 128 ? chunk ^ (r % 8) : kBox == 64 ? chunk ^ (r / 2 % 4) : chunk ^ (r / 4 % 2);
        CHECK(offset == s * kRows * kColumns + c / kBox * kRows * kBox + r * kBox + swizzled * 16 + within % 16);
      }
    }
  }
  for (int count : hits) CHECK(count == 1);
}

// V^T with its columns that sum: they are the last bytes of a stage, row after row of 128 keys, the ones in front, so
// that storage.hpp fills them without knowing the swizzle.
template <int kColumns, int kSums, int kStages>
void sum_rows() {
  using Layout = TileLayout<element::e4m3, kColumns + kSums, 128, kStages>;
  auto const tile = cute::as_position_independent_swizzle_layout(Layout{});
  for (int s = 0; s < kStages; ++s) {
    for (int r = 0; r < kColumns + kSums; ++r) {
      for (int c = 0; c < 128; ++c) {
        int const offset = static_cast<int>(tile(r, c, s)) - s * (kColumns + kSums) * 128;
        CHECK(offset / 128 == r);
      }
    }
  }
}

// Rows of V^T that one product takes lie as a tile of their own, so that consumer8.hpp points at the first of them.
template <int kColumns, int kSums, int kPart, int kStages>
void value_parts() {
  auto const whole =
      cute::as_position_independent_swizzle_layout(TileLayout<element::e4m3, kColumns + kSums, 128, kStages>{});
  auto const part = cute::as_position_independent_swizzle_layout(TileLayout<element::e4m3, kPart + kSums, 128, 1>{});
  for (int s = 0; s < kStages; ++s) {
    for (int first = 0; first < kColumns; first += kPart) {
      int const rows = first + kPart == kColumns ? kPart + kSums : kPart;
      int const offset = s * (kColumns + kSums) * 128 + first * 128;
      CHECK(offset % 1024 == 0);  // what a swizzle repeats after
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < 128; ++c) {
          CHECK(static_cast<int>(whole(first + r, c, s)) == offset + static_cast<int>(part(r, c, 0)));
        }
      }
    }
  }
}

// A thread's four packed registers of 32 keys are the operand as it lies.
template <int kColumns>
void probabilities8() {
  ProbabilityLayout8<kColumns> const layout{};
  CHECK(cute::size(layout) == kColumns / 2);
  for (int e = 0; e < kColumns / 2; ++e) CHECK(static_cast<int>(layout(e)) == e);
}

template <int... kIndex>
void forward8_table(std::integer_sequence<int, kIndex...>) {
  using element::e4m3, element::int8;
  (compare_bytes<e4m3, kWarpgroupRows, kForward8Configs[kIndex].head_dim, kForward8Configs[kIndex].q_stages>(), ...);
  (compare_bytes<int8, kForward8Configs[kIndex].tile_n, kForward8Configs[kIndex].head_dim,
                 kForward8Configs[kIndex].stages>(),
   ...);
  (compare_bytes<e4m3, kForward8Configs[kIndex].head_dim_v + sum_columns(kForward8Configs[kIndex]),
                 kForward8Configs[kIndex].tile_n, kForward8Configs[kIndex].stages>(),
   ...);
  (sum_rows<kForward8Configs[kIndex].head_dim_v, sum_columns(kForward8Configs[kIndex]),
            kForward8Configs[kIndex].stages>(),
   ...);
  (value_parts<kForward8Configs[kIndex].head_dim_v, sum_columns(kForward8Configs[kIndex]),
               kForward8Configs[kIndex].partial_columns, kForward8Configs[kIndex].stages>(),
   ...);
  (probabilities8<kForward8Configs[kIndex].tile_n>(), ...);
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
  forward8_table(std::make_integer_sequence<int, kForward8ConfigCount>{});
  narrow_boxes();
  return check::report("layouts");
}
