// Division by a number that only the host knows, against the division of the language.
#include <climits>
#include <random>

#include "check.hpp"
#include "core/divisor.hpp"

using namespace flashhopper;

namespace {

void check(int n, int number) {
  Divisor const divisor(number);
  int const quotient = divisor.quotient(n);
  CHECK(quotient == n / number && divisor.remainder(n, quotient) == n % number);
}

// Around every multiple that could be the first to go wrong: the largest ones, and small ones.
void small_divisors() {
  for (int number = 1; number < 2000; ++number) {
    for (int n = 0; n < 3 * number; ++n) check(n, number);
    for (int k = 0; k < 200; ++k) {
      int const multiple = (INT_MAX / number - k) * number;
      check(multiple, number);
      if (multiple > 0) check(multiple - 1, number);
      if (multiple < INT_MAX) check(multiple + 1, number);
    }
  }
}

void any_divisors() {
  std::mt19937 random(1);
  auto const draw = [&] { return static_cast<int>(random() >> (1 + random() % 31)); };
  for (int round = 0; round < 1000000; ++round) check(draw(), draw() | 1);
  for (int number : {INT_MAX, INT_MAX - 1, 1 << 30, (1 << 30) + 1, (1 << 30) - 1}) {
    for (int n : {0, 1, number - 1, number, INT_MAX}) check(n, number);
  }
}

void default_divides_by_one() {
  Divisor const one;
  for (int n : {0, 1, 12345, INT_MAX}) CHECK(one.quotient(n) == n && one.remainder(n, n) == 0);
}

}  // namespace

int main() {
  small_divisors();
  any_divisors();
  default_divides_by_one();
  return check::report("divisor");
}
