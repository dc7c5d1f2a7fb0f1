// Which thread of the rows' kernel holds which columns, how its products with the tensor cores read and leave them, and
// where a warp keeps its rows in shared memory. Used by rows.hpp and rotate.hpp; a host test proves it.
#pragma once

#include "core/platform.hpp"
#include "core/value_layout.hpp"

namespace flashhopper {

enum class Rotation {
  kNone,
  kQuads,  // four columns at a time
  kWide,   // as many as the head dimension allows
};

// Thread blocks of the rows' kernel at once on a multiprocessor: as many as registers and shared memory allow.
FLASHHOPPER_HOST_DEVICE constexpr int ctas_of_rows(int dim, Rotation rotation, bool smooth) {
  if (rotation == Rotation::kNone && !smooth) return dim == 64 ? 4 : dim == 96 ? 3 : dim <= 192 ? 2 : 1;
  if (dim == 64) return smooth && rotation == Rotation::kQuads ? 2 : 3;
  return dim <= 128 ? 2 : 1;
}

// A warp has 16 rows, as a product m16n8k16 takes them, and no barrier but that of the block's largest magnitude. Of
// every 32 columns, a group, thread c of a quad has columns 8c .. 8c + 7 of rows g and g + 8, g = lane / 4: one vector
// of 16 bytes of each. It is loaded as the A operand of two products and, as product_output() arranges the columns of
// B, comes back in the accumulators of the same thread, which stores the 8 bytes it became.
template <int kDim, Rotation kRotation, bool kSmooth = false>
struct RowsShape {
  static constexpr int kHeadDim = kDim;
  static constexpr Rotation kKind = kRotation;
  static constexpr int kHadamard = kRotation == Rotation::kWide    ? hadamard_block(kDim)
                                   : kRotation == Rotation::kQuads ? 4
                                                                   : 1;
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kWarpRows = kScaleBlock / kWarps;
  static constexpr int kRows = 2;  // of a thread, 8 apart
  static constexpr int kGroups = kDim / 32;
  static constexpr int kElements = 8 * kGroups;          // of a row in one thread: 8 * group + column
  static constexpr int kVectors = kDim / 8;              // of a row
  static constexpr int kSlots = kScaleBlock * kVectors;  // vectors of a block
  static constexpr int kStages = 2;                      // blocks on their way
  static constexpr int kSmemBytes = kStages * kSlots * 16;
  static constexpr bool kIsLight = kRotation == Rotation::kNone && !kSmooth;
  static constexpr int kCtas = ctas_of_rows(kDim, kRotation, kSmooth);
  // One copy of a warp: kCopyRows rows of kCopyVectors vectors each, so that places differ by constants alone.
  static constexpr int kCopyVectors = kDim == 96 ? 4 : 8;
  static constexpr int kCopyRows = 32 / kCopyVectors;
  static_assert(kWarpRows == 16 && kWarpRows % kCopyRows == 0 && kVectors % kCopyVectors == 0);
  static constexpr float kNorm = kHadamard == 1     ? 1.f  // kHadamard ** -0.5
                                 : kHadamard == 4   ? 0.5f
                                 : kHadamard == 32  ? 0.17677669529663687f
                                 : kHadamard == 64  ? 0.125f
                                 : kHadamard == 128 ? 0.08838834764831845f
                                                    : 0.0625f;
  static_assert(kRotation != Rotation::kWide || kHadamard % 32 == 0);
};

// Where vector v of row r lies in the shared memory of a warp: row by row, but such that neither the copies of a warp,
// whole rows at a time, nor the reads of its threads, a group of eight rows each, meet in a bank.
template <class Shape>
FLASHHOPPER_HOST_DEVICE constexpr int row_place(int r, int v) {
  return r * Shape::kVectors + (v ^ (Shape::kVectors % 8 == 0 ? r % 2 * 4 : 0));
}

// The columns of a group in the products that rotate it. `half` h of the group are columns 4h .. 4h + 3 of each
// thread's eight: 16 columns, the inner dimension of one product; a thread holds four of them, numbered by k. `tile`
// is one of four products' eight columns of results, n = 0 .. 7.
FLASHHOPPER_HOST_DEVICE constexpr int product_input(int c, int half, int k) { return 8 * c + 4 * half + k; }
FLASHHOPPER_HOST_DEVICE constexpr int product_output(int tile, int n) { return 8 * (n / 2) + 2 * tile + n % 2; }

// Whether a product of this half gives anything to this tile: a matrix of four columns stays within a half.
FLASHHOPPER_HOST_DEVICE constexpr bool takes_part(Rotation rotation, int tile, int half) {
  return rotation == Rotation::kWide || half == tile / 2;
}

// B is the Hadamard matrix, (-1)^popcount(input & output), and nearly the same in every product: a lane, whose B is of
// inputs k of thread c = lane % 4 and of output n = lane / 4, holds two numbers (k even, odd) and their negatives.
// pair: k / 2.
struct HadamardPair {
  int even, odd;  // +1 or -1, or 0 where the columns do not mix
};
FLASHHOPPER_HOST_DEVICE constexpr HadamardPair hadamard_pair(Rotation rotation, int lane) {
  int const c = lane % 4, n = lane / 4, common = c & (n / 2);
  if (rotation == Rotation::kQuads && c != n / 2) return {0, 0};
  int const sign = rotation == Rotation::kWide && ((common ^ (common >> 1)) & 1) != 0 ? -1 : 1;
  return {sign, n % 2 != 0 ? -sign : sign};
}
FLASHHOPPER_HOST_DEVICE constexpr bool is_negated(Rotation rotation, int tile, int half, int pair) {
  int const halves = rotation == Rotation::kWide ? half & (tile / 2) : 0;
  return (halves ^ (pair & tile & 1)) != 0;
}

}  // namespace flashhopper
