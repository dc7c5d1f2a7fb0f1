// V to e4m3, turned so that keys are contiguous: mean, largest magnitude of 128 keys, scale, cast, transpose. One CTA a
// block of 128 keys, many blocks one after another: the next one arrives in shared memory meanwhile.
// Before it: launch.hpp. Beside it: rows.hpp. The order of the keys: core/value_layout.hpp.
#pragma once

#include "quantize/io.hpp"

namespace flashhopper {

// A thread takes items: 8 channels of the 4 keys that stand side by side in a row of the result.
template <int kDim>
struct ValuesShape {
  static constexpr int kVectors = kDim / 8;
  static constexpr int kItems = 2;  // of a thread
  static constexpr int kThreads = kScaleBlock / 4 * kVectors / kItems;
  static constexpr int kSlots = 4 * kItems;
  static constexpr int kCtas = kDim == 64 ? 6 : kDim == 96 ? 4 : kDim == 128 ? 3 : 2;
  static constexpr int kSlotBytes = kSlots * kThreads * 16;
  static constexpr int kSmemBytes = kSlotBytes + kDim * kScaleBlock;
};

// First key of the block that word `word` (of 32) of a channel holds; its four are this one + value_key(e).
FLASHHOPPER_DEVICE int first_key(int word) { return word / 4 * kValueGroup + value_key(word % 4 * 4); }

template <class Element, class Shape>
FLASHHOPPER_DEVICE void fetch_values(ValuesArgs const& args, QuantizeTask const& at, uint4* slots) {
  int const thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = 0; i < Shape::kItems; ++i) {
    int const item = i * Shape::kThreads + thread;
    int const word = item / Shape::kVectors, column = item % Shape::kVectors * 8;
    int const first = at.block * kScaleBlock + first_key(word);
    int const left = column < args.source.head_dim ? at.seqlen - first : 0;  // rows from the first to the end
    Element const* const row = source_row<Element>(args.source, at, left > 0 ? first : 0) + column;
    uint4* const to = slots + 4 * i * Shape::kThreads + thread;
    if (args.source.vectors) {
      FLASHHOPPER_UNROLL
      for (int e = 0; e < 4; ++e) {
        fetch_aligned(to + e * Shape::kThreads, row + value_key(e) * args.source.row_stride, value_key(e) < left);
      }
    } else {
#pragma unroll 1
      for (int e = 0; e < 4; ++e) {
        fetch_unaligned(to + e * Shape::kThreads, row + value_key(e) * args.source.row_stride, value_key(e) < left);
      }
    }
  }
  commit_copies();
}

// Calls use(j, x) for the two channels j, j + 1 of every pair of an item's eight: x[e][0], x[e][1] are those of key e
// less the mean, zeros for keys past the end. Pair by pair, for registers are few.
template <class Element, class Shape, bool kCenter, class Use>
FLASHHOPPER_DEVICE void for_pairs(ValuesArgs const& args, QuantizeTask const& at, uint4 const* raw, int item,
                                  Use const& use) {
  int const word = item / Shape::kVectors, column = item % Shape::kVectors * 8;
  int const left = at.seqlen - at.block * kScaleBlock - first_key(word);
  float const* means = nullptr;
  if constexpr (kCenter) {
    means = args.mean + at.sequence_head(args.blocks) * (Shape::kVectors * 8) + column;
  }
  FLASHHOPPER_UNROLL
  for (int j = 0; j < 8; j += 2) {
    float2 mean = {0.f, 0.f};
    if constexpr (kCenter) {
      if (j == 4) __syncwarp();  // ptxas would load all means at once, and spill
      mean = *reinterpret_cast<float2 const*>(means + j);
    }
    float x[4][2];
    FLASHHOPPER_UNROLL
    for (int e = 0; e < 4; ++e) {
      uint32_t const words[4] = {raw[e].x, raw[e].y, raw[e].z, raw[e].w};
      float2 const pair = unpack<Element>(words[j / 2]);
      bool const exists = !kCenter || value_key(e) < left;  // without a mean zeros came from fetch_values
      x[e][0] = exists ? pair.x - mean.x : 0.f;
      x[e][1] = exists ? pair.y - mean.y : 0.f;
    }
    use(j, x);
  }
}

// The first task from `task` on whose block has rows, in steps of the grid; blocks.tasks or more: none is left.
FLASHHOPPER_DEVICE QuantizeTask next_values(ValuesArgs const& args, int task) {
  QuantizeTask at{.task = task};
  for (; at.task < args.blocks.tasks; at.task += static_cast<int>(gridDim.x)) {
    at = task_at(args.blocks, at.task);
    if (at.has_rows()) break;
  }
  return at;
}

template <class Element, int kDim, bool kCenter>
__global__ void __launch_bounds__(ValuesShape<kDim>::kThreads, ValuesShape<kDim>::kCtas)
    quantize_values_kernel(__grid_constant__ ValuesArgs const args) {
  using Shape = ValuesShape<kDim>;
  extern __shared__ uint4 slots[];
  auto* const tile = reinterpret_cast<uint32_t*>(slots + Shape::kSlots * Shape::kThreads);  // see value_tile_word
  __shared__ float maxima[Shape::kThreads / 32];
  __shared__ QuantizeTask tasks[2][Shape::kThreads / 32];  // of each warp: the block's and the next one's
  int const thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  auto const fetch_next = [&](QuantizeTask& next, int from) {
    __syncwarp();  // the block before has been read
    QuantizeTask const found = next_values(args, from);
    if (thread % 32 == 0) next = found;
    __syncwarp();
    if (next.task < args.blocks.tasks) fetch_values<Element, Shape>(args, next, slots);
  };
  fetch_next(tasks[0][warp], static_cast<int>(blockIdx.x));
  for (int parity = 0; tasks[parity][warp].task < args.blocks.tasks; parity ^= 1) {
    QuantizeTask const& at = tasks[parity][warp];
    uint4 raw[Shape::kSlots];
    wait_for_copies();
    FLASHHOPPER_UNROLL
    for (int s = 0; s < Shape::kSlots; ++s) raw[s] = slots[s * Shape::kThreads + thread];
    float amax = 0.f;
    FLASHHOPPER_UNROLL
    for (int i = 0; i < Shape::kItems; ++i) {
      for_pairs<Element, Shape, kCenter>(args, at, raw + 4 * i, i * Shape::kThreads + thread,
                                         [&](int, float const(&x)[4][2]) {
                                           FLASHHOPPER_UNROLL
                                           for (int e = 0; e < 4; ++e)
                                             amax = fmaxf(amax, fmaxf(fabsf(x[e][0]), fabsf(x[e][1])));
                                         });
    }
    fetch_next(tasks[parity ^ 1][warp], at.task + static_cast<int>(gridDim.x));
    amax = warp_max(amax);
    if (thread % 32 == 0) maxima[warp] = amax;
    __syncthreads();  // also: the tile of the block before has been read
    FLASHHOPPER_UNROLL
    for (int w = 0; w < Shape::kThreads / 32; ++w) amax = fmaxf(amax, maxima[w]);
    // The compiler must not keep the floats of the first pass for the second: they are twice the registers.
    FLASHHOPPER_UNROLL
    for (uint4& bits : raw) asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
    float const scale = scale_of(amax, 448.f);
    float const factor = __frcp_rn(scale);
    FLASHHOPPER_UNROLL
    for (int i = 0; i < Shape::kItems; ++i) {
      int const item = i * Shape::kThreads + thread;
      int const word = item / Shape::kVectors, vector = item % Shape::kVectors;
      for_pairs<Element, Shape, kCenter>(args, at, raw + 4 * i, item, [&](int j, float const(&x)[4][2]) {
        FLASHHOPPER_UNROLL
        for (int n = 0; n < 2; ++n) {
          tile[value_tile_word(vector * 8 + j + n, word)] =
              to_e4m3(__fmul_rn(x[0][n], factor), __fmul_rn(x[1][n], factor), __fmul_rn(x[2][n], factor),
                      __fmul_rn(x[3][n], factor));
        }
      });
    }
    __syncthreads();
    int64_t const keys = int64_t{args.blocks.per_head} * kScaleBlock;
    uint8_t* const to =
        args.data + at.entry_head(args.blocks) * kDim * keys + int64_t{at.first_block + at.block} * kScaleBlock;
#pragma unroll 2
    for (int i = 0; i < kDim * 8 / Shape::kThreads; ++i) {
      int const piece = i * Shape::kThreads + thread, channel = piece / 8;
      *reinterpret_cast<uint4*>(to + channel * keys + piece % 8 * 16) =
          *reinterpret_cast<uint4 const*>(tile + value_tile_word(channel, piece % 8 * 4));
    }
    if (thread == 0) args.scale[at.block_place(args.blocks)] = scale;
  }
}

}  // namespace flashhopper
