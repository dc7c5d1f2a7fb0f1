// The rows whose mean is a sequence's: inside it, ascending, one of each equal part, the same on every machine, and in
// step with no period.
#include <cmath>

#include "check.hpp"
#include "quantize/args.hpp"

using namespace flashhopper;

namespace {

void one_of_each_part() {
  for (int seqlen : {1, 5, 511, 512, 513, 1023, 1024, 5000, 131072, 1 << 30}) {
    int const samples = samples_of(seqlen);
    CHECK(samples == (seqlen < kMeanRows ? seqlen : kMeanRows));
    for (int i = 0; i < samples; ++i) {
      int const row = sampled_row(i, seqlen);
      CHECK(row >= int64_t{i} * seqlen / samples && row < int64_t{i + 1} * seqlen / samples);
    }
  }
  CHECK(samples_of(0) == 0);
}

// A wave along the sequence has no mean; that of the samples is no more than chance makes it, 4 % on average.
void no_period_meets_them() {
  int const seqlen = 22528;  // 44 rows a sample: 44 radians are seven turns
  for (int turns = 1; turns <= 4 * kMeanRows; ++turns) {
    double const turn = 2 * 3.14159265358979 * turns / kMeanRows;  // a row
    double real = 0, imaginary = 0;
    for (int i = 0; i < kMeanRows; ++i) {
      double const angle = turn * sampled_row(i, seqlen);
      real += std::cos(angle), imaginary += std::sin(angle);
    }
    CHECK(turns % kMeanRows == 0 || std::hypot(real, imaginary) < 0.15 * kMeanRows);
  }
}

// tests/python/test_fp8_format.py holds the torch operations to the same.
static_assert(sampled_row(500, 512) == 500);
static_assert(sampled_row(1, 5000) == 12 && sampled_row(300, 5000) == 2934 && sampled_row(511, 5000) == 4993);
static_assert(sampled_row(411, 1 << 30) == 863559268);

}  // namespace

int main() {
  one_of_each_part();
  no_period_meets_them();
  return check::report("samples");
}
