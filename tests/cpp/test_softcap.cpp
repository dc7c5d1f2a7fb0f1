// The soft cap against double precision: tanh over all magnitudes, its derivative from the probability that it gave,
// and the ends (no probability, a row that sees nothing).
#include <cmath>
#include <initializer_list>
#include <limits>

#include "check.hpp"
#include "core/softcap.hpp"

using namespace flashhopper;

namespace {

void compare(float softcap, float scale) {
  constexpr double kLog2e = 1.4426950408889634;
  float scale_log2 = 0.f;
  Softcap const cap = make_softcap(softcap, scale, &scale_log2);
  CHECK(cap.is_on());
  CHECK(std::abs(scale_log2 / (softcap * kLog2e) - 1) < 1e-6);
  for (double magnitude = 1e-12; magnitude < 1e12; magnitude *= 1.7) {
    for (double sign : {-1.0, 1.0}) {
      float const score = static_cast<float>(sign * magnitude * softcap / scale);
      double const exact = std::tanh(static_cast<double>(score) * scale / softcap);
      float const found = cap.tanh(score);
      CHECK(std::abs(found - exact) <= 2e-5 * std::abs(exact) && std::abs(found - exact) <= 3e-7);
      // With lse at the score and a bit above: probabilities 1 and less.
      for (double above : {0.0, 0.5, 20.0}) {
        double const lse_log2 = exact * softcap * kLog2e + above;
        float const probability = std::exp2(found * scale_log2 - static_cast<float>(lse_log2));
        double const slope = cap.derivative(probability, static_cast<float>(lse_log2));
        // The logarithm is as good as the exponent was.
        CHECK(std::abs(slope - (1 - exact * exact)) <= 1e-6 + 1e-6 * (1 + 20 / (softcap * kLog2e)));
      }
    }
  }
}

}  // namespace

int main() {
  for (float softcap : {0.5f, 1.f, 30.f, 50.f, 1e4f}) {
    for (float scale : {0.01f, 0.125f, 2.f}) compare(softcap, scale);
  }
  float scale_log2 = 0.f;
  CHECK(!make_softcap(0.f, 0.125f, &scale_log2).is_on());
  CHECK(std::abs(scale_log2 - 0.125f * 1.442695f) < 1e-6f);
  Softcap const cap = make_softcap(50.f, 0.125f, &scale_log2);
  float const infinity = std::numeric_limits<float>::infinity();
  CHECK(cap.tanh(3e38f) == 1.f && cap.tanh(-3e38f) == -1.f && cap.tanh(0.f) == 0.f);
  CHECK(cap.derivative(0.f, 3.f) == 0.f && cap.derivative(0.f, infinity) == 0.f);
  return check::report("softcap");
}
