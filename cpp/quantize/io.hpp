// How the quantiser's kernels reach memory: rows to shared memory ahead of their use, floats to 8 bits.
// Used by rows.hpp and values.hpp.
#pragma once

#include "core/elements.hpp"
#include "quantize/args.hpp"

namespace flashhopper {

// Where block `block` of head `head` of batch entry `batch` begins in the order of tasks: heads inner, batch outer.
struct QuantizeTask {
  int head, block, batch;

  FLASHHOPPER_DEVICE QuantizeTask(int task, int heads, int blocks) {
    int const rest = task / heads;
    head = task - rest * heads;
    batch = rest / blocks;
    block = rest - batch * blocks;
  }
};

// First element of one row of a source.
template <class Element>
FLASHHOPPER_DEVICE Element const* source_row(SourceView const& view, int batch, int position, int head) {
  return static_cast<Element const*>(view.data) + batch * view.batch_stride + position * view.row_stride +
         head * view.head_stride;
}

FLASHHOPPER_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
FLASHHOPPER_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Eight elements from memory to a slot of shared memory that this thread or its warp reads, zeros where `exists` is
// false (the address is then not used). fetch_aligned is asynchronous: the thread sees them after wait_for_copies().
FLASHHOPPER_DEVICE void fetch_aligned(uint4* slot, void const* from, bool exists) {
  uint32_t const to = static_cast<uint32_t>(__cvta_generic_to_shared(slot));
  int const bytes = exists ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

FLASHHOPPER_DEVICE void fetch_unaligned(uint4* slot, void const* from, bool exists) {
  auto* const to = reinterpret_cast<uint16_t*>(slot);
#pragma unroll 1
  for (int i = 0; i < 8; ++i) to[i] = exists ? static_cast<uint16_t const*>(from)[i] : uint16_t{0};
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

// Four floats of magnitude up to 127 as int8, rounded to nearest even: adding 1.5 * 2^23 leaves the integer in the low
// byte. That is twice as fast as the conversion instruction. A NaN gives some byte; its scale does not hide it.
FLASHHOPPER_DEVICE uint32_t to_int8(float a, float b, float c, float d) {
  constexpr float kRound = 12582912.f;
  uint32_t const low =
      __byte_perm(__float_as_uint(__fadd_rn(a, kRound)), __float_as_uint(__fadd_rn(b, kRound)), 0x0040);
  uint32_t const high =
      __byte_perm(__float_as_uint(__fadd_rn(c, kRound)), __float_as_uint(__fadd_rn(d, kRound)), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

inline constexpr float kLeastAmax = 1e-12f;  // a block of zeros keeps a finite inverse scale

FLASHHOPPER_DEVICE float scale_of(float amax, float most) { return __fdiv_rn(fmaxf(amax, kLeastAmax), most); }

// Largest value of a warp, in every lane.
FLASHHOPPER_DEVICE float warp_max(float value) {
  FLASHHOPPER_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

}  // namespace flashhopper
