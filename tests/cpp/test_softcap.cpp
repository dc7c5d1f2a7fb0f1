// The soft cap against double precision: the probability from a capped score, the cap's derivative from that
// probability, and the ends (no probability, a row that sees nothing).
#include <cmath>
#include <initializer_list>
#include <limits>

#include "check.hpp"
#include "core/softmax.hpp"

using namespace flashhopper;

namespace {

constexpr double kExactLog2e = 1.4426950408889634;

SoftCap make(float softcap, float softmax_scale, float* scale_log2) {
  *scale_log2 = 2 * kLog2e * softcap;
  return {2 * kLog2e * softmax_scale / softcap, softcap, 1 / *scale_log2};
}

void compare(float softcap, float softmax_scale) {
  float scale_log2;
  SoftCap const cap = make(softcap, softmax_scale, &scale_log2);
  for (double magnitude = 1e-12; magnitude < 1e12; magnitude *= 1.7) {
    for (double sign : {-1.0, 1.0}) {
      float scores[1] = {static_cast<float>(sign * magnitude * softcap / softmax_scale)};
      double const tanh = std::tanh(static_cast<double>(scores[0]) * softmax_scale / softcap);
      cap.apply(scores);
      // With lse at the score and above: probabilities 1 and less.
      for (double above : {0.0, 0.5, 20.0}) {
        float const lse_log2 = static_cast<float>((tanh * softcap + cap.shift) * kExactLog2e + above);
        float const probability = std::exp2(scores[0] * scale_log2 - lse_log2);
        double const rounding = 3e-7 * (1 + softcap + above);  // of the exponent, in units of 1
        CHECK(std::abs(std::log2(probability) + above) <= 2 * rounding);
        CHECK(std::abs(cap.slope(probability, lse_log2) - (1 - tanh * tanh)) <= 1e-6 + 4 * rounding / scale_log2);
      }
    }
  }
}

}  // namespace

int main() {
  for (float softcap : {0.001f, 0.5f, 1.f, 30.f, 50.f, 1000.f}) {
    for (float softmax_scale : {0.01f, 0.125f, 2.f}) compare(softcap, softmax_scale);
  }
  float scale_log2;
  SoftCap const cap = make(50.f, 0.125f, &scale_log2);
  float const infinity = std::numeric_limits<float>::infinity();
  CHECK(cap.slope(0.f, 3.f) == 0.f && cap.slope(0.f, infinity) == 0.f);
  CHECK(cap.slope(std::exp2(-3.f), 3.f + 0.5f * scale_log2) == 1.f);  // a score of 0
  return check::report("softcap");
}
