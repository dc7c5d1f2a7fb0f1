// Q and K to 8 bits in one pass: signs, Hadamard matrix, mean, largest magnitude, scale, cast. One CTA a block of 128
// rows, many blocks one after another: while one is computed in registers the next two arrive in shared memory.
// Before it: launch.hpp. Beside it: values.hpp.
// Source: FlashAttention-3, section 3.3 (block quantisation, incoherent processing); SageAttention (key smoothing).
#pragma once

#include "core/barriers.hpp"
#include "quantize/rotate.hpp"

namespace flashhopper {

// The first of the 16 rows of a block that the warp computes; the first of the thread's two.
FLASHHOPPER_DEVICE int warp_row() { return thread_index() / 32 * 16; }
FLASHHOPPER_DEVICE int first_row() { return warp_row() + thread_index() % 32 / 4; }

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

// What a warp needs to know of a block.
struct RowsWork {
  void const* source;              // its first row
  uint8_t* data;                   // likewise
  int64_t row_place, block_place;  // of what belongs to its first row, and to it
  int mean;                        // the number of its mean
  int left;                        // rows from its first one to the sequence's end
  int is_k;
  int task;  // its number; count_tasks() or more: there is no block
};

template <class Element, class Shape>
FLASHHOPPER_DEVICE RowsWork work_of(RowsArgs const& args, RowsTask const& at) {
  RowsOperand const& operand = args.operands[at.is_k];
  int const first = at.block * kScaleBlock;
  return {source_row<Element>(operand.source, at, first),
          operand.data + at.row(operand.blocks, first) * Shape::kHeadDim,
          at.row_place(operand.blocks, first),
          at.block_place(operand.blocks),
          at.sequence * operand.mean_heads + operand.by_group.quotient(at.head),
          at.seqlen - first,
          at.is_k,
          at.task};
}

// Finds the next kBatch blocks that have rows, from task `from` on, and returns the task to go on from. In a dense
// batch each lane finds one, for it takes as many instructions as a tenth of the work; in a packed one the whole warp
// searches.
inline constexpr int kBatch = 8;
template <class Element, class Shape>
FLASHHOPPER_DEVICE int find_work(RowsArgs const& args, int from, RowsWork* works) {
  int const lane = thread_index() % 32, step = static_cast<int>(gridDim.x);
  RowsTask mine;
  if (args.operands[0].blocks.is_packed()) {
#pragma unroll 1
    for (int i = 0; i < kBatch; ++i) {
      RowsTask const found = next_rows(args, from);
      if (lane == i) mine = found;
      from = found.task + step;
    }
  } else {
    mine = next_rows(args, from + lane % kBatch * step);
    from += kBatch * step;
  }
  if (lane < kBatch) works[lane] = work_of<Element, Shape>(args, mine);
  __syncwarp();
  return from;
}

// Starts copying the rows of the warp. Addresses are the most of the work, so a block that is whole has a way of its
// own: no conditions, one addition a row.
template <class Element, class Shape>
FLASHHOPPER_DEVICE void copy_rows(SourceView const& source, RowsWork const& at, uint4* to) {
  int const lane = thread_index() % 32;
  constexpr int kVectors = Shape::kVectors;
  int const r = lane / Shape::kCopyVectors, v = lane % Shape::kCopyVectors;
  auto const* const first = static_cast<Element const*>(at.source) + warp_row() * source.row_stride;
  if (source.vectors && source.head_dim == Shape::kHeadDim && warp_row() + Shape::kWarpRows <= at.left) {
    Element const* row = first + r * source.row_stride + v * 8;
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
  for (int i = lane; i < Shape::kWarpRows * kVectors; i += 32) {
    int const row = i / kVectors, vector = i % kVectors;
    bool const exists = warp_row() + row < at.left && vector * 8 < source.head_dim;
    auto const* const from =
        exists ? first + row * source.row_stride + vector * 8 : static_cast<Element const*>(at.source);
    if (source.vectors) {
      fetch_aligned(to + row_place<Shape>(row, vector), from, exists);
    } else {
      fetch_unaligned(to + row_place<Shape>(row, vector), from, exists);
    }
  }
}

// Starts copying a block's rows into the slots of the warp, and the mean that belongs to it.
template <class Element, class Shape, bool kSmooth>
FLASHHOPPER_DEVICE void fetch_rows(RowsArgs const& args, RowsWork const& at, uint4* slots, float* mean) {
  RowsOperand const& operand = args.operands[at.is_k];
  copy_rows<Element, Shape>(operand.source, at, slots);
  if constexpr (kSmooth) {
    float const* const from = operand.mean + int64_t{at.mean} * Shape::kHeadDim;
    FLASHHOPPER_UNROLL
    for (int i = thread_index() % 32 * 4; i < Shape::kHeadDim; i += 32 * 4) {
      fetch_vector(reinterpret_cast<uint4*>(mean + i), from + i);
    }
  }
}

// The shared memory of the kernel that is not the slots. Every warp has work and means of its own, so that it waits for
// the others in nothing but the block's largest magnitude.
template <class Shape, bool kSmooth>
struct RowsStorage {
  static constexpr int kTurns = Shape::kStages + 1;  // a mean is read in its block's turn, and others are on their way
  static_assert(Shape::kStages < kBatch);
  uint4 signs[Shape::kVectors];  // see sign_bits()
  float means[kTurns][Shape::kWarps][kSmooth ? Shape::kHeadDim : 4];
  float maxima[2][Shape::kWarps];  // two, so that one barrier a block is enough
  RowsWork works[Shape::kWarps][2 * kBatch];
};

// The thread's vectors from the slots of its warp.
template <class Shape>
FLASHHOPPER_DEVICE void load_vectors(uint4 const* slots, uint4 (&raw)[Shape::kGroups][Shape::kRows]) {
  int const g = thread_index() % 32 / 4, c = thread_index() % 4;
  FLASHHOPPER_UNROLL
  for (int group = 0; group < Shape::kGroups; ++group) {
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) raw[group][r] = slots[row_place<Shape>(g + 8 * r, 4 * group + c)];
  }
}

// Its rows, rotated.
template <class Element, class Shape>
FLASHHOPPER_DEVICE void rotate_rows(uint4 const (&raw)[Shape::kGroups][Shape::kRows], uint4 const* signs,
                                    HadamardOperand const& operand, float (&x)[Shape::kRows][Shape::kElements]) {
  FLASHHOPPER_UNROLL
  for (int group = 0; group < Shape::kGroups; ++group) {
    if constexpr (Shape::kKind == Rotation::kNone) {
      FLASHHOPPER_UNROLL
      for (int r = 0; r < Shape::kRows; ++r) {
        unpack_vector<Element>(raw[group][r], x[r] + 8 * group);
      }
    } else {
      rotate_group<Element, Shape>(raw[group], signs[4 * group + thread_index() % 4], operand, x[0] + 8 * group,
                                   x[1] + 8 * group);
    }
  }
  FLASHHOPPER_UNROLL
  for (int r = 0; r < Shape::kRows; ++r) rotate_groups<Shape>(x[r]);
}

// Subtracts the mean from the thread's rows (K), or leaves them and finds their products with it (Q), in all lanes.
// Rows and mean are rotated both.
template <class Shape, bool kSubtract>
FLASHHOPPER_DEVICE void apply_mean(float const* mean, float (&x)[Shape::kRows][Shape::kElements],
                                   float (&dots)[Shape::kRows]) {
  int const c = thread_index() % 4;
  float sums[Shape::kRows][4] = {};
  FLASHHOPPER_UNROLL
  for (int e = 0; e < Shape::kElements; e += 4) {
    float m[4];
    load_floats(reinterpret_cast<float4 const*>(mean + e / 8 * 32 + 8 * c + e % 8), m, 4);
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) {
      FLASHHOPPER_UNROLL
      for (int j = 0; j < 4; ++j) {
        float& value = x[r][e + j];
        if constexpr (kSubtract) {
          value -= m[j];
        } else {
          sums[r][j] = __fmaf_rn(value, m[j], sums[r][j]);
        }
      }
    }
  }
  if constexpr (!kSubtract) {
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) {
      dots[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
      dots[r] += __shfl_xor_sync(0xffffffffu, dots[r], 1);
      dots[r] += __shfl_xor_sync(0xffffffffu, dots[r], 2);
    }
  }
}

// The largest magnitude of a row in the thread's columns, four at a time: one alone would wait for itself.
template <class Shape>
FLASHHOPPER_DEVICE float largest(float const (&x)[Shape::kElements]) {
  float found[4] = {};
  FLASHHOPPER_UNROLL
  for (int e = 0; e < Shape::kElements; ++e) found[e % 4] = fmaxf(found[e % 4], fabsf(x[e]));
  return fmaxf(fmaxf(found[0], found[1]), fmaxf(found[2], found[3]));
}

// The same of a row as it was read, two columns an instruction.
template <class Element, class Shape>
FLASHHOPPER_DEVICE float largest_packed(uint4 const (&raw)[Shape::kGroups][Shape::kRows], int r) {
  uint32_t high[4], low[4];
  FLASHHOPPER_UNROLL
  for (int group = 0; group < Shape::kGroups; ++group) {
    uint4 const& bits = raw[group][r];
    uint32_t const words[4] = {bits.x, bits.y, bits.z, bits.w};
    FLASHHOPPER_UNROLL
    for (int w = 0; w < 4; ++w) {
      high[w] = group == 0 ? words[w] : max_of_pairs<Element>(high[w], words[w]);
      low[w] = group == 0 ? words[w] : min_of_pairs<Element>(low[w], words[w]);
    }
  }
  float found = 0.f;
  FLASHHOPPER_UNROLL
  for (int w = 0; w < 4; ++w) {
    float2 const most = unpack<Element>(high[w]), least = unpack<Element>(low[w]);
    found = fmaxf(found, fmaxf(fmaxf(fabsf(most.x), fabsf(least.x)), fmaxf(fabsf(most.y), fabsf(least.y))));
  }
  return found;
}

// A block has outliers if its largest magnitude is more than so many times that of any warp's rows.
inline constexpr float kMostUneven = 1.75f;

// From the largest magnitude that a thread found in each of its rows, in the columns that it holds, to that of the
// whole row, or of the block. Returns whether the scale is a power of two. left: rows from the block's first to the
// end.
template <class Shape>
FLASHHOPPER_DEVICE bool share_maxima(RowsOperand const& operand, int left, float (&amax)[Shape::kRows],
                                     float (&maxima)[Shape::kWarps]) {
  if (operand.per_row) {
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) {
      amax[r] = fmaxf(amax[r], __shfl_xor_sync(0xffffffffu, amax[r], 1));
      amax[r] = fmaxf(amax[r], __shfl_xor_sync(0xffffffffu, amax[r], 2));
    }
    return false;
  }
  int const thread = thread_index();
  float block = warp_max(fmaxf(amax[0], amax[1]));
  if (thread % 32 == 0) maxima[thread / 32] = block;
  __syncthreads();
  FLASHHOPPER_UNROLL
  for (int w = 0; w < Shape::kWarps; ++w) block = fmaxf(block, maxima[w]);
  amax[0] = amax[1] = block;
  if (!operand.power_scales) return false;  // the same for all threads
  float least = INFINITY;
  FLASHHOPPER_UNROLL
  for (int w = 0; w < Shape::kWarps; ++w) {
    if (w * Shape::kWarpRows < left) least = fminf(least, maxima[w]);
  }
  return block <= __fmul_rn(kMostUneven, least);
}

// Scales, casts and stores one row, of which `to` is the thread's first column.
template <class Shape, bool kInt8>
FLASHHOPPER_DEVICE void store_row(float const (&x)[Shape::kElements], float factor, uint8_t* to) {
  FLASHHOPPER_UNROLL
  for (int group = 0; group < Shape::kGroups; ++group) {
    uint32_t words[2];
    FLASHHOPPER_UNROLL
    for (int w = 0; w < 2; ++w) {
      float const* const from = x + 8 * group + 4 * w;
      if constexpr (kInt8) {
        words[w] = to_int8(from[0], from[1], from[2], from[3], factor);
      } else {
        words[w] = to_e4m3(__fmul_rn(from[0], factor), __fmul_rn(from[1], factor), __fmul_rn(from[2], factor),
                           __fmul_rn(from[3], factor));
      }
    }
    store_global(to + 32 * group, words[0], words[1]);
  }
}

// Casts and stores the thread's rows, whose largest magnitudes are `amax`, and products with the mean `dots`. Threads 0
// and 1 of a quad each find one row's scale, which takes a division. is_power: it is a power of two.
template <class Shape>
FLASHHOPPER_DEVICE void store_rows(RowsOperand const& operand, RowsWork const& at, bool is_int8, bool is_power,
                                   bool has_dots, float const (&x)[Shape::kRows][Shape::kElements],
                                   float const (&amax)[Shape::kRows], float const (&dots)[Shape::kRows]) {
  int const thread = thread_index(), c = thread % 4, first = first_row();
  float scale = scale_of(c % 2 == 0 ? amax[0] : amax[1], is_int8 ? 127.f : 448.f);
  if (is_power) scale = next_power_of_two(scale);
  float const inverse = Shape::kNorm * __frcp_rn(scale);
  if (operand.per_row || has_dots) {
    int64_t const place = at.row_place + first + 8 * c;
    bool const stores = c < Shape::kRows && first + 8 * c < at.left;
    if (stores && operand.per_row) operand.scale[place] = scale;
    // Rotated vectors have the product of those they come from, times the size of the matrix.
    if (stores && has_dots) operand.shift[place] = (c == 0 ? dots[0] : dots[1]) * (Shape::kNorm * Shape::kNorm);
  }
  if (!operand.per_row && thread == 0) operand.scale[at.block_place] = scale;
  int64_t const row_bytes = int64_t{operand.blocks.heads} * Shape::kHeadDim;
  uint8_t* to = at.data + first * row_bytes + 8 * c;
  FLASHHOPPER_UNROLL
  for (int r = 0; r < Shape::kRows; ++r) {
    float const factor = __shfl_sync(0xffffffffu, inverse, r, 4);
    if (first + 8 * r < at.left) {
      if (is_int8) {
        store_row<Shape, true>(x[r], factor, to);
      } else {
        store_row<Shape, false>(x[r], factor, to);
      }
    }
    to += 8 * row_bytes;
  }
}

template <class Element, int kDim, bool kSmooth, Rotation kRotation>
__global__ void __launch_bounds__(RowsShape<kDim, kRotation, kSmooth>::kThreads,
                                  RowsShape<kDim, kRotation, kSmooth>::kCtas)
    quantize_rows_kernel(__grid_constant__ RowsArgs const args) {
  using Shape = RowsShape<kDim, kRotation, kSmooth>;
  using Storage = RowsStorage<Shape, kSmooth>;
  extern __shared__ uint4 slots[];  // of kStages blocks, each of all warps
  __shared__ __align__(16) Storage storage;
  int const thread = thread_index(), warp = thread / 32;
  HadamardOperand const operand = hadamard_operand<Element>(kRotation, thread % 32);
  if constexpr (kRotation != Rotation::kNone) {
    if (thread < kDim / 2) {
      reinterpret_cast<uint32_t*>(storage.signs)[thread] =
          sign_bits(args.signs[2 * thread], args.signs[2 * thread + 1]);
    }
    __syncthreads();
  }

  RowsWork* const works = storage.works[warp];
  uint4* const warp_slots = slots + warp * (Shape::kSlots / Shape::kWarps);
  int next_task = static_cast<int>(blockIdx.x);
  auto const prepare = [&](int turn) {
    if (turn % kBatch == 0) next_task = find_work<Element, Shape>(args, next_task, works + turn % (2 * kBatch));
  };
  // Starts the copies of a turn's block, where there is one. What they overwrite has been read by all of the warp.
  auto const fetch = [&](int turn) {
    RowsWork const& next = works[turn % (2 * kBatch)];
    if (next.task < count_tasks(args)) {
      fetch_rows<Element, Shape, kSmooth>(args, next, warp_slots + turn % Shape::kStages * Shape::kSlots,
                                          storage.means[turn % Storage::kTurns][warp]);
    }
    commit_copies();  // of nothing where there is no block: what waits counts them
  };
  prepare(0);
  for (int turn = 0; turn < Shape::kStages; ++turn) fetch(turn);
  for (int turn = 0;; ++turn) {
    RowsWork const& at = works[turn % (2 * kBatch)];
    if (at.task >= count_tasks(args)) break;
    RowsOperand const& rows = args.operands[at.is_k];
    float const* const mean = storage.means[turn % Storage::kTurns][warp];
    prepare(turn + Shape::kStages);  // here, where registers are free
    wait_for_copies<Shape::kStages - 1>();
    __syncwarp();
    uint4 raw[Shape::kGroups][Shape::kRows];
    load_vectors<Shape>(warp_slots + turn % Shape::kStages * Shape::kSlots, raw);
    __syncwarp();
    fetch(turn + Shape::kStages);
    float x[Shape::kRows][Shape::kElements], amax[Shape::kRows], dots[Shape::kRows] = {};
    if constexpr (!Shape::kIsLight) rotate_rows<Element, Shape>(raw, storage.signs, operand, x);
    if constexpr (kSmooth) {
      if (at.is_k) {
        apply_mean<Shape, true>(mean, x, dots);
      } else {
        apply_mean<Shape, false>(mean, x, dots);
      }
    }
    FLASHHOPPER_UNROLL
    for (int r = 0; r < Shape::kRows; ++r) {
      if constexpr (Shape::kIsLight) {
        amax[r] = largest_packed<Element, Shape>(raw, r);
      } else {
        amax[r] = largest<Shape>(x[r]);
      }
      // Rows past the end hold minus the mean.
      amax[r] = first_row() + 8 * r < at.left ? amax[r] * Shape::kNorm : 0.f;
    }
    bool const is_power = share_maxima<Shape>(rows, at.left, amax, storage.maxima[turn % 2]);
    if constexpr (Shape::kIsLight) {
      rotate_rows<Element, Shape>(raw, storage.signs, operand, x);  // no more than unpacked
    }
    store_rows<Shape>(rows, at, args.is_int8, is_power, kSmooth && !at.is_k, x, amax, dots);
  }
  await_previous();  // the values may still be on their way: what follows this kernel must find them too
}

}  // namespace flashhopper
