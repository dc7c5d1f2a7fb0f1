// What lets the same header compile under nvcc and under plain g++ (host tests): qualifiers, loop unrolling, integer
// helpers.
#pragma once

#if defined(__CUDACC__)
#define FLASHHOPPER_HOST_DEVICE __host__ __device__ __forceinline__
#define FLASHHOPPER_DEVICE __device__ __forceinline__
#define FLASHHOPPER_UNROLL _Pragma("unroll")
#else
#define FLASHHOPPER_HOST_DEVICE inline
#define FLASHHOPPER_DEVICE inline
#define FLASHHOPPER_UNROLL
#endif

namespace flashhopper {

FLASHHOPPER_HOST_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
FLASHHOPPER_HOST_DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }
FLASHHOPPER_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace flashhopper
