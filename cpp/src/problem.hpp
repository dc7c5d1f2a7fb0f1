// What forward and backward dispatch share: the checked sizes of an attention problem, its mask, the device, the plan.
// Used by forward_dispatch.cpp and backward_dispatch.cpp.
#pragma once

#include "core/check.hpp"
#include "core/mask.hpp"
#include "core/softmax.hpp"

namespace flashhopper {

// The sizes and options of any params struct.
struct Problem {
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left, window_right;
  float softmax_scale;
  int32_t dtype, sm_margin;
  bool is_packed = false;            // then seqlen_q and seqlen_k are those of the longest sequence, or more
  int64_t total_q = 0, total_k = 0;  // packed: rows of the tensors

  template <class Params>
  explicit Problem(Params const& p)
      : batch(p.batch),
        heads(p.heads),
        kv_heads(p.kv_heads),
        seqlen_q(p.seqlen_q),
        seqlen_k(p.seqlen_k),
        head_dim(p.head_dim),
        head_dim_v(p.head_dim_v),
        window_left(p.window_left),
        window_right(p.window_right),
        softmax_scale(p.softmax_scale),
        dtype(p.dtype),
        sm_margin(p.sm_margin) {
    if constexpr (requires { p.total_q; }) {
      is_packed = p.cu_seqlens_q != nullptr;
      total_q = p.total_q;
      total_k = p.total_k;
    }
  }

  Window window() const;
  Mask mask() const;           // of one sequence, the longest of a packed batch
  double kept_scores() const;  // of one head of it
};

inline constexpr int64_t kMaxTiles = INT32_MAX - (1 << 16);  // each CTA takes one place past the end

char const* dtype_name(int32_t dtype);

flashhopper_status check_problem(Problem const& problem, int num_sms);
flashhopper_status check_softcap(float softcap);

// Offsets come in pairs, used lengths with offsets.
template <class Params>
flashhopper_status check_packing(Params const& p) {
  bool const is_packed = p.cu_seqlens_q != nullptr;
  if (is_packed != (p.cu_seqlens_k != nullptr)) {
    return set_error(FLASHHOPPER_INVALID_ARGUMENT, "cu_seqlens_q and cu_seqlens_k: give both or neither");
  }
  if (!is_packed && (p.seqused_q != nullptr || p.seqused_k != nullptr)) {
    return set_error(FLASHHOPPER_INVALID_ARGUMENT, "seqused_q and seqused_k need cu_seqlens_q and cu_seqlens_k");
  }
  return FLASHHOPPER_OK;
}

template <class Params>
flashhopper_status check_options(Params const& p) {
  FLASHHOPPER_RETURN_IF_ERROR(check_packing(p));
  return check_softcap(p.softcap);
}

struct Device {
  int index;
  int num_sms;
};
flashhopper_status current_device(Device* device);

// FLASHHOPPER_UNSUPPORTED, naming the head dimensions of the rows that were built.
struct BuiltRow {
  int head_dim, head_dim_v;
};
flashhopper_status no_row(Problem const& problem, char const* direction, char const* dtype, BuiltRow const* rows,
                          int count);

flashhopper_status launch_error(flashhopper_plan const& plan, cudaError_t error);

}  // namespace flashhopper
