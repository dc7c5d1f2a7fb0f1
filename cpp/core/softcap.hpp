// The soft cap of scores, softcap * tanh(score / softcap), and its derivative. Plain C++ apart from single
// instructions, so host tests compare it with double precision. Before it: softmax.hpp. Used by the consumers.
#pragma once

#include "core/softmax.hpp"

namespace flashhopper {

// Two factors of a call: capped scores are held as their tanh, and softcap * log2(e) takes the place of
// softmax_scale * log2(e) in the exponent.
struct Softcap {
  float input = 0.f;    // 2 log2(e) * softmax_scale / softcap, so that tanh's exponential is 2^(input * s); 0: no cap
  float inverse = 0.f;  // 1 / (softcap * log2(e))

  FLASHHOPPER_HOST_DEVICE bool is_on() const { return input != 0.f; }

  // tanh(softmax_scale * s / softcap), good to 2e-5 of itself and 2e-7. Near 0, where the difference of exponentials
  // would cancel, by its series.
  FLASHHOPPER_HOST_DEVICE float tanh(float s) const {
    constexpr float kHalfLn2 = 0.34657359027997264f, kSmall = 1.f / 32;
    float const exponent = s * input, x = exponent * kHalfLn2;
    float const near_zero = x - x * x * x * (1.f / 3);
    float const elsewhere = 1.f - 2.f * fast_reciprocal(fast_exp2(exponent) + 1.f);
    return exponent > -kSmall && exponent < kSmall ? near_zero : elsewhere;
  }

  // 1 - tanh^2 where tanh gave the probability 2^(tanh / inverse - lse_log2): computed from that, for nobody has the
  // registers to keep it. 0 where the probability is 0, whose logarithm is infinite; fmaxf returns the number of a
  // number and a NaN.
  FLASHHOPPER_HOST_DEVICE float derivative(float probability, float lse_log2) const {
    float const tanh = (fast_log2(probability) + lse_log2) * inverse;
    return fmaxf(1.f - tanh * tanh, 0.f);
  }
};

// scale_log2: where the exponent's factor goes.
inline Softcap make_softcap(float softcap, float softmax_scale, float* scale_log2) {
  constexpr float kLog2e = 1.44269504088896340736f;
  *scale_log2 = (softcap > 0.f ? softcap : softmax_scale) * kLog2e;
  if (!(softcap > 0.f)) return {};
  return {2.f * kLog2e * softmax_scale / softcap, 1.f / *scale_log2};
}

}  // namespace flashhopper
