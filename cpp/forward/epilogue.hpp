// The end of a work tile: log-sum-exp and normalised output from registers to device memory.
// Before it: consumer.hpp.
#pragma once

#include "core/elements.hpp"
#include "core/softmax.hpp"
#include "forward/args.hpp"

namespace flashhopper {

// Positions [begin, end) of a sequence, those that a store writes.
struct StoredRows {
  int begin, end;
  FLASHHOPPER_DEVICE bool has(int position) const { return position >= begin && position < end; }
};

// What the rows of a thread are (core/row_map.hpp); position -1: nothing.
struct ThreadRows {
  int position[kRowsPerThread], head[kRowsPerThread];
};

// One thread of each quad writes its two rows.
FLASHHOPPER_DEVICE void store_lse(ForwardArgs const& args, SequenceTile const& tile, StoredRows stored,
                                  float const (&lse)[kRowsPerThread], ThreadRows const& rows, int lane) {
  if (lane % 4 != 0) return;
  float* const base = args.lse.data + tile.batch * args.lse.batch_stride + tile.rows.q.begin;
  FLASHHOPPER_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    int const position = rows.position[r];
    if (stored.has(position)) base[rows.head[r] * args.lse.head_stride + position] = lse[r];
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

// Where a thread writes its two rows of out: its 8 of the first 32 columns; null: nowhere.
template <class Element>
struct OutputRows {
  Element* row[kRowsPerThread];

  FLASHHOPPER_DEVICE OutputRows(OutputTensor const& out, SequenceTile const& tile, StoredRows stored,
                                ThreadRows const& rows, int lane) {
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      int const position = rows.position[r];
      int64_t const offset = tile.batch * out.batch_stride + rows.head[r] * out.head_stride +
                             (tile.rows.q.begin + position) * out.row_stride;
      row[r] = stored.has(position) ? static_cast<Element*>(out.data) + offset + lane % 4 * 8 : nullptr;
    }
  }
};

// Writes 32 columns of the two rows of a thread, from the 16 floats that the accumulator holds of them. A quad has a
// row in pieces of two columns, eight columns apart; exchanged among its threads they become 16 bytes in each, so that
// a warp writes 64 contiguous bytes of eight rows. This goes past shared memory because the slot of the queries is then
// free as soon as their last scores are done.
template <class Element>
FLASHHOPPER_DEVICE void store_columns(OutputRows<Element> const& target, float const* outputs, int first_column,
                                      int columns, int lane) {
  FLASHHOPPER_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    uint32_t piece[4];
    FLASHHOPPER_UNROLL
    for (int i = 0; i < 4; ++i) piece[i] = pack<Element>(outputs[4 * i + 2 * r], outputs[4 * i + 2 * r + 1]);
    transpose_quad(piece, lane);
    // In this form, or the compiler would keep first_column + lane % 4 * 8 in registers, one for each first_column.
    if (target.row[r] != nullptr && lane % 4 * 8 < columns - first_column) {
      *reinterpret_cast<uint4*>(target.row[r] + first_column) = uint4{piece[0], piece[1], piece[2], piece[3]};
    }
  }
}

template <class Element, int kOutputs>
FLASHHOPPER_DEVICE void store_output(ForwardArgs const& args, SequenceTile const& tile,
                                     float const (&outputs)[kOutputs], ThreadRows const& rows, int lane) {
  OutputRows<Element> const target(args.out, tile, {0, tile.rows.q.seqlen}, rows, lane);
  FLASHHOPPER_UNROLL
  for (int e = 0; e < kOutputs; e += 16) {
    store_columns(target, outputs + e, accumulator_column(e), args.out.head_dim_v, lane);
  }
}

// Rows that see no key: output 0, which has the same bits in every element type.
template <int kHeadDimV>
FLASHHOPPER_DEVICE void store_nothing_seen(ForwardArgs const& args, SequenceTile const& tile, StoredRows stored,
                                           float const (&lse)[kRowsPerThread], ThreadRows const& rows, int lane) {
  OutputRows<element::fp16> const target(args.out, tile, stored, rows, lane);
  float const zeros[16] = {};
#pragma unroll 1
  for (int column = 0; column < kHeadDimV; column += 32) {
    store_columns(target, zeros, column, args.out.head_dim_v, lane);
  }
  store_lse(args, tile, stored, lse, rows, lane);
}

// Rows that lie in the sequence's place and do not exist: output 0, lse -inf.
template <int kHeadDimV>
FLASHHOPPER_DEVICE void store_unused(ForwardArgs const& args, SequenceTile const& tile, ThreadRows const& rows,
                                     int lane) {
  StoredRows const unused{tile.rows.q.seqlen, tile.rows.q.rows};
  if (unused.begin == unused.end) return;  // the same for all threads
  store_nothing_seen<kHeadDimV>(args, tile, unused, {-INFINITY, -INFINITY}, rows, lane);
}

// The logits of the rows' query heads, which join their denominators; -inf where there are none.
FLASHHOPPER_DEVICE void load_sinks(ForwardArgs const& args, int const (&head)[kRowsPerThread],
                                   float (&sink)[kRowsPerThread]) {
  sink[0] = sink[1] = -INFINITY;
  if (args.sink == nullptr) return;  // the same for all threads
  FLASHHOPPER_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) sink[r] = args.sink[head[r]];
}

}  // namespace flashhopper
