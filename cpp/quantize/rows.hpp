// Q and K to 8 bits in one pass: mean, signs, Hadamard matrix, largest magnitude, scale, cast. One CTA a block of 128
// rows, many blocks one after another: while a block is computed in registers the next one arrives in shared memory.
// Before it: launch.hpp. Beside it: values.hpp.
// Source: FlashAttention-3, section 3.3 (block quantisation, incoherent processing); SageAttention (key smoothing).
#pragma once

#include "core/barriers.hpp"
#include "quantize/rotate.hpp"

namespace flashhopper {

// The first row of a block that the warp computes, and of which part of it.
template <class Shape>
FLASHHOPPER_DEVICE int warp_row() {
  return thread_index() / 32 / Shape::kParts * Shape::kWarpRows;
}
template <class Shape>
FLASHHOPPER_DEVICE int warp_part() {
  return thread_index() / 32 % Shape::kParts;
}

// The first row of a block that the thread computes.
template <class Shape>
FLASHHOPPER_DEVICE int first_row() {
  return warp_row<Shape>() + thread_index() % 32 / Shape::kLanes;
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
  int const first = at.block * kScaleBlock + warp_row<Shape>(), column = warp_part<Shape>() * Shape::kColumns;
  constexpr int kVectors = Shape::kVectors;
  int const r = lane / Shape::kCopyVectors, v = lane % Shape::kCopyVectors;
  uint4* const to = slots + thread / 32 * 32 * Shape::kSlots;
  if (source.vectors && source.head_dim == Shape::kHeadDim && first + Shape::kWarpRows <= at.seqlen) {
    Element const* row = source_row<Element>(source, at, first + r) + column + v * 8;
    FLASHHOPPER_UNROLL
    for (int i = 0; i < Shape::kWarpRows; i += Shape::kCopyRows) {
      FLASHHOPPER_UNROLL
      for (int j = 0; j < kVectors; j += Shape::kCopyVectors) {
        fetch_vector(to + row_place<Shape>(r, v + j) + i * kVectors, row + j * 8);
      }
      row += Shape::kCopyRows * source.row_stride;
    }
    return;
  }
#pragma unroll 1
  for (int s = 0; s < Shape::kSlots; ++s) {
    int const row = (s * 32 + lane) / kVectors, vector = (s * 32 + lane) % kVectors;
    bool const exists = first + row < at.seqlen && column + vector * 8 < source.head_dim;
    Element const* const from = source_row<Element>(source, at, exists ? first + row : 0) + column + vector * 8;
    if (source.vectors) {
      fetch_aligned(to + row_place<Shape>(row, vector), from, exists);
    } else {
      fetch_unaligned(to + row_place<Shape>(row, vector), from, exists);
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
    if (thread < Shape::kHeadDim / 4) {
      fetch_aligned(reinterpret_cast<uint4*>(mean + column_place(thread * 4)), from + thread * 4, true);
    }
  }
  commit_copies();
}

// Subtracts the mean from the thread's rows (K), or leaves them and finds their products with it (Q), in all lanes.
template <class Shape, bool kSubtract>
FLASHHOPPER_DEVICE void apply_mean(float const* mean, float (&x)[Shape::kRows][Shape::kElements],
                                   float (&dots)[Shape::kRows]) {
  int const lane = thread_index() % Shape::kLanes;
  FLASHHOPPER_UNROLL
  for (int i = 0; i < Shape::kChunks; ++i) {
    if (i > 0) __syncwarp();  // ptxas would load all means at once, and spill
    FLASHHOPPER_UNROLL
    for (int e = 0; e < 16; e += 4) {
      float m[4];
      load_floats(reinterpret_cast<float4 const*>(mean + chunk_columns<Shape>(lane, i) + e), m, 4);
      FLASHHOPPER_UNROLL
      for (int r = 0; r < Shape::kRows; ++r) {
        FLASHHOPPER_UNROLL
        for (int j = 0; j < 4; ++j) {
          float& value = x[r][16 * i + e + j];
          if constexpr (kSubtract) {
            value -= m[j];
          } else {
            dots[r] = __fmaf_rn(value, m[j], dots[r]);
          }
        }
      }
    }
  }
  if constexpr (!kSubtract) {
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) {
      FLASHHOPPER_UNROLL
      for (int offset = 1; offset < Shape::kLanes; offset *= 2) {
        dots[r] += __shfl_xor_sync(0xffffffffu, dots[r], offset);
      }
    }
  }
}

// Scales, casts and stores one row. A zero is +0, whatever exchanged_sign() makes of it.
template <class Shape, bool kInt8>
FLASHHOPPER_DEVICE void store_row(float const (&x)[Shape::kElements], float factor, int lane, uint8_t* to) {
  FLASHHOPPER_UNROLL
  for (int i = 0; i < Shape::kChunks; ++i) {
    float const signed_factor = Shape::kExchange ? factor * exchanged_sign<Shape>(lane, i) : factor;
    uint32_t words[4];
    FLASHHOPPER_UNROLL
    for (int w = 0; w < 4; ++w) {
      float y[4];
      FLASHHOPPER_UNROLL
      for (int j = 0; j < 4; ++j) {
        float const value = x[16 * i + 4 * w + j];
        y[j] = Shape::kExchange ? __fmaf_rn(value, signed_factor, 0.f) : __fmul_rn(value, signed_factor);
      }
      words[w] = kInt8 ? to_int8(y[0], y[1], y[2], y[3]) : to_e4m3(y[0], y[1], y[2], y[3]);
    }
    *reinterpret_cast<uint4*>(to + Shape::stored_group(lane, i) * 16) = uint4{words[0], words[1], words[2], words[3]};
  }
}

// What the warps of a row tell each other of their parts of it, where there are parts.
template <class Shape>
struct RowParts {
  static constexpr int kSize = Shape::kParts > 1 ? kScaleBlock : 1;
  float amax[Shape::kParts][kSize];
  float dot[Shape::kParts][kSize];  // with the mean
};

// The shared memory of the kernel that is not the slots.
template <class Shape, bool kSmooth>
struct RowsStorage {
  float signs[column_places(Shape::kHeadDim)];                   // see column_place
  float means[2][kSmooth ? column_places(Shape::kHeadDim) : 4];  // two: one arrives while the other is read
  float maxima[2][Shape::kWarps];                                // two, so that one barrier a block is enough
  RowParts<Shape> parts[2];                                      // two for the same reason
};

// The warps that have parts of the same rows wait for each other.
template <class Shape>
FLASHHOPPER_DEVICE void sync_parts() {
  named_barrier_sync<32 * Shape::kParts>(1 + thread_index() / 32 / Shape::kParts);
}

// From the largest magnitude that a thread found in each of its rows, in the columns that it holds, to that of the
// whole row, or of the block.
template <class Shape, bool kSmooth>
FLASHHOPPER_DEVICE void share_maxima(RowsOperand const& operand, float (&amax)[Shape::kRows],
                                     RowsStorage<Shape, kSmooth>& storage, int parity) {
  int const thread = thread_index(), row = first_row<Shape>();
  if (!operand.per_row) {
    float block = 0.f;
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) block = fmaxf(block, amax[r]);
    block = warp_max(block);
    if (thread % 32 == 0) storage.maxima[parity][thread / 32] = block;
    __syncthreads();
    FLASHHOPPER_UNROLL
    for (int w = 0; w < Shape::kWarps; ++w) block = fmaxf(block, storage.maxima[parity][w]);
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) amax[r] = block;
    return;
  }
  FLASHHOPPER_UNROLL
  for (int r = 0; r < Shape::kRows; ++r) {
    FLASHHOPPER_UNROLL
    for (int offset = 1; offset < Shape::kLanes; offset *= 2) {
      amax[r] = fmaxf(amax[r], __shfl_xor_sync(0xffffffffu, amax[r], offset));
    }
  }
  if constexpr (Shape::kParts > 1) {
    auto& parts = storage.parts[parity].amax;
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) {
      if (thread % Shape::kLanes == 0) parts[warp_part<Shape>()][row + r * Shape::kRowsPerPass] = amax[r];
    }
    sync_parts<Shape>();
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) {
      FLASHHOPPER_UNROLL
      for (int part = 0; part < Shape::kParts; ++part) {
        amax[r] = fmaxf(amax[r], parts[part][row + r * Shape::kRowsPerPass]);
      }
    }
  }
}

// Of the thread's rows of Q, the products with the mean to memory.
template <class Shape>
FLASHHOPPER_DEVICE void store_shifts(RowsOperand const& operand, QuantizeTask const& at,
                                     float const (&dots)[Shape::kRows]) {
  FLASHHOPPER_UNROLL
  for (int r = 0; r < Shape::kRows; ++r) {
    int const position = at.block * kScaleBlock + first_row<Shape>() + r * Shape::kRowsPerPass;
    bool const is_first = thread_index() % Shape::kLanes == 0 && warp_part<Shape>() == 0;
    if (is_first && position < at.seqlen) operand.shift[at.row_place(operand.blocks, position)] = dots[r];
  }
}

// Before and after the barrier in share_maxima(): the products of the parts, and their sum to memory.
template <class Shape>
FLASHHOPPER_DEVICE void put_dots(RowParts<Shape>& parts, float const (&dots)[Shape::kRows]) {
  FLASHHOPPER_UNROLL
  for (int r = 0; r < Shape::kRows; ++r) {
    int const row = first_row<Shape>() + r * Shape::kRowsPerPass;
    if (thread_index() % Shape::kLanes == 0) parts.dot[warp_part<Shape>()][row] = dots[r];
  }
}
template <class Shape>
FLASHHOPPER_DEVICE void add_dots(RowParts<Shape> const& parts, float (&dots)[Shape::kRows]) {
  FLASHHOPPER_UNROLL
  for (int r = 0; r < Shape::kRows; ++r) {
    int const row = first_row<Shape>() + r * Shape::kRowsPerPass;
    dots[r] = parts.dot[0][row];
    FLASHHOPPER_UNROLL
    for (int part = 1; part < Shape::kParts; ++part) dots[r] += parts.dot[part][row];
  }
}

// Casts and stores the thread's rows, whose largest magnitudes are `amax`.
template <class Shape>
FLASHHOPPER_DEVICE void store_rows(RowsOperand const& operand, QuantizeTask const& at, int first, bool is_int8,
                                   float const (&x)[Shape::kRows][Shape::kElements],
                                   float const (&amax)[Shape::kRows]) {
  int const thread = thread_index(), lane = thread % Shape::kLanes, part = warp_part<Shape>();
  float const most = is_int8 ? 127.f : 448.f;
  FLASHHOPPER_UNROLL
  for (int r = 0; r < Shape::kRows; ++r) {
    int const position = first + r * Shape::kRowsPerPass;
    if (position >= at.seqlen) continue;
    float scale = scale_of(amax[r], most);
    if (operand.power_scales) scale = next_power_of_two(scale);
    float const factor = Shape::kNorm * __frcp_rn(scale);
    uint8_t* const to = operand.data + at.row(operand.blocks, position) * Shape::kHeadDim + part * Shape::kColumns;
    if (is_int8) {
      store_row<Shape, true>(x[r], factor, lane, to);
    } else {
      store_row<Shape, false>(x[r], factor, lane, to);
    }
    if (operand.per_row && lane == 0 && part == 0) operand.scale[at.row_place(operand.blocks, position)] = scale;
    if (!operand.per_row && r == 0 && thread == 0) operand.scale[at.block_place(operand.blocks)] = scale;
  }
}

// One block, from the thread's vectors to memory.
template <class Element, class Shape, bool kSmooth, bool kSubtract>
FLASHHOPPER_DEVICE void quantize_block(RowsArgs const& args, RowsTask const& at, uint4 const (&raw)[Shape::kSlots],
                                       RowsStorage<Shape, kSmooth>& storage, int parity) {
  RowsOperand const& operand = args.operands[at.is_k];
  int const columns = column_place(warp_part<Shape>() * Shape::kColumns);
  constexpr int kRowSlots = Shape::kElements / 8;
  constexpr bool kHasDots = kSmooth && !kSubtract, kIsParted = Shape::kParts > 1;
  float x[Shape::kRows][Shape::kElements], amax[Shape::kRows], dots[Shape::kRows] = {};
  FLASHHOPPER_UNROLL
  for (int s = 0; s < Shape::kSlots; ++s) unpack_vector<Element>(raw[s], x[s / kRowSlots] + s % kRowSlots * 8);
  if constexpr (kSmooth) apply_mean<Shape, kSubtract>(storage.means[parity] + columns, x, dots);
  if constexpr (kHasDots && kIsParted) put_dots<Shape>(storage.parts[parity], dots);
  if constexpr (kHasDots && !kIsParted) store_shifts<Shape>(operand, at, dots);
  int const first = at.block * kScaleBlock + first_row<Shape>();
  FLASHHOPPER_UNROLL
  for (int r = 0; r < Shape::kRows; ++r) {
    if constexpr (Shape::kHadamard > 1) {
      rotate_row<Shape>(x[r], storage.signs + columns, thread_index() % Shape::kLanes);
    }
    amax[r] = 0.f;
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Shape::kElements; ++e) amax[r] = fmaxf(amax[r], fabsf(x[r][e]));
    // Rows past the end hold minus the mean.
    amax[r] = first + r * Shape::kRowsPerPass < at.seqlen ? amax[r] * Shape::kNorm : 0.f;
  }
  share_maxima<Shape, kSmooth>(operand, amax, storage, parity);
  if constexpr (kHasDots && kIsParted) {
    add_dots<Shape>(storage.parts[parity], dots);
    store_shifts<Shape>(operand, at, dots);
  }
  store_rows<Shape>(operand, at, first, args.is_int8, x, amax);
}

template <class Element, int kDim, bool kSmooth, Rotation kRotation>
__global__ void __launch_bounds__(RowsShape<kDim, kRotation, kSmooth>::kThreads,
                                  RowsShape<kDim, kRotation, kSmooth>::kCtas)
    quantize_rows_kernel(__grid_constant__ RowsArgs const args) {
  using Shape = RowsShape<kDim, kRotation, kSmooth>;
  extern __shared__ uint4 slots[];
  __shared__ __align__(16) RowsStorage<Shape, kSmooth> storage;
  __shared__ RowsTask tasks[2][Shape::kWarps];  // of each warp: the block's and the next one's
  int const thread = thread_index(), warp = thread / 32, lane = thread % Shape::kLanes;
  if constexpr (Shape::kHadamard > 1) {
    if (thread < kDim) storage.signs[column_place(thread)] = prepared_sign(args.signs[thread], thread);
    __syncthreads();
  }

  auto const fetch_next = [&](int parity, int from) {
    __syncwarp();  // the slots and the block before have been read
    RowsTask const found = next_rows(args, from);
    RowsTask& next = tasks[parity][warp];
    if (thread % 32 == 0) next = found;
    __syncwarp();
    if (next.task < count_tasks(args)) fetch_rows<Element, Shape, kSmooth>(args, next, slots, storage.means[parity]);
  };
  fetch_next(0, static_cast<int>(blockIdx.x));
  for (int parity = 0; tasks[parity][warp].task < count_tasks(args); parity ^= 1) {
    RowsTask const& at = tasks[parity][warp];
    constexpr int kRowSlots = Shape::kElements / 8;
    uint4 const* const warp_slots = slots + thread / 32 * 32 * Shape::kSlots;
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
      int const first_place = row_place<Shape>(r, 2 * Shape::loaded_group(lane, 0));
      raw[s] = warp_slots[chunk_place<Shape>(first_place, s % kRowSlots / 2, s % 2)];
    }
    fetch_next(parity ^ 1, at.task + static_cast<int>(gridDim.x));
    // Q and K apart, for what differs stands in the midst of registers that all change.
    if (kSmooth && at.is_k) {
      quantize_block<Element, Shape, kSmooth, true>(args, at, raw, storage, parity);
    } else {
      quantize_block<Element, Shape, kSmooth, false>(args, at, raw, storage, parity);
    }
  }
  await_previous();  // the values may still be on their way: what follows this kernel must find them too
}

}  // namespace flashhopper
