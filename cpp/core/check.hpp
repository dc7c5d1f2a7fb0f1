// Errors inside the library: a status and a message that names the argument, what it got and the way out.
#pragma once

#include <cuda_runtime.h>

#include <sstream>
#include <string>

#include "flashhopper/flashhopper.h"

namespace flashhopper {

// The message of this thread's last failed call; set_error returns its status so that a check is one line.
std::string& last_error();

template <class... Parts>
flashhopper_status set_error(flashhopper_status status, Parts const&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  last_error() = text.str();
  return status;
}

inline flashhopper_status cuda_error(char const* call, cudaError_t error) {
  return set_error(FLASHHOPPER_CUDA_ERROR, call, " failed: ", cudaGetErrorName(error), " (", cudaGetErrorString(error),
                   ")");
}

}  // namespace flashhopper

// Leaves the enclosing function when a step did not return FLASHHOPPER_OK.
#define FLASHHOPPER_RETURN_IF_ERROR(expression)                      \
  do {                                                               \
    flashhopper_status const flashhopper_step = (expression);        \
    if (flashhopper_step != FLASHHOPPER_OK) return flashhopper_step; \
  } while (false)
