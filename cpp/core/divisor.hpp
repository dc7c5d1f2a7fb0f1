// Division by a number that only the host knows: the device divides by it without a division. The quantiser's tasks are
// numbered through it (quantize/args.hpp); a host test proves it.
#pragma once

#include <cstdint>

#include "core/platform.hpp"

namespace flashhopper {

// n / divisor for 0 <= n < 2^31, 1 <= divisor < 2^31. With 2^shift >= divisor and the multiplier 2^(31 + shift) over
// the divisor, rounded up by less than 1, what stands for the quotient is too large by less than 2^-shift, so by less
// than 1 over the divisor: not enough to reach the next integer. Source: Granlund and Montgomery, Division by invariant
// integers using multiplication (1994).
struct Divisor {
  uint32_t multiplier = 1u << 31;
  int shift = 0;
  int divisor = 1;

  Divisor() = default;
  explicit Divisor(int number) : divisor(number) {
    while ((int64_t{1} << shift) < number) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + number - 1) / number);
  }

  FLASHHOPPER_HOST_DEVICE int quotient(int n) const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(__umulhi(2u * n, multiplier) >> shift);
#else
    return static_cast<int>((uint64_t{2} * n * multiplier >> 32) >> shift);
#endif
  }
  FLASHHOPPER_HOST_DEVICE int remainder(int n, int quotient) const { return n - quotient * divisor; }
};

}  // namespace flashhopper
