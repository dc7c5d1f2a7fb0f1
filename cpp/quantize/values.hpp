// V to e4m3, turned so that keys are contiguous: mean, largest magnitude of 128 keys, scale, cast, transpose. One CTA a
// block of 128 keys, many blocks one after another: the next one arrives in shared memory meanwhile.
// Before it: launch.hpp. Beside it: rows.hpp. The order of the keys: core/value_layout.hpp.
#pragma once

#include "core/barriers.hpp"
#include "quantize/io.hpp"

namespace flashhopper {

// A thread takes items: 8 channels of the 4 keys that stand side by side in a row of the result.
template <int kDim>
struct ValuesShape {
  static constexpr int kVectors = kDim / 8;
  static constexpr int kItems = 2;  // of a thread
  static constexpr int kThreads = kScaleBlock / 4 * kVectors / kItems;
  static constexpr int kSlots = 4 * kItems;
  static constexpr int kCtas = kDim == 64 ? 8 : kDim == 96 ? 5 : kDim == 128 ? 4 : 2;
  static constexpr int kSlotBytes = kSlots * kThreads * 16;
  static constexpr int kSmemBytes = kSlotBytes + kDim * kScaleBlock;
};

// First key of the block that word `word` (of 32) of a channel holds; its four are this one + value_key(e).
FLASHHOPPER_DEVICE int first_key(int word) { return word / 4 * kValueGroup + value_key(word % 4 * 4); }

// Rows past the end are those of the last one once more, which changes no maximum; store_tile() makes zeros of them.
template <class Element, class Shape>
FLASHHOPPER_DEVICE void fetch_values(ValuesArgs const& args, QuantizeTask const& at, uint4* slots) {
  int const thread = thread_index();
  int const block = at.block * kScaleBlock, last = at.seqlen - 1;
  uint4* const to = slots + thread;
  if (args.source.vectors && args.source.head_dim == Shape::kVectors * 8 && block + kScaleBlock <= at.seqlen) {
    int64_t const stride = args.source.row_stride;
    Element const* row = source_row<Element>(args.source, at, block + first_key(thread / Shape::kVectors)) +
                         thread % Shape::kVectors * 8;
    FLASHHOPPER_UNROLL
    for (int i = 0; i < Shape::kItems; ++i) {
      Element const* const far = row + value_key(2) * stride;
      fetch_vector(to + (4 * i + 0) * Shape::kThreads, row);
      fetch_vector(to + (4 * i + 1) * Shape::kThreads, row + stride);
      fetch_vector(to + (4 * i + 2) * Shape::kThreads, far);
      fetch_vector(to + (4 * i + 3) * Shape::kThreads, far + stride);
      row += kScaleBlock / Shape::kItems * stride;
    }
    commit_copies();
    return;
  }
#pragma unroll 1
  for (int s = 0; s < Shape::kSlots; ++s) {
    int const item = s / 4 * Shape::kThreads + thread;
    int const column = item % Shape::kVectors * 8;
    int const position = block + first_key(item / Shape::kVectors) + value_key(s % 4);
    bool const exists = column < args.source.head_dim;
    Element const* const from = source_row<Element>(args.source, at, min_of(position, last)) + (exists ? column : 0);
    if (args.source.vectors) {
      fetch_aligned(to + s * Shape::kThreads, from, exists);
    } else {
      fetch_unaligned(to + s * Shape::kThreads, from, exists);
    }
  }
  commit_copies();
}

// The largest magnitude that a thread holds. Rounding keeps order, so that of a column less its mean is that of its
// largest or its smallest element: those are found two columns an instruction.
template <class Element, class Shape, bool kCenter>
FLASHHOPPER_DEVICE float largest(uint4 const (&raw)[Shape::kSlots], float const* means) {
  uint32_t high[4], low[4];
  FLASHHOPPER_UNROLL
  for (int s = 0; s < Shape::kSlots; ++s) {
    uint32_t const words[4] = {raw[s].x, raw[s].y, raw[s].z, raw[s].w};
    FLASHHOPPER_UNROLL
    for (int w = 0; w < 4; ++w) {
      high[w] = s == 0 ? words[w] : max_of_pairs<Element>(high[w], words[w]);
      low[w] = s == 0 ? words[w] : min_of_pairs<Element>(low[w], words[w]);
    }
  }
  float amax = 0.f;
  FLASHHOPPER_UNROLL
  for (int w = 0; w < 4; ++w) {
    float2 mean = {0.f, 0.f};
    if constexpr (kCenter) mean = reinterpret_cast<float2 const*>(means)[w];
    float2 const most = unpack<Element>(high[w]), least = unpack<Element>(low[w]);
    amax = fmaxf(amax, fmaxf(fabsf(most.x - mean.x), fabsf(least.x - mean.x)));
    amax = fmaxf(amax, fmaxf(fabsf(most.y - mean.y), fabsf(least.y - mean.y)));
  }
  return amax;
}

// Casts what a thread holds, less the means, into the tile.
template <class Element, class Shape, bool kCenter>
FLASHHOPPER_DEVICE void fill_tile(uint4 const (&raw)[Shape::kSlots], float const* means, float factor, uint32_t* tile) {
  int const thread = thread_index(), vector = thread % Shape::kVectors;
  FLASHHOPPER_UNROLL
  for (int w = 0; w < 4; ++w) {
    float2 mean = {0.f, 0.f};
    if constexpr (kCenter) {
      if (w == 2) __syncwarp();  // ptxas would load all means at once, and spill
      mean = reinterpret_cast<float2 const*>(means)[w];
    }
    FLASHHOPPER_UNROLL
    for (int i = 0; i < Shape::kItems; ++i) {
      int const word = thread / Shape::kVectors + i * (kScaleBlock / 4 / Shape::kItems);
      uint32_t* const to = tile + value_tile_word(vector * 8, word) + 2 * w * (kScaleBlock / 4);
      float x[4], y[4];
      FLASHHOPPER_UNROLL
      for (int e = 0; e < 4; ++e) {
        uint4 const& bits = raw[4 * i + e];
        uint32_t const words[4] = {bits.x, bits.y, bits.z, bits.w};
        float2 const pair = unpack<Element>(words[w]);
        x[e] = __fmul_rn(pair.x - mean.x, factor);
        y[e] = __fmul_rn(pair.y - mean.y, factor);
      }
      to[0] = to_e4m3(x[0], x[1], x[2], x[3]);
      to[kScaleBlock / 4] = to_e4m3(y[0], y[1], y[2], y[3]);
    }
  }
}

// 16 bytes of a channel with zeros for the keys that do not exist. left: keys from the first of the 16 to the end.
FLASHHOPPER_DEVICE void clear_missing(uint4& piece, int left) {
  asm volatile("" : "+r"(left));  // the compiler would work out all the masks of a block, and spill
  uint32_t* const words[4] = {&piece.x, &piece.y, &piece.z, &piece.w};
  FLASHHOPPER_UNROLL
  for (int i = 0; i < 16; ++i) {
    if (value_key(i) >= left) *words[i / 4] &= ~(0xffu << (i % 4 * 8));
  }
}

// The tile to memory, channel by channel, with zeros for the keys that do not exist.
template <class Shape>
FLASHHOPPER_DEVICE void store_tile(ValuesArgs const& args, QuantizeTask const& at, uint32_t const* tile) {
  constexpr int kDim = Shape::kVectors * 8, kStep = Shape::kThreads / 8;  // channels
  int const thread = thread_index(), place = thread % 8;                  // of 16 keys
  int const left = at.seqlen - at.block * kScaleBlock;
  int64_t const keys = int64_t{args.blocks.per_head} * kScaleBlock;
  uint8_t* to = args.data + (at.entry_head(args.blocks) * kDim + thread / 8) * keys +
                int64_t{at.first_block + at.block} * kScaleBlock + place * 16;
#pragma unroll 2
  for (int channel = 0; channel < kDim; channel += kStep) {
    uint4 piece = *reinterpret_cast<uint4 const*>(tile + value_tile_word(thread / 8 + channel, place * 4));
    if (left < kScaleBlock) clear_missing(piece, left - place * kValueGroup);
    *reinterpret_cast<uint4*>(to) = piece;
    to += kStep * keys;
  }
}

// The first task from the `number`-th on whose block has rows, in steps of the grid; blocks.tasks or more where none is
// left.
FLASHHOPPER_DEVICE QuantizeTask next_values(ValuesArgs const& args, int number) {
  for (; number < args.blocks.tasks; number += static_cast<int>(gridDim.x)) {
    QuantizeTask const found = task_at(args.blocks, number);
    if (found.has_rows()) return found;
  }
  return {.task = number};
}

template <class Element, int kDim, bool kCenter>
__global__ void __launch_bounds__(ValuesShape<kDim>::kThreads, ValuesShape<kDim>::kCtas)
    quantize_values_kernel(__grid_constant__ ValuesArgs const args) {
  using Shape = ValuesShape<kDim>;
  extern __shared__ uint4 slots[];
  auto* const tile = reinterpret_cast<uint32_t*>(slots + Shape::kSlots * Shape::kThreads);  // see value_tile_word
  __shared__ float maxima[Shape::kThreads / 32];
  __shared__ QuantizeTask tasks[2][Shape::kThreads / 32];  // of each warp: the block's and the next one's
  int const thread = thread_index(), warp = thread / 32;
  auto const fetch_next = [&](QuantizeTask& next, int from) {
    __syncwarp();  // the block before has been read
    QuantizeTask const found = next_values(args, from);
    if (thread % 32 == 0) next = found;
    __syncwarp();
    if (next.task < args.blocks.tasks) fetch_values<Element, Shape>(args, next, slots);
  };
  fetch_next(tasks[0][warp], static_cast<int>(blockIdx.x));
  await_previous();  // the means
  allow_next();
  for (int parity = 0; tasks[parity][warp].task < args.blocks.tasks; parity ^= 1) {
    QuantizeTask const& at = tasks[parity][warp];
    float const* means = nullptr;
    if constexpr (kCenter) means = args.mean + at.sequence_head(args.blocks) * kDim + thread % Shape::kVectors * 8;
    uint4 raw[Shape::kSlots];
    wait_for_copies();
    FLASHHOPPER_UNROLL
    for (int s = 0; s < Shape::kSlots; ++s) raw[s] = slots[s * Shape::kThreads + thread];
    fetch_next(tasks[parity ^ 1][warp], at.task + static_cast<int>(gridDim.x));
    float amax = warp_max(largest<Element, Shape, kCenter>(raw, means));
    if (thread % 32 == 0) maxima[warp] = amax;
    __syncthreads();  // also: the tile of the block before has been read
    FLASHHOPPER_UNROLL
    for (int w = 0; w < Shape::kThreads / 32; ++w) amax = fmaxf(amax, maxima[w]);
    float const scale = scale_of(amax, 448.f);
    fill_tile<Element, Shape, kCenter>(raw, means, __frcp_rn(scale), tile);
    __syncthreads();
    store_tile<Shape>(args, at, tile);
    if (thread == 0) args.scale[at.block_place(args.blocks)] = scale;
  }
}

}  // namespace flashhopper
