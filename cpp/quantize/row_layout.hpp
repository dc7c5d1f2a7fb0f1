// Which thread of the rows' kernel holds which columns, and where a warp keeps its rows in shared memory. Used by
// rows.hpp and rotate.hpp; a host test proves it.
#pragma once

#include "core/platform.hpp"
#include "core/value_layout.hpp"

namespace flashhopper {

enum class Rotation {
  kNone,
  kQuads,  // four columns at a time, all of one thread
  kWide,   // as many as the head dimension allows
};

// Which thread holds what: kLanes neighbouring threads share a row, each with chunks of 16 columns. When it stores,
// chunk i of lane l is the columns (i * kLanes + l) * 16 .. + 15 (stored_group), so that a row's lanes store side by
// side. The stages of a Hadamard matrix between columns of one thread are additions; between lanes they cost shuffles,
// the scarcest instruction here. Where the matrix is as wide as the row, lanes begin with neighbouring chunks
// (loaded_group) and exchange half of what they hold, one shuffle for two results; else every element is shuffled. A
// warp has its rows for itself, and no barrier but that of the block's largest magnitude. At d192, whose matrix is 64
// wide, a warp of a rotated block has one matrix's columns of more rows instead (a part): two lanes share them as at
// d64, and a thread reads signs and means once for two rows. Three warps then have parts of the same rows.
template <int kDim, Rotation kRotation, bool kSmooth = false>
struct RowsShape {
  static constexpr int kHeadDim = kDim;
  static constexpr bool kIsWide = kRotation == Rotation::kWide;
  static constexpr int kHadamard = kIsWide ? hadamard_block(kDim) : kRotation == Rotation::kQuads ? 4 : 1;
  static constexpr int kParts = kIsWide && kDim == 192 ? 3 : 1;  // of a row, in neighbouring warps
  static constexpr int kColumns = kDim / kParts;                 // of a part
  static constexpr int kLanes = kColumns >= 192 ? 4 : 2;
  static constexpr int kChunks = kColumns / (16 * kLanes);
  static constexpr int kElements = 16 * kChunks;  // of a row in one thread
  static constexpr int kThreads = kParts > 1 ? 384 : kDim >= 192 ? 512 : 256;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kRowsPerPass = 32 / kLanes;  // of a warp
  static constexpr int kWarpRows = kScaleBlock * kParts / kWarps;
  static constexpr int kRows = kWarpRows / kRowsPerPass;  // of a thread
  static constexpr int kSlots = kRows * kElements / 8;
  // At once on a multiprocessor: as many as registers and shared memory allow.
  static constexpr bool kIsHeavy = kRotation != Rotation::kNone && kSmooth;
  static constexpr bool kIsLight = kRotation == Rotation::kNone && !kSmooth;
  static constexpr int kCtas = kDim >= 192 ? 1 : kDim == 64 ? (kIsHeavy ? 3 : 4) : kDim == 96 && kIsLight ? 3 : 2;
  static constexpr int kSmemBytes = kSlots * kThreads * 16;
  // One copy of a warp: kCopyRows rows of kCopyVectors vectors each, so that places differ by constants alone.
  static constexpr int kVectors = kColumns / 8;  // of a part
  static constexpr int kCopyVectors = kDim == 96 ? 4 : 8;
  static constexpr int kCopyRows = 32 / kCopyVectors;
  static_assert(kWarpRows % kCopyRows == 0 && kVectors % kCopyVectors == 0);
  static constexpr bool kExchange = kIsWide && kHadamard == kColumns;
  static constexpr float kNorm = kHadamard == 1     ? 1.f  // kHadamard ** -0.5
                                 : kHadamard == 4   ? 0.5f
                                 : kHadamard == 32  ? 0.17677669529663687f
                                 : kHadamard == 64  ? 0.125f
                                 : kHadamard == 128 ? 0.08838834764831845f
                                                    : 0.0625f;
  static_assert(kRows * kRowsPerPass * kWarps == kScaleBlock * kParts);
  static_assert(!kIsWide || kHadamard % (16 * kLanes) == 0);

  // Which 16 columns of a part chunk i of a lane is when it is loaded, and when it is stored.
  FLASHHOPPER_HOST_DEVICE static constexpr int loaded_group(int lane, int i) {
    return kExchange ? lane * kChunks + i : i * kLanes + lane;
  }
  // An exchange has swapped the lane's bits with those of the chunk; where chunks have a bit more, that one stays.
  FLASHHOPPER_HOST_DEVICE static constexpr int stored_group(int lane, int i) {
    int const place = kExchange && kChunks > kLanes ? i / 2 + i % 2 * 2 : i;
    return place * kLanes + lane;
  }
};

// Where vector v of row r lies in the shared memory of a warp: row by row, but such that neither the copies of a warp,
// whole rows at a time, nor the reads of its threads, two neighbouring vectors of every row each, meet in a bank.
template <class Shape>
FLASHHOPPER_HOST_DEVICE constexpr int row_place(int r, int v) {
  constexpr int kVectors = Shape::kVectors;
  int swizzle = kVectors % 8 != 0 ? r / 2 % 2 : Shape::kLanes == 4 ? r % 2 : r % 2 + r / 2 % 2 * 4;
  if (Shape::kExchange) swizzle = kVectors == 8 ? r % 4 : swizzle ^ (v / 8 % Shape::kLanes * 2);
  return r * kVectors + (v ^ swizzle);
}

// Where the vectors of a thread lie, vector b (of two) of chunk i: `first` is where its very first one does. The
// swizzle is a xor of three bits (of 12 vectors a row, of one), so what differs is known when this compiles.
template <class Shape>
FLASHHOPPER_HOST_DEVICE constexpr int chunk_place(int first, int i, int b) {
  constexpr int kXor = Shape::kVectors % 8 == 0 ? 7 : 1;
  int const offset = (Shape::loaded_group(0, i) - Shape::loaded_group(0, 0)) * 2 + b;
  return (first ^ (offset & kXor)) + (offset & ~kXor);
}

// Where the float of a column (its sign, its mean) stands in shared memory. Lanes of a row read at once, columns a
// power of two apart: four floats more after every 32 put them into different banks.
FLASHHOPPER_HOST_DEVICE constexpr int column_place(int column) { return column + column / 32 * 4; }
inline constexpr int column_places(int columns) { return columns + columns / 32 * 4; }

// The same of a lane's chunk i; what differs between chunks is known when this compiles.
template <class Shape>
FLASHHOPPER_HOST_DEVICE constexpr int chunk_columns(int lane, int i) {
  return column_place(Shape::loaded_group(lane, 0) * 16) +
         column_place((Shape::loaded_group(0, i) - Shape::loaded_group(0, 0)) * 16);
}

}  // namespace flashhopper
