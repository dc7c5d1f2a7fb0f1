// The online softmax of one thread against double precision, over blocks that may be masked in part or whole; with one
// scale for all scores (16 bits), and with scales of rows and blocks (8 bits).
#include <cmath>
#include <random>
#include <vector>

#include "check.hpp"
#include "core/softmax.hpp"

using namespace flashhopper;

namespace {

constexpr int kElements = 32;  // two rows of 16 columns
constexpr float kNoSink[kRowsPerThread] = {-INFINITY, -INFINITY};

bool close(double got, double expected, double tolerance) {
  if (std::isinf(expected)) return got == expected;
  return std::abs(got - expected) <= tolerance * std::max(1.0, std::abs(expected));
}

// Values of column x are its index, so that the rescaled output can be checked too.
void run(int blocks, double keep_probability, double spread, float scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0.f, static_cast<float>(spread));
  std::bernoulli_distribution keep(keep_probability);
  OnlineSoftmax softmax(scale * 1.44269504f);
  double output[kRowsPerThread] = {0, 0};
  std::vector<double> seen[kRowsPerThread], values[kRowsPerThread];
  for (int b = 0; b < blocks; ++b) {
    float scores[kElements], rescale[kRowsPerThread];
    for (int e = 0; e < kElements; ++e) {
      scores[e] = keep(random) ? normal(random) : -INFINITY;
      if (scores[e] == -INFINITY) continue;
      seen[accumulator_row(e)].push_back(static_cast<double>(scores[e]) * scale);
      values[accumulator_row(e)].push_back(b * 100 + e);
    }
    for (int r = 0; r < kRowsPerThread; ++r) rescale[r] = softmax.raise_max(scores, r);
    for (int r = 0; r < kRowsPerThread; ++r) softmax.exponentiate(scores, r);
    for (int r = 0; r < kRowsPerThread; ++r) output[r] *= rescale[r];
    for (int e = 0; e < kElements; ++e) output[accumulator_row(e)] += scores[e] * (b * 100 + e);
  }
  float normalise[kRowsPerThread], lse[kRowsPerThread];
  softmax.finish(normalise, lse, kNoSink, 0.f);
  for (int r = 0; r < kRowsPerThread; ++r) {
    double sum = 0, expected = 0, highest = -INFINITY;
    for (double s : seen[r]) highest = std::max(highest, s);
    for (size_t i = 0; i < seen[r].size(); ++i) {
      double const p = std::exp(seen[r][i] - highest);
      sum += p;
      expected += p * values[r][i];
    }
    bool const empty = seen[r].empty();
    CHECK(close(lse[r], empty ? -INFINITY : highest + std::log(sum), 2e-5));
    CHECK(close(output[r] * normalise[r], empty ? 0.0 : expected / sum, 1e-4));
    CHECK(!std::isnan(lse[r]) && !std::isnan(normalise[r]));
  }
}

// What the kernel's product with V brings of row r.
float sum_of(float const (&probabilities)[kElements], int r) {
  float sum = 0.f;
  for (int e = 0; e < kElements; ++e) sum += accumulator_row(e) == r ? probabilities[e] : 0.f;
  return sum;
}

// Raw scores are whole numbers, as sums of int8 products are, and start from `zero`. The output is in units of the
// scale of the values added last, as the kernel keeps it.
void run_scaled(int blocks, double keep_probability, double spread, float zero, std::mt19937& random) {
  std::normal_distribution<double> normal(0.0, spread);
  std::bernoulli_distribution keep(keep_probability);
  std::uniform_real_distribution<float> scale_of(0.2f, 5.f);
  ScaledSoftmax softmax;
  float const q_factor[kRowsPerThread] = {scale_of(random) * 1e-3f, scale_of(random) * 1e-3f};
  double output[kRowsPerThread] = {0, 0};
  float unit = 1.f;
  std::vector<double> seen[kRowsPerThread], values[kRowsPerThread];
  for (int b = 0; b < blocks; ++b) {
    float const k_scale = scale_of(random), v_scale = scale_of(random);
    float scores[kElements], rescale[kRowsPerThread];
    for (int e = 0; e < kElements; ++e) {
      int const r = accumulator_row(e);
      double const raw = std::round(normal(random));
      bool const visible = keep(random);
      scores[e] = visible ? zero + static_cast<float>(raw) : -INFINITY;
      if (!visible) continue;
      seen[r].push_back(raw * q_factor[r] * k_scale);
      values[r].push_back((b * 10 + e) * v_scale);
    }
    for (int r = 0; r < kRowsPerThread; ++r) {
      float const factor = q_factor[r] * k_scale;
      rescale[r] = softmax.move_reference(scores, r, zero, factor);
      softmax.exponentiate(scores, r, zero, factor);
      output[r] *= rescale[r] * (unit / v_scale);
    }
    unit = v_scale;
    for (int e = 0; e < kElements; ++e) {
      CHECK(scores[e] >= 0.f && scores[e] < 448.f);  // what e4m3 holds
      output[accumulator_row(e)] += static_cast<double>(scores[e]) * (b * 10 + e);
    }
    for (int r = 0; r < kRowsPerThread; ++r) {
      softmax.add_sum(sum_of(scores, r), r, rescale[r]);
    }
  }
  float normalise[kRowsPerThread], lse[kRowsPerThread];
  softmax.finish(normalise, lse);
  for (int r = 0; r < kRowsPerThread; ++r) {
    double sum = 0, expected = 0, highest = -INFINITY;
    for (double s : seen[r]) highest = std::max(highest, s);
    for (size_t i = 0; i < seen[r].size(); ++i) {
      double const p = std::exp2(seen[r][i] - highest);
      sum += p;
      expected += p * values[r][i];
    }
    bool const empty = seen[r].empty();
    // From an integer zero, zero * factor is what exponents round at: half a unit in its last place, each block its
    // own.
    double const tolerance = zero == 0.f ? 1e-4 : 1e-4 + 4.0 * std::ldexp(zero * q_factor[r] * 5.0, -24);
    CHECK(close(lse[r], empty ? -INFINITY : (highest + std::log2(sum)) * std::log(2.0), tolerance));
    CHECK(close(output[r] * unit * normalise[r], empty ? 0.0 : expected / sum, tolerance));
    CHECK(!std::isnan(lse[r]) && !std::isnan(normalise[r]));
  }
}

// To e4m3 and back, to nearest even: three bits after the leading one, steps of 2^-9 below 2^-6.
float round_e4m3(float p) {
  if (p == 0.f || std::isnan(p)) return p;
  float const step = std::ldexp(1.f, std::max(std::ilogb(p), -6) - 3);
  return std::nearbyint(p / step) * step;
}

// One block through both rows, as the kernel does it: scores become probabilities, rounded. Returns row 0's rescale.
float add_block(ScaledSoftmax& softmax, float (&scores)[kElements], float factor = 1.f) {
  float rescale[kRowsPerThread];
  for (int r = 0; r < kRowsPerThread; ++r) {
    rescale[r] = softmax.move_reference(scores, r, 0.f, factor);
    softmax.exponentiate(scores, r, 0.f, factor);
  }
  for (float& p : scores) p = round_e4m3(p);
  for (int r = 0; r < kRowsPerThread; ++r) softmax.add_sum(sum_of(scores, r), r, rescale[r]);
  return rescale[0];
}

// Equal scores: every weight is 2^8, whatever the factor, and lse the logarithm of their number.
void equal_scores_are_equal_weights() {
  for (float factor : {0.f, 1e-3f, 1.f}) {
    ScaledSoftmax softmax;
    float scores[kElements];
    for (float& score : scores) score = 3.f;
    add_block(softmax, scores, factor);
    for (float p : scores) CHECK(close(p, 256.0, 1e-4));
    float normalise[kRowsPerThread], lse[kRowsPerThread];
    softmax.finish(normalise, lse);
    for (float x : lse) CHECK(close(x, std::log(kElements / 2.0) + 3.0 * factor * std::log(2.0), 1e-4));
  }
}

// A score, then a thousand blocks below it, whose weights would round to zero beside the largest. At 24 bits the
// reference stays 8 above them; at 40 they do round to zero.
void far_blocks_keep_their_weight() {
  for (float depth : {0.f, 8.f, 20.f, 24.f, 40.f}) {
    constexpr int kBlocks = 1000, kColumns = kElements / 2;
    ScaledSoftmax softmax;
    float scores[kElements];
    for (int e = 0; e < kElements; ++e) scores[e] = e == 0 || e == 2 ? 5.f : -INFINITY;
    add_block(softmax, scores);
    for (int block = 0; block < kBlocks; ++block) {
      for (float& score : scores) score = 5.f - depth;
      add_block(softmax, scores);
    }
    float normalise[kRowsPerThread], lse[kRowsPerThread];
    softmax.finish(normalise, lse);
    double const others = depth < 34.f ? kBlocks * kColumns * std::exp2(-double{depth}) : 0.0;
    for (int r = 0; r < kRowsPerThread; ++r) {
      CHECK(std::abs(lse[r] - (5.0 * std::log(2.0) + std::log1p(others))) <= 2e-6);
      // The large weight's share of the output, relative to the reference that the last block left.
      double const weight = std::exp2(5.0 + 8.0 - softmax.reference[r]);
      CHECK(close(weight * normalise[r], 1.0 / (1.0 + others), 1e-5));
    }
  }
}

// The reference is the maximum of each block, at most 16 below the row's so far; masked blocks leave it at its lowest
// and change nothing, and sums follow.
void references_fall_and_rise() {
  ScaledSoftmax softmax;
  double highest = -INFINITY, sum = 0;
  float before = ScaledSoftmax::kNothing;
  for (float maximum : {-INFINITY, -7.f, -9.5f, -INFINITY, -20.f, -60.f, -INFINITY, -11.f, 3.f, 3.f, -2.25f, -30.f,
                        40.f, 39.f, 20.f, -INFINITY, 41.5f}) {
    float scores[kElements];
    for (int e = 0; e < kElements; ++e) scores[e] = e < 4 ? maximum : maximum - 1.f;
    float const rescale = add_block(softmax, scores);
    highest = std::max(highest, double{maximum});
    if (maximum != -INFINITY) sum += (2 + 14 * 0.5) * std::exp2(double{maximum});
    for (float p : scores) CHECK(p >= 0.f && p <= 256.f);
    if (highest == -INFINITY) {
      CHECK(softmax.reference[0] == before && softmax.row_sum[0] == 0.f);
      continue;
    }
    float const reference = static_cast<float>(std::max(double{maximum}, highest - 16.0));
    CHECK(softmax.reference[0] == reference && softmax.reference[1] == reference);
    CHECK(rescale == std::exp2(before - reference) && rescale <= 65536.f);
    before = reference;
    ScaledSoftmax copy = softmax;
    float normalise[kRowsPerThread], lse[kRowsPerThread];
    copy.finish(normalise, lse);
    for (float x : lse) CHECK(close(x, std::log(sum), 1e-6));
  }
}

// NaN reaches both results, whether of a whole block or of one score, before, among or after others; an infinite score
// gives NaN.
void scaled_nan_stays_visible() {
  for (float bad : {NAN, INFINITY}) {
    for (bool everywhere : {false, true}) {
      for (int at : {0, 1, 2}) {
        ScaledSoftmax softmax;
        for (int block = 0; block < 3; ++block) {
          float scores[kElements];
          for (int e = 0; e < kElements; ++e) {
            bool const is_bad = block == at && (everywhere || e == 5 || e == 7);
            scores[e] = is_bad ? bad : -30.f * static_cast<float>(block);
          }
          add_block(softmax, scores);
        }
        float normalise[kRowsPerThread], lse[kRowsPerThread];
        softmax.finish(normalise, lse);
        for (int r = 0; r < kRowsPerThread; ++r) CHECK(std::isnan(lse[r]) && std::isnan(normalise[r]));
      }
    }
  }
}

// Where the maximum did not rise nothing is rescaled, and the largest weight is exactly 1, which rounds to itself.
void maxima_are_exact() {
  OnlineSoftmax softmax(1.f);
  float highest = -INFINITY;
  for (float maximum : {-3.f, 1.f, 5.f, 5.f, 4.f, 5.5f, 13.f, 2.f, 40.f}) {
    float scores[kElements];
    for (float& score : scores) score = maximum;
    float const raised = std::max(highest, maximum);
    for (int r = 0; r < kRowsPerThread; ++r) {
      float const rescale = softmax.raise_max(scores, r);
      CHECK(raised > highest ? rescale == std::exp2(highest - raised) : rescale == 1.f);
      CHECK(softmax.row_max[r] == raised);
      softmax.exponentiate(scores, r);
    }
    for (float p : scores) CHECK(p == std::exp2(maximum - raised) && p <= 1.f);
    highest = raised;
  }
}

// A NaN score reaches both results, also where every score is NaN.
void nan_stays_visible(bool everywhere) {
  OnlineSoftmax softmax(1.f);
  float scores[kElements];
  for (int e = 0; e < kElements; ++e) scores[e] = everywhere || e < 4 ? NAN : 1.f;
  for (int r = 0; r < kRowsPerThread; ++r) softmax.raise_max(scores, r);
  for (int r = 0; r < kRowsPerThread; ++r) softmax.exponentiate(scores, r);
  float normalise[kRowsPerThread], lse[kRowsPerThread];
  softmax.finish(normalise, lse, kNoSink, 0.f);
  for (int r = 0; r < kRowsPerThread; ++r) CHECK(std::isnan(lse[r]) && std::isnan(normalise[r]));
}

// Each row's sink, a natural logit, joins its sum and has no value, wherever it lies; one of -inf changes no bit.
// shift: what a softcap makes all scores too large by. A row that has seen nothing gives the sink itself.
void sinks_join_the_sum(float shift, std::mt19937& random) {
  std::normal_distribution<double> normal(0.0, 3.0);
  for (float sink : {-INFINITY, -340.f, -3.f, 0.f, 1.7f, 210.f}) {
    for (bool empty : {false, true}) {
      OnlineSoftmax softmax(1.f);
      float scores[kElements];
      float const sinks[kRowsPerThread] = {sink, sink + 1.1f};
      double const log2e = 1 / std::log(2.0);
      double const logits[kRowsPerThread] = {(double{sinks[0]} + shift) * log2e, (double{sinks[1]} + shift) * log2e};
      double const largest = std::max(logits[1], 20.0);
      double sums[kRowsPerThread] = {std::exp2(logits[0] - largest), std::exp2(logits[1] - largest)};
      for (int e = 0; e < kElements; ++e) {
        scores[e] = empty ? -INFINITY : static_cast<float>(normal(random));
        sums[accumulator_row(e)] += std::exp2(double{scores[e]} - largest);
      }
      double maxima[kRowsPerThread];
      for (int r = 0; r < kRowsPerThread; ++r) {
        softmax.raise_max(scores, r);
        maxima[r] = softmax.row_max[r];
        softmax.exponentiate(scores, r);
      }
      float normalise[kRowsPerThread], lse[kRowsPerThread];
      softmax.finish(normalise, lse, sinks, shift);
      for (int r = 0; r < kRowsPerThread; ++r) {
        if (empty) {
          CHECK(lse[r] == sinks[r] && normalise[r] == 0.f);
          continue;
        }
        CHECK(close(lse[r], (largest + std::log2(sums[r])) * std::log(2.0) - shift, 1e-5));
        // normalise turns exp2(score - maximum) into exp2(score) / sum.
        CHECK(close(normalise[r], std::exp2(maxima[r] - largest) / sums[r], 1e-5));
        if (sink == -INFINITY) CHECK(normalise[r] == 1.f / softmax.row_sum[r]);
      }
    }
  }
}

// The lse of rows without keys does not depend on whether their tile has keys: every sink comes back with its bits.
void rows_without_keys_keep_the_sink(std::mt19937& random) {
  std::normal_distribution<float> normal(0.f, 4.f);
  for (int repeat = 0; repeat < 1000; ++repeat) {
    float const sinks[kRowsPerThread] = {normal(random), normal(random)};
    OnlineSoftmax softmax(0.18f);
    float scores[kElements];
    for (float& score : scores) score = -INFINITY;
    for (int r = 0; r < kRowsPerThread; ++r) {
      CHECK(repeat % 2 == 0 || softmax.raise_max(scores, r) == 0.f);  // with 0 or one block of masked keys
      softmax.exponentiate(scores, r);
    }
    float normalise[kRowsPerThread], lse[kRowsPerThread];
    softmax.finish(normalise, lse, sinks, repeat % 3 == 0 ? 30.f : 0.f);
    for (int r = 0; r < kRowsPerThread; ++r) CHECK(lse[r] == sinks[r] && normalise[r] == 0.f);
  }
}

// The capped score, and what softmax_scale_log2 and the shift make of it, are softcap * tanh.
void caps_are_tangents() {
  for (float softcap : {1e-3f, 0.5f, 15.f, 50.f, 1e3f}) {
    for (float scale : {0.125f, 1.f}) {
      SoftCap const cap{2 * kLog2e * scale / softcap, softcap};
      for (float score :
           {-INFINITY, -6e4f, -300.f, -7.f, -1.f, -1e-3f, 0.f, 1e-3f, 0.7f, 12.f, 500.f, 6e4f, INFINITY}) {
        float scores[1] = {score};
        cap.apply(scores);
        double const found = double{scores[0]} * 2 * softcap - softcap;
        CHECK(std::abs(found - softcap * std::tanh(double{score} * scale / softcap)) <= 3e-7 * softcap);
      }
    }
  }
  float nan[1] = {NAN};
  SoftCap{1.f, 1.f}.apply(nan);
  CHECK(std::isnan(nan[0]));
}

}  // namespace

int main() {
  caps_are_tangents();
  maxima_are_exact();
  nan_stays_visible(false);
  nan_stays_visible(true);
  scaled_nan_stays_visible();
  equal_scores_are_equal_weights();
  far_blocks_keep_their_weight();
  references_fall_and_rise();
  std::mt19937 random(7);
  for (float shift : {0.f, 15.f}) sinks_join_the_sum(shift, random);
  rows_without_keys_keep_the_sink(random);
  for (int repeat = 0; repeat < 200; ++repeat) {
    for (int blocks : {0, 1, 2, 9}) {
      for (double keep : {1.0, 0.5, 0.04, 0.0}) {
        for (double spread : {0.1, 3.0, 1e4}) run(blocks, keep, spread, 0.125f, random);
        for (double spread : {30.0, 3000.0, 30000.0}) {
          for (float zero : {0.f, 12582912.f}) run_scaled(blocks, keep, spread, zero, random);
        }
      }
    }
  }
  return check::report("softmax");
}
