// The online softmax of one thread against double precision, over blocks that may be masked in part or whole.
#include <cmath>
#include <random>
#include <vector>

#include "check.hpp"
#include "core/softmax.hpp"

using namespace flashhopper;

namespace {

constexpr int kElements = 32;  // two rows of 16 columns

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
  softmax.finish(normalise, lse);
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

// A NaN score reaches both results, also where every score is NaN.
void nan_stays_visible(bool everywhere) {
  OnlineSoftmax softmax(1.f);
  float scores[kElements];
  for (int e = 0; e < kElements; ++e) scores[e] = everywhere || e < 4 ? NAN : 1.f;
  for (int r = 0; r < kRowsPerThread; ++r) softmax.raise_max(scores, r);
  for (int r = 0; r < kRowsPerThread; ++r) softmax.exponentiate(scores, r);
  float normalise[kRowsPerThread], lse[kRowsPerThread];
  softmax.finish(normalise, lse);
  for (int r = 0; r < kRowsPerThread; ++r) CHECK(std::isnan(lse[r]) && std::isnan(normalise[r]));
}

}  // namespace

int main() {
  nan_stays_visible(false);
  nan_stays_visible(true);
  std::mt19937 random(7);
  for (int repeat = 0; repeat < 200; ++repeat) {
    for (int blocks : {0, 1, 2, 9}) {
      for (double keep : {1.0, 0.5, 0.04, 0.0}) {
        for (double spread : {0.1, 3.0, 1e4}) run(blocks, keep, spread, 0.125f, random);
      }
    }
  }
  return check::report("softmax");
}
