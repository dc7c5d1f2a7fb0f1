// Q and K to 8 bits in one pass: mean, signs, Hadamard matrix, largest magnitude, scale, cast. One CTA a block of 128
// rows, many blocks one after another: while a block is computed in registers the next one arrives in shared memory.
// Before it: launch.hpp. Beside it: values.hpp.
// Source: FlashAttention-3, section 3.3 (block quantisation, incoherent processing); SageAttention (key smoothing).
#pragma once

#include "core/barriers.hpp"
#include "quantize/io.hpp"

namespace flashhopper {

// Which thread holds what: kLanes neighbouring threads share a row, each with chunks of 16 columns, chunk i of lane l
// being columns (i * kLanes + l) * 16 .. + 15. So a lane stores 16 bytes, and a Hadamard matrix needs shuffles for one
// or two of its stages alone: shuffles are the scarcest instruction here. A warp has its rows for itself, and no
// barrier but that of the block's largest magnitude.
template <int kDim>
struct RowsShape {
  static constexpr int kHeadDim = kDim;
  static constexpr int kLanes = kDim >= 192 ? 4 : 2;
  static constexpr int kChunks = kDim / (16 * kLanes);
  static constexpr int kElements = 16 * kChunks;  // of a row in one thread
  static constexpr int kThreads = kDim >= 192 ? 512 : 256;
  static constexpr int kRowsPerPass = 32 / kLanes;                 // of a warp
  static constexpr int kRows = kScaleBlock / (kThreads / kLanes);  // of a thread
  static constexpr int kSlots = kRows * kElements / 8;
  static constexpr int kCtas = kDim >= 192 ? 1 : kDim == 64 ? 3 : 2;  // at once on a multiprocessor
  static constexpr int kSmemBytes = kSlots * kThreads * 16;
  static constexpr int kWarpRows = kScaleBlock / (kThreads / 32);
  // One copy of a warp: kCopyRows rows of kCopyVectors vectors each, so that places differ by constants alone.
  static constexpr int kCopyVectors = kDim == 96 ? 4 : 8;
  static constexpr int kCopyRows = 32 / kCopyVectors;
  static_assert(kWarpRows % kCopyRows == 0 && kDim / 8 % kCopyVectors == 0);
  static constexpr int kHadamard = hadamard_block(kDim);
  static constexpr float kNorm = kHadamard == 32    ? 0.17677669529663687f  // kHadamard ** -0.5
                                 : kHadamard == 64  ? 0.125f
                                 : kHadamard == 128 ? 0.08838834764831845f
                                                    : 0.0625f;
  static_assert(kRows * kRowsPerPass * (kThreads / 32) == kScaleBlock && kHadamard % (16 * kLanes) == 0);
};

// The first row of a block that the thread computes.
template <class Shape>
FLASHHOPPER_DEVICE int first_row() {
  int const thread = thread_index();
  return thread / 32 * Shape::kWarpRows + thread % 32 / Shape::kLanes;
}

// Where vector v of row r lies in the shared memory of a warp: row by row, but such that neither the copies of a warp,
// whole rows at a time, nor the reads of its threads, two neighbouring vectors of every row each, meet in a bank.
template <class Shape>
FLASHHOPPER_DEVICE int place(int r, int v) {
  constexpr int kVectors = Shape::kHeadDim / 8;
  int const swizzle = kVectors % 8 != 0 ? r / 2 % 2 : Shape::kLanes == 4 ? r % 2 : r % 2 + r / 2 % 2 * 4;
  return r * kVectors + (v ^ swizzle);
}

// A task of either operand: its number is of both together.
struct RowsTask : QuantizeTask {
  int is_k;
};

FLASHHOPPER_DEVICE int count_tasks(RowsArgs const& args) {
  return args.operands[0].blocks.tasks + args.operands[1].blocks.tasks;
}

// The first task from `task` on whose block has rows, in steps of the grid; count_tasks() or more: none is left.
FLASHHOPPER_DEVICE RowsTask next_rows(RowsArgs const& args, int task) {
  for (; task < count_tasks(args); task += static_cast<int>(gridDim.x)) {
    int const q_tasks = args.operands[0].blocks.tasks;
    bool const is_k = task >= q_tasks;
    RowsTask found{task_at(args.operands[is_k].blocks, task - (is_k ? q_tasks : 0)), is_k};
    found.task = task;
    if (found.has_rows()) return found;
  }
  return {{.task = task}, 0};
}

// Starts copying the rows of the warp. Addresses are the most of the work, so a block that is whole has a way of its
// own: no conditions, one addition a row.
template <class Element, class Shape>
FLASHHOPPER_DEVICE void copy_rows(SourceView const& source, RowsTask const& at, uint4* slots) {
  int const thread = thread_index(), lane = thread % 32;
  int const first = at.block * kScaleBlock + thread / 32 * Shape::kWarpRows;
  constexpr int kVectors = Shape::kHeadDim / 8;
  int const r = lane / Shape::kCopyVectors, v = lane % Shape::kCopyVectors;
  uint4* const to = slots + thread / 32 * 32 * Shape::kSlots;
  if (source.vectors && source.head_dim == Shape::kHeadDim && first + Shape::kWarpRows <= at.seqlen) {
    Element const* row = source_row<Element>(source, at, first + r) + v * 8;
    FLASHHOPPER_UNROLL
    for (int i = 0; i < Shape::kWarpRows; i += Shape::kCopyRows) {
      FLASHHOPPER_UNROLL
      for (int j = 0; j < kVectors; j += Shape::kCopyVectors) {
        fetch_vector(to + place<Shape>(r, v) + i * kVectors + j, row + j * 8);
      }
      row += Shape::kCopyRows * source.row_stride;
    }
    return;
  }
#pragma unroll 1
  for (int s = 0; s < Shape::kSlots; ++s) {
    int const row = (s * 32 + lane) / kVectors, vector = (s * 32 + lane) % kVectors;
    bool const exists = first + row < at.seqlen && vector * 8 < source.head_dim;
    Element const* const from = source_row<Element>(source, at, exists ? first + row : 0) + vector * 8;
    if (source.vectors) {
      fetch_aligned(to + place<Shape>(row, vector), from, exists);
    } else {
      fetch_unaligned(to + place<Shape>(row, vector), from, exists);
    }
  }
}

// Starts copying a task's block into the slots of the warp, and the mean that belongs to it.
template <class Element, class Shape, bool kSmooth>
FLASHHOPPER_DEVICE void fetch_rows(RowsArgs const& args, RowsTask const& at, uint4* slots, float* mean) {
  RowsOperand const& operand = args.operands[at.is_k];
  int const thread = thread_index();
  copy_rows<Element, Shape>(operand.source, at, slots);
  if constexpr (kSmooth) {
    int const mean_head = operand.by_group.quotient(at.head);
    float const* const from = operand.mean + (int64_t{at.sequence} * operand.mean_heads + mean_head) * Shape::kHeadDim;
    if (thread < Shape::kHeadDim / 4) fetch_aligned(reinterpret_cast<uint4*>(mean) + thread, from + thread * 4, true);
  }
  commit_copies();
}

// One row, spread over kLanes lanes, times signs and the Hadamard matrix, not yet divided by sqrt(kHadamard). Strides
// ascend, so that the sums are those of the plain in-place transform, bit for bit.
template <class Shape>
FLASHHOPPER_DEVICE void rotate_row(float (&x)[Shape::kElements], float const* signs, int lane) {
  FLASHHOPPER_UNROLL
  for (int i = 0; i < Shape::kChunks; ++i) {
    float* const chunk = x + 16 * i;
    auto const* const sign = reinterpret_cast<float4 const*>(signs + (i * Shape::kLanes + lane) * 16);
    FLASHHOPPER_UNROLL
    for (int e = 0; e < 16; e += 4) {
      float4 const s = sign[e / 4];
      float const first = chunk[e] * s.x, third = chunk[e + 2] * s.z;
      float const second = chunk[e + 1], fourth = chunk[e + 3];
      chunk[e] = __fmaf_rn(second, s.y, first);
      chunk[e + 1] = __fmaf_rn(-second, s.y, first);
      chunk[e + 2] = __fmaf_rn(fourth, s.w, third);
      chunk[e + 3] = __fmaf_rn(-fourth, s.w, third);
    }
  }
  auto const butterfly = [&](int i, int j) {
    float const sum = x[i] + x[j], difference = x[i] - x[j];
    x[i] = sum;
    x[j] = difference;
  };
  FLASHHOPPER_UNROLL
  for (int stride = 2; stride < 16; stride *= 2) {
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Shape::kElements; ++e) {
      if ((e & stride) == 0) butterfly(e, e + stride);
    }
  }
  FLASHHOPPER_UNROLL
  for (int offset = 1; offset < Shape::kLanes; offset *= 2) {
    float const sign = (lane & offset) != 0 ? -1.f : 1.f;
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Shape::kElements; ++e) {
      x[e] = __fmaf_rn(x[e], sign, __shfl_xor_sync(0xffffffffu, x[e], offset));
    }
  }
  FLASHHOPPER_UNROLL
  for (int stride = 16; stride < Shape::kHadamard / Shape::kLanes; stride *= 2) {
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Shape::kElements; ++e) {
      if ((e & stride) == 0) butterfly(e, e + stride);
    }
  }
}

// Subtracts the mean from the thread's rows (K), or leaves them and stores their products with it (Q). Both are
// computed in either case: a branch around registers that change costs copies of them all, and spills.
template <class Shape>
FLASHHOPPER_DEVICE void apply_mean(RowsOperand const& operand, QuantizeTask const& at, float const* mean,
                                   float (&x)[Shape::kRows][Shape::kElements]) {
  int const thread = thread_index(), lane = thread % Shape::kLanes;
  float const subtracted = operand.subtract ? 1.f : 0.f;
  float dots[Shape::kRows] = {};
  FLASHHOPPER_UNROLL
  for (int i = 0; i < Shape::kChunks; ++i) {
    if (i > 0) __syncwarp();  // ptxas would load all means at once, and spill
    FLASHHOPPER_UNROLL
    for (int e = 0; e < 16; e += 4) {
      float m[4];
      load_floats(reinterpret_cast<float4 const*>(mean + (i * Shape::kLanes + lane) * 16 + e), m, 4);
      FLASHHOPPER_UNROLL
      for (int r = 0; r < Shape::kRows; ++r) {
        FLASHHOPPER_UNROLL
        for (int j = 0; j < 4; ++j) {
          float& value = x[r][16 * i + e + j];
          dots[r] = __fmaf_rn(value, m[j], dots[r]);
          value = __fmaf_rn(-subtracted, m[j], value);
        }
      }
    }
  }
  if (operand.shift == nullptr) return;
  FLASHHOPPER_UNROLL
  for (int r = 0; r < Shape::kRows; ++r) {
    float dot = dots[r];
    FLASHHOPPER_UNROLL
    for (int offset = 1; offset < Shape::kLanes; offset *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, offset);
    int const position = at.block * kScaleBlock + first_row<Shape>() + r * Shape::kRowsPerPass;
    if (lane == 0 && position < at.seqlen) operand.shift[at.row_place(operand.blocks, position)] = dot;
  }
}

// Scales, casts and stores one row.
template <class Shape, bool kInt8>
FLASHHOPPER_DEVICE void store_row(float const (&x)[Shape::kElements], float factor, uint8_t* to) {
  FLASHHOPPER_UNROLL
  for (int i = 0; i < Shape::kChunks; ++i) {
    uint32_t words[4];
    FLASHHOPPER_UNROLL
    for (int w = 0; w < 4; ++w) {
      float const* const four = x + 16 * i + 4 * w;
      float const a = __fmul_rn(four[0], factor), b = __fmul_rn(four[1], factor);
      float const c = __fmul_rn(four[2], factor), d = __fmul_rn(four[3], factor);
      words[w] = kInt8 ? to_int8(a, b, c, d) : to_e4m3(a, b, c, d);
    }
    *reinterpret_cast<uint4*>(to + i * Shape::kLanes * 16) = uint4{words[0], words[1], words[2], words[3]};
  }
}

template <class Element, int kDim, bool kSmooth, bool kRotate>
__global__ void __launch_bounds__(RowsShape<kDim>::kThreads, RowsShape<kDim>::kCtas)
    quantize_rows_kernel(__grid_constant__ RowsArgs const args) {
  using Shape = RowsShape<kDim>;
  extern __shared__ uint4 slots[];
  __shared__ __align__(16) float signs[kDim];
  __shared__ __align__(16) float means[2][kSmooth ? kDim : 4];  // two: one arrives while the other is read
  __shared__ float maxima[2][Shape::kThreads / 32];             // two, so that one barrier a block is enough
  __shared__ RowsTask tasks[2][Shape::kThreads / 32];           // of each warp: the block's and the next one's
  int const thread = thread_index(), warp = thread / 32, lane = thread % Shape::kLanes;
  float const most = args.is_int8 ? 127.f : 448.f;
  float const norm = kRotate ? Shape::kNorm : 1.f;
  if constexpr (kRotate) {
    if (thread < kDim) signs[thread] = args.signs[thread];
    __syncthreads();
  }

  auto const fetch_next = [&](int parity, int from) {
    __syncwarp();  // the slots and the block before have been read
    RowsTask const found = next_rows(args, from);
    RowsTask& next = tasks[parity][warp];
    if (thread % 32 == 0) next = found;
    __syncwarp();
    if (next.task < count_tasks(args)) fetch_rows<Element, Shape, kSmooth>(args, next, slots, means[parity]);
  };
  fetch_next(0, static_cast<int>(blockIdx.x));
  for (int parity = 0; tasks[parity][warp].task < count_tasks(args); parity ^= 1) {
    RowsTask const& at = tasks[parity][warp];
    RowsOperand const& operand = args.operands[at.is_k];
    constexpr int kRowSlots = Shape::kElements / 8;
    uint4 raw[Shape::kSlots];
    wait_for_copies();
    if constexpr (kSmooth) {
      __syncthreads();  // all threads see the mean, and have read the one before
    } else {
      __syncwarp();
    }
    FLASHHOPPER_UNROLL
    for (int s = 0; s < Shape::kSlots; ++s) {
      int const r = thread % 32 / Shape::kLanes + s / kRowSlots * Shape::kRowsPerPass;
      int const vector = s % kRowSlots / 2 * 2 * Shape::kLanes + 2 * lane + s % 2;
      raw[s] = slots[thread / 32 * 32 * Shape::kSlots + place<Shape>(r, vector)];
    }
    fetch_next(parity ^ 1, at.task + static_cast<int>(gridDim.x));
    float x[Shape::kRows][Shape::kElements];
    FLASHHOPPER_UNROLL
    for (int s = 0; s < Shape::kSlots; ++s) {
      unpack_vector<Element>(raw[s], x[s / kRowSlots] + s % kRowSlots * 8);
    }
    if constexpr (kSmooth) apply_mean<Shape>(operand, at, means[parity], x);
    int const first = at.block * kScaleBlock + first_row<Shape>();
    float amax[Shape::kRows];
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) {
      if constexpr (kRotate) rotate_row<Shape>(x[r], signs, lane);
      amax[r] = 0.f;
      FLASHHOPPER_UNROLL
      for (int e = 0; e < Shape::kElements; ++e) amax[r] = fmaxf(amax[r], fabsf(x[r][e]));
      // Rows past the end hold minus the mean.
      amax[r] = first + r * Shape::kRowsPerPass < at.seqlen ? amax[r] * norm : 0.f;
    }
    if (operand.per_row) {
      FLASHHOPPER_UNROLL
      for (int r = 0; r < Shape::kRows; ++r) {
        FLASHHOPPER_UNROLL
        for (int offset = 1; offset < Shape::kLanes; offset *= 2) {
          amax[r] = fmaxf(amax[r], __shfl_xor_sync(0xffffffffu, amax[r], offset));
        }
      }
    } else {
      float block = 0.f;
      FLASHHOPPER_UNROLL
      for (int r = 0; r < Shape::kRows; ++r) block = fmaxf(block, amax[r]);
      block = warp_max(block);
      if (thread % 32 == 0) maxima[parity][warp] = block;
      __syncthreads();
      FLASHHOPPER_UNROLL
      for (int w = 0; w < Shape::kThreads / 32; ++w) block = fmaxf(block, maxima[parity][w]);
      FLASHHOPPER_UNROLL
      for (int r = 0; r < Shape::kRows; ++r) amax[r] = block;
    }
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) {
      int const position = first + r * Shape::kRowsPerPass;
      if (position >= at.seqlen) continue;
      float const scale = scale_of(amax[r], most);
      float const factor = norm * __frcp_rn(scale);
      uint8_t* const to = operand.data + at.row(operand.blocks, position) * kDim + lane * 16;
      if (args.is_int8) {
        store_row<Shape, true>(x[r], factor, to);
      } else {
        store_row<Shape, false>(x[r], factor, to);
      }
      if (operand.per_row && lane == 0) operand.scale[at.row_place(operand.blocks, position)] = scale;
      if (!operand.per_row && r == 0 && thread == 0) operand.scale[at.block_place(operand.blocks)] = scale;
    }
  }
  await_previous();  // the values may still be on their way: what follows this kernel must find them too
}

}  // namespace flashhopper
