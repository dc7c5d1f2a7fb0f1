// The end of a work tile: log-sum-exp and normalised output from registers to device memory.
// Before it: consumer.hpp.
#pragma once

#include "core/elements.hpp"
#include "core/softmax.hpp"
#include "forward/args.hpp"

namespace flashhopper {

// lse: (batch, heads, seqlen_q). One thread of each quad writes its two rows.
FLASHHOPPER_DEVICE void store_lse(ForwardArgs const& args, Tile const& tile, float const (&lse)[kRowsPerThread],
                                  int first_row, int lane) {
  if (lane % 4 != 0) return;
  int64_t const offset = (int64_t{tile.batch} * args.schedule.heads + tile.head) * args.mask.seqlen_q;
  FLASHHOPPER_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    int const row = first_row + 8 * r;
    if (row < args.mask.seqlen_q) args.lse[offset + row] = lse[r];
  }
}

// Transposes the 4 x 4 registers of a quad: register i of thread c becomes register c of thread i.
FLASHHOPPER_DEVICE void transpose_quad(uint32_t (&registers)[4], int lane) {
  FLASHHOPPER_UNROLL
  for (int bit = 1; bit <= 2; bit *= 2) {
    bool const upper = (lane & bit) != 0;
    FLASHHOPPER_UNROLL
    for (int low = 0; low < 4; ++low) {
      if ((low & bit) != 0) continue;
      int const high = low | bit;
      uint32_t const received = __shfl_xor_sync(0xffffffffu, upper ? registers[low] : registers[high], bit);
      (upper ? registers[low] : registers[high]) = received;
    }
  }
}

// Writes 32 columns of the two rows of a thread, from the 16 floats that the accumulator holds of them. A quad has a
// row in pieces of two columns, eight columns apart; exchanged among its threads they become 16 bytes in each, so that
// a warp writes 64 contiguous bytes of eight rows. This goes past shared memory because the slot of the queries is then
// free as soon as their last scores are done.
template <class Element>
FLASHHOPPER_DEVICE void store_columns(ForwardArgs const& args, Tile const& tile, float const* outputs, int first_row,
                                      int first_column, int lane) {
  OutputTensor const& out = args.out;
  int const column = first_column + lane % 4 * 8;
  Element* const base =
      static_cast<Element*>(out.data) + tile.batch * out.batch_stride + tile.head * out.head_stride + column;
  FLASHHOPPER_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    uint32_t piece[4];
    FLASHHOPPER_UNROLL
    for (int i = 0; i < 4; ++i) piece[i] = pack<Element>(outputs[4 * i + 2 * r], outputs[4 * i + 2 * r + 1]);
    transpose_quad(piece, lane);
    int const row = first_row + 8 * r;
    if (row < args.mask.seqlen_q && column < out.head_dim_v) {
      *reinterpret_cast<uint4*>(base + row * out.row_stride) = uint4{piece[0], piece[1], piece[2], piece[3]};
    }
  }
}

template <class Element, int kOutputs>
FLASHHOPPER_DEVICE void store_output(ForwardArgs const& args, Tile const& tile, float const (&outputs)[kOutputs],
                                     int first_row, int lane) {
  FLASHHOPPER_UNROLL
  for (int e = 0; e < kOutputs; e += 16) {
    store_columns<Element>(args, tile, outputs + e, first_row, accumulator_column(e), lane);
  }
}

// A tile that sees no key: output 0, lse -inf. Zero has the same bits in every element type.
template <int kHeadDimV>
FLASHHOPPER_DEVICE void store_nothing_seen(ForwardArgs const& args, Tile const& tile, int first_row, int lane) {
  float const zeros[16] = {};
#pragma unroll 1
  for (int column = 0; column < kHeadDimV; column += 32) {
    store_columns<element::fp16>(args, tile, zeros, first_row, column, lane);
  }
  store_lse(args, tile, {-INFINITY, -INFINITY}, first_row, lane);
}

}  // namespace flashhopper
