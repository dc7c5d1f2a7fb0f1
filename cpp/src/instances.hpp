// The kernels that a build has, of one direction: what the lists that cmake/instances.cmake generates become.
// Used by the dispatch files.
#pragma once

#include <cstddef>

#include "core/check.hpp"

namespace flashhopper {

// The element types by the names that the lists use.
namespace dtype_token {
inline constexpr flashhopper_dtype fp16 = FLASHHOPPER_FP16;
inline constexpr flashhopper_dtype bf16 = FLASHHOPPER_BF16;
inline constexpr flashhopper_dtype e4m3 = FLASHHOPPER_E4M3;
inline constexpr flashhopper_dtype int8 = FLASHHOPPER_INT8;
}  // namespace dtype_token

template <class Args>
using LaunchFunction = cudaError_t (*)(Args const& args, int grid, int device, cudaStream_t stream);

// A row of the config table in one element type. A list ends with a row of index -1, for a narrowed build may have no
// kernel of a direction.
template <class Args>
struct Instance {
  int config_index;
  flashhopper_dtype dtype;
  LaunchFunction<Args> launch;
};

// Null where the build lacks it.
template <class Args, size_t kCount>
LaunchFunction<Args> find_instance(Instance<Args> const (&instances)[kCount], int config_index, int32_t dtype) {
  for (Instance<Args> const& instance : instances) {
    if (instance.config_index == config_index && instance.dtype == dtype) return instance.launch;
  }
  return nullptr;
}

// The table row of the index-th config that was built, in one element type at least.
template <class Args, size_t kCount>
flashhopper_status find_built_row(Instance<Args> const (&instances)[kCount], int row_count, int index, int* row) {
  int built = 0;
  for (*row = 0; *row < row_count; ++*row) {
    bool is_built = false;
    for (Instance<Args> const& instance : instances) is_built = is_built || instance.config_index == *row;
    if (is_built && built++ == index) return FLASHHOPPER_OK;
  }
  return set_error(FLASHHOPPER_INVALID_ARGUMENT, "config index is ", index, ": this build has ", built, " rows");
}

}  // namespace flashhopper
