// The rotation of what a thread of the rows' kernel holds: signs, then the Hadamard matrix, of up to 32 columns by the
// tensor cores, which take the 16-bit elements as they are and sum in float; the rest are additions. Before it:
// row_layout.hpp, which says who holds what; after it: rows.hpp.
#pragma once

#include "quantize/io.hpp"
#include "quantize/row_layout.hpp"

namespace flashhopper {

// B of the products: what hadamard_pair() says, and its negative.
struct HadamardOperand {
  uint32_t plain, negated;
};

template <class Element>
FLASHHOPPER_DEVICE HadamardOperand hadamard_operand(Rotation rotation, int lane) {
  constexpr uint32_t kOne = std::is_same_v<Element, element::bf16> ? 0x3f80u : 0x3c00u, kSign = 0x8000u;
  HadamardPair const pair = hadamard_pair(rotation, lane);
  auto const bits = [](int entry) { return entry == 0 ? 0u : entry < 0 ? kOne | kSign : kOne; };
  uint32_t const plain = bits(pair.even) | bits(pair.odd) << 16;
  return {plain, pair.even == 0 ? plain : plain ^ (kSign | kSign << 16)};
}

// The signs of two neighbouring columns as bits to flip in a pair of elements.
FLASHHOPPER_DEVICE uint32_t sign_bits(float even, float odd) {
  return (__float_as_uint(even) >> 31 << 15) | (__float_as_uint(odd) & 0x80000000u);
}

// D = A B + C, m16n8k16.
template <class Element>
FLASHHOPPER_DEVICE void multiply(float (&d)[4], uint32_t const (&a)[4], uint32_t b_low, uint32_t b_high,
                                 float const (&c)[4]) {
  if constexpr (std::is_same_v<Element, element::bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  }
}

// One group of the thread's two rows, from its vectors to x[r][0 .. 7].
template <class Element, class Shape>
FLASHHOPPER_DEVICE void rotate_group(uint4 const (&raw)[2], uint4 const& signs, HadamardOperand const& operand,
                                     float* first, float* second) {
  uint32_t const flips[4] = {signs.x, signs.y, signs.z, signs.w};
  uint32_t const low[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w}, high[4] = {raw[1].x, raw[1].y, raw[1].z, raw[1].w};
  FLASHHOPPER_UNROLL
  for (int tile = 0; tile < 4; ++tile) {
    float d[4] = {};
    FLASHHOPPER_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (!takes_part(Shape::kKind, tile, half)) continue;
      uint32_t const a[4] = {low[2 * half] ^ flips[2 * half], high[2 * half] ^ flips[2 * half],
                             low[2 * half + 1] ^ flips[2 * half + 1], high[2 * half + 1] ^ flips[2 * half + 1]};
      auto const b = [&](int pair) {
        return is_negated(Shape::kKind, tile, half, pair) ? operand.negated : operand.plain;
      };
      float const c[4] = {d[0], d[1], d[2], d[3]};
      multiply<Element>(d, a, b(0), b(1), c);
    }
    first[2 * tile] = d[0];
    first[2 * tile + 1] = d[1];
    second[2 * tile] = d[2];
    second[2 * tile + 1] = d[3];
  }
}

// The stages of the matrix between groups.
template <class Shape>
FLASHHOPPER_DEVICE void rotate_groups(float (&x)[Shape::kElements]) {
  FLASHHOPPER_UNROLL
  for (int stride = 1; 32 * stride < Shape::kHadamard; stride *= 2) {
    FLASHHOPPER_UNROLL
    for (int e = 0; e < Shape::kElements; ++e) {
      if ((e / 8 & stride) != 0) continue;
      float const one = x[e], other = x[e + 8 * stride];
      x[e] = one + other;
      x[e + 8 * stride] = one - other;
    }
  }
}

}  // namespace flashhopper
