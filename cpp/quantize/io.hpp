// How the quantiser's kernels reach memory: rows to shared memory ahead of their use, floats to 8 bits.
// Used by rows.hpp and values.hpp.
#pragma once

#include "core/elements.hpp"
#include "quantize/args.hpp"

namespace flashhopper {

// Known to be positive, so that divisions by powers of two are shifts.
FLASHHOPPER_DEVICE int thread_index() {
  int const thread = static_cast<int>(threadIdx.x);
  __builtin_assume(thread >= 0);
  return thread;
}

// A block of rows of one head. Tasks are in the order of memory: heads inner, blocks, sequences outer.
struct QuantizeTask {
  int task;  // its number
  int head, sequence, block;
  int begin, seqlen;  // of the sequence: first row in its batch entry, or in the packed tensor; rows that exist
  int first_block;    // its first block among those of its batch entry, or of the packed tensor
  int entry;          // of the batch dimension: the sequence; 0 in a packed batch, which has none

  FLASHHOPPER_DEVICE bool has_rows() const { return block >= 0 && block * kScaleBlock < seqlen; }
  // Of (batch, heads).
  FLASHHOPPER_DEVICE int64_t entry_head(RowBlocks const& blocks) const { return int64_t{entry} * blocks.heads + head; }
  FLASHHOPPER_DEVICE int64_t sequence_head(RowBlocks const& blocks) const {
    return int64_t{sequence} * blocks.heads + head;
  }
  // Of (batch, heads, blocks).
  FLASHHOPPER_DEVICE int64_t block_place(RowBlocks const& blocks) const {
    return entry_head(blocks) * blocks.per_head + first_block + block;
  }
  // Of (batch, heads, seqlen).
  FLASHHOPPER_DEVICE int64_t row_place(RowBlocks const& blocks, int position) const {
    return entry_head(blocks) * blocks.rows + begin + position;
  }
  // Of (batch, seqlen, heads).
  FLASHHOPPER_DEVICE int64_t row(RowBlocks const& blocks, int position) const {
    return (int64_t{entry} * blocks.rows + begin + position) * blocks.heads + head;
  }
};

// The first block of a sequence and head.
FLASHHOPPER_DEVICE QuantizeTask first_task_of(RowBlocks const& blocks, int sequence, int head) {
  if (!blocks.is_packed()) return {0, head, sequence, 0, 0, blocks.rows, 0, sequence};
  SequenceRows const rows = blocks.packed.at(sequence, blocks.batch);
  return {0, head, sequence, 0, rows.begin, rows.seqlen, first_packed_chunk(rows.begin, sequence, kScaleBlock), 0};
}

// The sequence that a place among the blocks of a packed batch belongs to. All lanes of a warp ask the same.
FLASHHOPPER_DEVICE int sequence_of_block(RowBlocks const& blocks, int place) {
  int const lane = thread_index() % 32;
  auto const count = [&](auto const& is) { return __popc(__ballot_sync(0xffffffffu, is(lane))); };
  return sequence_of_chunk(blocks.packed, blocks.batch, place, kScaleBlock, count);
}

// Task `task`. Of a packed batch there are more than blocks: some have no rows.
FLASHHOPPER_DEVICE QuantizeTask task_at(RowBlocks const& blocks, int task) {
  int const place = blocks.by_heads.quotient(task), head = blocks.by_heads.remainder(task, place);
  bool const is_packed = blocks.is_packed();
  int const sequence = is_packed ? sequence_of_block(blocks, place) : blocks.by_per_head.quotient(place);
  QuantizeTask found = first_task_of(blocks, sequence, head);
  found.block = is_packed ? place - found.first_block : place - sequence * blocks.per_head;
  found.task = task;
  return found;
}

// First element of one row of the sequence of a task.
template <class Element>
FLASHHOPPER_DEVICE Element const* source_row(SourceView const& view, QuantizeTask const& at, int position) {
  return static_cast<Element const*>(view.data) + at.entry * view.batch_stride +
         int64_t{at.begin + position} * view.row_stride + at.head * view.head_stride;
}

FLASHHOPPER_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most so many of the groups committed last are on their way.
template <int kPending = 0>
FLASHHOPPER_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Eight elements from memory to a slot of shared memory that this thread or its warp reads, zeros where `exists` is
// false (the address is then not used). fetch_aligned is asynchronous: the thread sees them after wait_for_copies().
FLASHHOPPER_DEVICE void fetch_aligned(uint4* slot, void const* from, bool exists) {
  uint32_t const to = static_cast<uint32_t>(__cvta_generic_to_shared(slot));
  int const bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The same without a condition: the address is always used.
FLASHHOPPER_DEVICE void fetch_vector(uint4* slot, void const* from) {
  uint32_t const to = static_cast<uint32_t>(__cvta_generic_to_shared(slot));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

FLASHHOPPER_DEVICE void fetch_unaligned(uint4* slot, void const* from, bool exists) {
  auto* const to = reinterpret_cast<uint16_t*>(slot);
#pragma unroll 1
  for (int i = 0; i < 8; ++i) to[i] = exists ? static_cast<uint16_t const*>(from)[i] : uint16_t{0};
}

// Eight bytes to device memory, whose address came out of shared memory: the compiler does not know where it leads.
FLASHHOPPER_DEVICE void store_global(void* to, uint32_t low, uint32_t high) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(low), "r"(high) : "memory");
}

template <class Element>
FLASHHOPPER_DEVICE void unpack_vector(uint4 const& bits, float* values) {
  uint32_t const words[4] = {bits.x, bits.y, bits.z, bits.w};
  FLASHHOPPER_UNROLL
  for (int i = 0; i < 4; ++i) {
    float2 const pair = unpack<Element>(words[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

// The larger, or smaller, of two packed pairs, each for itself; of a number and a NaN the number, as fmaxf.
template <class Element>
FLASHHOPPER_DEVICE uint32_t max_of_pairs(uint32_t a, uint32_t b) {
  uint32_t found;
  if constexpr (std::is_same_v<Element, element::bf16>) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  }
  return found;
}
template <class Element>
FLASHHOPPER_DEVICE uint32_t min_of_pairs(uint32_t a, uint32_t b) {
  uint32_t found;
  if constexpr (std::is_same_v<Element, element::bf16>) {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  } else {
    asm("min.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  }
  return found;
}

FLASHHOPPER_DEVICE void load_floats(float4 const* from, float* values, int count) {
  FLASHHOPPER_UNROLL
  for (int i = 0; i < count / 4; ++i) {
    float4 const four = from[i];
    values[4 * i] = four.x;
    values[4 * i + 1] = four.y;
    values[4 * i + 2] = four.z;
    values[4 * i + 3] = four.w;
  }
}

// Four floats as e4m3, rounded to nearest even, limited to +-448; NaN stays NaN.
FLASHHOPPER_DEVICE uint32_t to_e4m3(float a, float b, float c, float d) {
  uint32_t word;
  asm("{.reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// Four floats times a factor, which makes their magnitude 127 at most, as int8, rounded to nearest even: adding
// 1.5 * 2^23 leaves the integer in the low byte, of the exact product. That is twice as fast as the conversion
// instruction. A NaN gives some byte; its scale does not hide it.
FLASHHOPPER_DEVICE uint32_t to_int8(float a, float b, float c, float d, float factor) {
  constexpr float kRound = 12582912.f;
  auto const rounded = [&](float x) { return __float_as_uint(__fmaf_rn(x, factor, kRound)); };
  return __byte_perm(__byte_perm(rounded(a), rounded(b), 0x0040), __byte_perm(rounded(c), rounded(d), 0x0040), 0x5410);
}

inline constexpr float kLeastAmax = 1e-12f;  // a block of zeros keeps a finite inverse scale

FLASHHOPPER_DEVICE float scale_of(float amax, float most) { return __fdiv_rn(fmaxf(amax, kLeastAmax), most); }

// The least power of two that is not below x, which is normal and positive. Infinity and NaN become infinity or NaN.
FLASHHOPPER_DEVICE float next_power_of_two(float x) {
  constexpr uint32_t kMantissa = 0x7fffffu;
  return __uint_as_float((__float_as_uint(x) + kMantissa) & ~kMantissa);
}

// Largest value of a warp, in every lane.
FLASHHOPPER_DEVICE float warp_max(float value) {
  FLASHHOPPER_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

}  // namespace flashhopper
