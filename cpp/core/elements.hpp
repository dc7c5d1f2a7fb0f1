// The element types by their short names, and the conversion of accumulators to operands.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

#include "core/platform.hpp"

namespace flashhopper {

namespace element {
using fp16 = cutlass::half_t;
using bf16 = cutlass::bfloat16_t;
using e4m3 = cutlass::float_e4m3_t;
using int8 = int8_t;
}  // namespace element

#if defined(__CUDACC__)
// Two floats as one register of 16-bit elements, the lower index in the lower half. Volatile, so that the compiler does
// not sink the conversions into the next turn of the loop, where they would hold up the tensor cores.
template <class Element>
FLASHHOPPER_DEVICE uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, element::bf16>) {
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <class Element, int kElements>
FLASHHOPPER_DEVICE void pack_all(float const (&values)[kElements], uint32_t (&packed)[kElements / 2]) {
  FLASHHOPPER_UNROLL
  for (int i = 0; i < kElements / 2; ++i) packed[i] = pack<Element>(values[2 * i], values[2 * i + 1]);
}

// Four floats as one register of e4m3, the first in the lowest byte; beyond 448 they saturate.
FLASHHOPPER_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t packed;
  asm volatile(
      "{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// The two floats of a packed register, lower index first.
template <class Element>
FLASHHOPPER_DEVICE float2 unpack(uint32_t packed) {
  if constexpr (std::is_same_v<Element, element::bf16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  } else {
    return __half22float2(reinterpret_cast<__half2 const&>(packed));
  }
}
#endif

}  // namespace flashhopper
