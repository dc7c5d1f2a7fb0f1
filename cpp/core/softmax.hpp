// The online softmax of one consumer thread: it owns two rows of the score tile and updates their maximum, sum and
// scores. Plain C++ apart from the reduction over the four threads of a quad, so host tests compare it with double
// precision.
#pragma once

#include <cmath>

#include "core/platform.hpp"

namespace flashhopper {

// A wgmma accumulator of 64 x N gives each thread N / 2 floats: flat index e holds column 8 * (e / 4) + (e % 2) + 2 *
// (lane % 4) of row (lane / 4) + 8 * ((e / 2) % 2) within the warp's 16 rows.
inline constexpr int kRowsPerThread = 2;
FLASHHOPPER_HOST_DEVICE constexpr int accumulator_row(int e) { return (e >> 1) & 1; }
FLASHHOPPER_HOST_DEVICE constexpr int accumulator_column(int e) { return 8 * (e >> 2) + (e & 1); }

inline constexpr float kLog2e = 1.44269504088896340736f;

// The hardware's logarithm and reciprocal are good to about 2^-22, far below what 16-bit results can show.
FLASHHOPPER_HOST_DEVICE float fast_log2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::log2(x);
#endif
}
FLASHHOPPER_HOST_DEVICE float fast_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.f / x;
#endif
}
// a * b rounded once, never fused into an addition. An unchanged maximum must rescale by exactly 1: with a fused
// product the rounding error of max * scale would multiply the row at every block, 7 % over 128k keys with scores of
// 1e4.
FLASHHOPPER_HOST_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
FLASHHOPPER_HOST_DEVICE float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

// softcap * tanh(softmax_scale * score / softcap), up to a constant that the softmax does not see: tanh(x) is
// 2 / (1 + e^-2x) - 1, and the hardware's exponential and reciprocal keep its absolute error below 2^-22, where the
// hardware's tangent has 2^-11. A capped score is 1 / (1 + 2^-(factor * score)), in [0, 1]; softmax_scale_log2 is then
// 2 * softcap * log2(e), and lse is `shift` too large.
struct SoftCap {
  float factor;         // 2 * log2(e) * softmax_scale / softcap; 0: no cap
  float shift;          // softcap
  float inverse = 0.f;  // 1 / softmax_scale_log2; the backward alone needs it

  template <int kElements>
  FLASHHOPPER_HOST_DEVICE void apply(float (&scores)[kElements]) const {
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kElements; ++e) scores[e] = fast_reciprocal(1.f + fast_exp2(-factor * scores[e]));
  }

  // The cap's derivative, 1 - tanh^2, where the capped score gave the probability 2^(score / inverse - lse_log2): from
  // that, for nobody has the registers to keep the score. 0 where the probability is 0, whose logarithm is infinite;
  // fmaxf returns the number of a number and a NaN.
  FLASHHOPPER_HOST_DEVICE float slope(float probability, float lse_log2) const {
    float const capped = (fast_log2(probability) + lse_log2) * inverse;
    return fmaxf(4.f * capped * (1.f - capped), 0.f);
  }
};

// Reductions over the four threads that share a row. On the host one thread owns its rows alone.
FLASHHOPPER_HOST_DEVICE float quad_max(float x) {
#if defined(__CUDA_ARCH__)
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
#endif
  return x;
}
// Whether any thread of the warp says so.
FLASHHOPPER_HOST_DEVICE bool any_of_warp(bool x) {
#if defined(__CUDA_ARCH__)
  return __any_sync(0xffffffffu, x);
#else
  return x;
#endif
}
FLASHHOPPER_HOST_DEVICE float quad_sum(float x) {
#if defined(__CUDA_ARCH__)
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
#endif
  return x;
}

// Source: Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1. Scores are used in base 2: p = 2^(scale_log2 * (s
// - max)).
struct OnlineSoftmax {
  float scale_log2;
  float row_max[kRowsPerThread] = {-INFINITY, -INFINITY};
  float row_sum[kRowsPerThread] = {0.f, 0.f};  // of this thread's columns only, until finish()

  FLASHHOPPER_HOST_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {}

  // Raises the running maximum of row r to that of the new scores and returns what the row's earlier sum and output
  // must be multiplied by: exactly 1 where it did not rise. A row that has seen nothing yet keeps maximum -inf.
  template <int kElements>
  FLASHHOPPER_HOST_DEVICE float raise_max(float const (&scores)[kElements], int r) {
    // Two chains: one alone would wait out the latency of each maximum.
    float even = row_max[r], odd = -INFINITY;
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kElements; e += 2) {
      if (accumulator_row(e) != r) continue;
      even = fmaxf(even, scores[e]);
      odd = fmaxf(odd, scores[e + 1]);
    }
    float const raised = quad_max(fmaxf(even, odd));
    float const rescale = fast_exp2(rounded_product(row_max[r], scale_log2) - offset(raised));
    row_max[r] = raised;
    row_sum[r] *= rescale;
    return rescale;
  }

  // Replaces the scores of row r by probabilities relative to its maximum; all 0 where it has seen nothing.
  template <int kElements>
  FLASHHOPPER_HOST_DEVICE void exponentiate(float (&scores)[kElements], int r) {
    float const subtract = offset(row_max[r]);
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kElements; ++e) {
      if (accumulator_row(e) == r) scores[e] = fast_exp2(scores[e] * scale_log2 - subtract);
    }
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kElements; ++e) {
      if (accumulator_row(e) == r) row_sum[r] += scores[e];
    }
  }

  // After the last block: normalise[r] turns row r of the accumulated output into the result, lse[r] is its natural
  // log-sum-exp. sink[r]: a natural logit that joins the row's sum and has no value; -inf: none. It may be far above
  // the maximum, so the sum is rescaled to the larger of them; without a sink that multiplies by exactly 1. shift: what
  // all scores are too large by (SoftCap). A row that has seen nothing gives the sink, unrounded, whatever its tile.
  FLASHHOPPER_HOST_DEVICE void finish(float (&normalise)[kRowsPerThread], float (&lse)[kRowsPerThread],
                                      float const (&sink)[kRowsPerThread], float shift) {
    constexpr float kLn2 = 0.69314718055994530942f;
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float const sum = quad_sum(row_sum[r]);
      bool const empty = sum == 0.f;  // the maximum itself adds 1; NaN scores give a NaN sum and stay visible
      float const logit = (sink[r] + shift) * kLog2e, base = offset(row_max[r]), largest = fmaxf(base, logit);
      float const decay = fast_exp2(base - largest), total = sum * decay + fast_exp2(logit - largest);
      normalise[r] = empty ? 0.f : decay * fast_reciprocal(total);
      lse[r] = empty ? sink[r] : (largest + fast_log2(total)) * kLn2 - shift;
    }
  }

 private:
  // -inf - -inf is NaN: rows that have seen nothing subtract 0.
  FLASHHOPPER_HOST_DEVICE float offset(float maximum) const {
    return maximum == -INFINITY ? 0.f : rounded_product(maximum, scale_log2);
  }
};

// The same where scores carry a factor of their own in every key block and row, and probabilities are to be rounded to
// e4m3. Probabilities are 2^(s - reference + kProbabilityBits), to fill e4m3's range; everything is in base 2, scaled.
// The reference of a block is its own maximum, not the row's: e4m3 ends 18 bits below 2^8, and in a block that lies far
// below the row's maximum most weights would round to zero and be missing in output and sum. Sums follow it down.
struct ScaledSoftmax {
  static constexpr float kProbabilityBits = 8.f;  // 2^8 < 448
  // How far below the row's maximum the reference may fall: sums grow by as much. Weights below 2^-34 of the row's
  // largest are lost.
  static constexpr float kDropBits = 16.f;
  // Both of a row that has seen nothing: finite, so that differences are never NaN, and below every score.
  static constexpr float kNothing = -1e38f;
  float reference[kRowsPerThread] = {kNothing, kNothing};
  float lowest[kRowsPerThread] = {kNothing, kNothing};  // the row's maximum so far, less kDropBits
  float row_sum[kRowsPerThread] = {0.f, 0.f};           // of this thread's columns only, until finish()

  // Moves row r's reference to the new scores. Raw scores are zero + score; factor turns a score into base 2. Returns
  // the factor for the earlier sum and output, which is up to 2^kDropBits.
  template <int kElements>
  FLASHHOPPER_HOST_DEVICE float move_reference(float const (&scores)[kElements], int r, float zero, float factor) {
    float even = scores[2 * r], odd = scores[2 * r + 1];
    FLASHHOPPER_UNROLL
    for (int e = 4; e < kElements; e += 2) {
      if (accumulator_row(e) != r) continue;
      even = fmaxf(even, scores[e]);
      odd = fmaxf(odd, scores[e + 1]);
    }
    float block_max = quad_max(fmaxf(even, odd));
    if (zero != 0.f) block_max -= zero;
    float const moved = fmaxf(lowest[r], block_max * factor);
    // After it, so that no score waits for it: where a block raises the bound its own maximum is higher still.
    lowest[r] = fmaxf(lowest[r], moved - kDropBits);
    float const rescale = fast_exp2(reference[r] - moved);
    reference[r] = moved;
    return rescale;
  }

  // Replaces the scores of row r by probabilities.
  template <int kElements>
  FLASHHOPPER_HOST_DEVICE void exponentiate(float (&scores)[kElements], int r, float zero, float factor) const {
    float subtract = reference[r] - kProbabilityBits;
    if (zero != 0.f) subtract += zero * factor;
    FLASHHOPPER_UNROLL
    for (int e = 0; e < kElements; ++e) {
      if (accumulator_row(e) == r) scores[e] = fast_exp2(scores[e] * factor - subtract);
    }
  }

  // The row sum of a block's probabilities joins the rescaled sum.
  FLASHHOPPER_HOST_DEVICE void add_sum(float sum, int r, float rescale) { row_sum[r] = row_sum[r] * rescale + sum; }

  // As OnlineSoftmax's.
  FLASHHOPPER_HOST_DEVICE void finish(float (&normalise)[kRowsPerThread], float (&lse)[kRowsPerThread]) {
    constexpr float kLn2 = 0.69314718055994530942f;
    FLASHHOPPER_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float const sum = quad_sum(row_sum[r]);
      bool const empty = sum == 0.f;
      normalise[r] = empty ? 0.f : fast_reciprocal(sum);
      lse[r] = empty ? -INFINITY : (reference[r] - kProbabilityBits + fast_log2(sum)) * kLn2;
    }
  }
};

}  // namespace flashhopper
