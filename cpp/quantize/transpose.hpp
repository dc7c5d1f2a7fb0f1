// Values that are e4m3 already, turned into the layout that the 8-bit forward reads. Before it: src/quantize_common.cu;
// the same for 16-bit values: values.hpp.
#pragma once

#include "quantize/io.hpp"

namespace flashhopper {

inline constexpr int kTransposeThreads = 128;

// Four bytes of one row, as many of them as the row has.
FLASHHOPPER_DEVICE uint32_t load_bytes(uint8_t const* row, int column, SourceView const& source) {
  if (source.vectors && column + 4 <= source.head_dim) return *reinterpret_cast<uint32_t const*>(row + column);
  uint32_t word = 0;
  FLASHHOPPER_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (column + i < source.head_dim) word |= static_cast<uint32_t>(row[column + i]) << (8 * i);
  }
  return word;
}

// One CTA a block of 128 keys; an item is 4 channels of the 4 keys that stand side by side in a row of the result.
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_values_kernel(__grid_constant__ ValuesArgs const args, int columns) {
  extern __shared__ uint4 smem[];
  auto* const tile = reinterpret_cast<uint32_t*>(smem);  // see value_tile_word
  QuantizeTask const at = task_at(args.blocks, static_cast<int>(blockIdx.x));
  int const thread = thread_index(), quads = columns / 4;
  constexpr int kInFlight = 4;
  for (int first = thread; first < quads * (kScaleBlock / 4); first += kInFlight * kTransposeThreads) {
    uint32_t raw[kInFlight][4];
    FLASHHOPPER_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      int const item = first + i * kTransposeThreads, word = item / quads;
      FLASHHOPPER_UNROLL
      for (int e = 0; e < 4; ++e) {
        int const position = at.block * kScaleBlock + word / 4 * kValueGroup + value_key(word % 4 * 4 + e);
        bool const exists = word < kScaleBlock / 4 && position < at.seqlen;
        raw[i][e] =
            exists ? load_bytes(source_row<uint8_t>(args.source, at, position), item % quads * 4, args.source) : 0;
      }
    }
    FLASHHOPPER_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      int const item = first + i * kTransposeThreads, word = item / quads, channel = item % quads * 4;
      if (word >= kScaleBlock / 4) continue;
      uint32_t const ab = __byte_perm(raw[i][0], raw[i][1], 0x5140), AB = __byte_perm(raw[i][0], raw[i][1], 0x7362);
      uint32_t const cd = __byte_perm(raw[i][2], raw[i][3], 0x5140), CD = __byte_perm(raw[i][2], raw[i][3], 0x7362);
      tile[value_tile_word(channel, word)] = __byte_perm(ab, cd, 0x5410);
      tile[value_tile_word(channel + 1, word)] = __byte_perm(ab, cd, 0x7632);
      tile[value_tile_word(channel + 2, word)] = __byte_perm(AB, CD, 0x5410);
      tile[value_tile_word(channel + 3, word)] = __byte_perm(AB, CD, 0x7632);
    }
  }
  __syncthreads();
  int64_t const keys = int64_t{args.blocks.per_head} * kScaleBlock;
  uint8_t* const to = args.data + at.entry_head(args.blocks) * columns * keys + at.block * kScaleBlock;
  for (int piece = thread; piece < columns * 8; piece += kTransposeThreads) {
    int const channel = piece / 8;
    *reinterpret_cast<uint4*>(to + channel * keys + piece % 8 * 16) =
        *reinterpret_cast<uint4 const*>(tile + value_tile_word(channel, piece % 8 * 4));
  }
}

}  // namespace flashhopper
