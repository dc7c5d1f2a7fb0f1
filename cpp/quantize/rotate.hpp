// The rotation of what a thread of the rows' kernel holds: signs and Hadamard matrix. Before it: row_layout.hpp, which
// says what that is; after it: rows.hpp.
#pragma once

#include "quantize/io.hpp"
#include "quantize/row_layout.hpp"

namespace flashhopper {

// Signs as rotate_chunks() takes them: of even columns factors, of odd ones the bit to flip.
FLASHHOPPER_DEVICE float prepared_sign(float sign, int column) {
  return column % 2 == 0 ? sign : __uint_as_float(__float_as_uint(sign) & 0x80000000u);
}

// -1 in lanes that have the bit.
FLASHHOPPER_DEVICE float lane_sign(int lane, int bit) { return (lane & bit) != 0 ? -1.f : 1.f; }

// The stages within 16 columns, and the signs. Rounding does not see a sign: these are the plain sums, bit for bit.
template <class Shape>
FLASHHOPPER_DEVICE void rotate_chunks(float (&x)[Shape::kElements], float const* signs, int lane) {
  FLASHHOPPER_UNROLL
  for (int i = 0; i < Shape::kChunks; ++i) {
    float* const chunk = x + 16 * i;
    auto const* const sign = reinterpret_cast<float4 const*>(signs + chunk_columns<Shape>(lane, i));
    FLASHHOPPER_UNROLL
    for (int e = 0; e < 16; e += 4) {
      float4 const s = sign[e / 4];
      float const first = chunk[e], third = chunk[e + 2];
      float const second = __uint_as_float(__float_as_uint(chunk[e + 1]) ^ __float_as_uint(s.y));
      float const fourth = __uint_as_float(__float_as_uint(chunk[e + 3]) ^ __float_as_uint(s.w));
      chunk[e] = __fmaf_rn(first, s.x, second);
      chunk[e + 1] = __fmaf_rn(first, s.x, -second);
      chunk[e + 2] = __fmaf_rn(third, s.z, fourth);
      chunk[e + 3] = __fmaf_rn(third, s.z, -fourth);
    }
  }
}

// One stage between elements of a thread. sign: 1; -1 also swaps sum and difference.
template <class Shape>
FLASHHOPPER_DEVICE void butterflies(float (&x)[Shape::kElements], int stride, float sign) {
  FLASHHOPPER_UNROLL
  for (int e = 0; e < Shape::kElements; ++e) {
    if ((e & stride) != 0) continue;
    float const first = x[e], second = x[e + stride];
    x[e] = __fmaf_rn(second, sign, first);
    x[e + stride] = __fmaf_rn(second, -sign, first);
  }
}

// The stages between lanes, where each of them has chunks of every kind: lanes that differ in one bit of the lane's
// number exchange those elements whose number has the bit `stride`. Before, lanes with the bit have swapped their two
// halves, so all lanes send the upper one; after it, that bit of the element's number is the bit of the column. Of
// lanes with the bit the differences come out negative: exchanged_sign() says so to those who read them.
template <class Shape>
FLASHHOPPER_DEVICE void exchange(float (&x)[Shape::kElements], int stride, int bit) {
  FLASHHOPPER_UNROLL
  for (int e = 0; e < Shape::kElements; ++e) {
    if ((e & stride) != 0) continue;
    float const other = __shfl_xor_sync(0xffffffffu, x[e + stride], bit), own = x[e];
    x[e] = own + other;
    x[e + stride] = own - other;
  }
}
template <class Shape>
FLASHHOPPER_DEVICE float exchanged_sign(int lane, int chunk) {
  float sign = (chunk & 1) != 0 ? lane_sign(lane, 1) : 1.f;
  if (Shape::kLanes == 4 && (chunk & 2) != 0) sign *= lane_sign(lane, 2);
  return sign;
}

// One row, spread over kLanes lanes, times signs and the Hadamard matrix, not yet divided by sqrt(kHadamard). Strides
// ascend, so that the sums are those of the plain in-place transform, bit for bit; but for exchanged_sign().
template <class Shape>
FLASHHOPPER_DEVICE void rotate_row(float (&x)[Shape::kElements], float const* signs, int lane) {
  rotate_chunks<Shape>(x, signs, lane);
  FLASHHOPPER_UNROLL
  for (int stride = 2; stride < min_of(16, Shape::kHadamard); stride *= 2) butterflies<Shape>(x, stride, 1.f);
  if constexpr (!Shape::kIsWide) return;
  if constexpr (Shape::kExchange) {
    FLASHHOPPER_UNROLL
    for (int bit = 1; bit < Shape::kChunks; bit *= 2) {
      butterflies<Shape>(x, 16 * bit, bit < Shape::kLanes ? lane_sign(lane, bit) : 1.f);
    }
    FLASHHOPPER_UNROLL
    for (int bit = 1; bit < Shape::kLanes; bit *= 2) exchange<Shape>(x, 16 * bit, bit);
  } else {
    FLASHHOPPER_UNROLL
    for (int bit = 1; bit < Shape::kLanes; bit *= 2) {
      FLASHHOPPER_UNROLL
      for (int e = 0; e < Shape::kElements; ++e) {
        x[e] = __fmaf_rn(x[e], lane_sign(lane, bit), __shfl_xor_sync(0xffffffffu, x[e], bit));
      }
    }
    FLASHHOPPER_UNROLL
    for (int stride = 16; stride < Shape::kHadamard / Shape::kLanes; stride *= 2) butterflies<Shape>(x, stride, 1.f);
  }
}

}  // namespace flashhopper
