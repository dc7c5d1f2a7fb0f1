// What the host hands to the forward kernel, as one kernel parameter.
#pragma once

#include <cuda.h>

#include "core/mask.hpp"
#include "core/scheduler.hpp"

namespace flashhopper {

struct ForwardArgs {
  CUtensorMap q, k, v, out;  // boxes: 64 rows for q and out (one consumer warpgroup), tile_n rows for k and v
  float* lse;                // (batch, heads, seqlen_q)
  int* workspace;            // [0] places taken beyond the first of each CTA, [1] CTAs done; zero before and after
  float softmax_scale_log2;  // softmax_scale * log2(e)
  int group;                 // heads / kv_heads
  Mask mask;
  TileSchedule schedule;
};

}  // namespace flashhopper
