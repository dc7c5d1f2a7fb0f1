// The checks and lookups that every launch starts with. Before it: the dispatch files.
#include "problem.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>

namespace flashhopper {
namespace {

// Sum over rows i in [0, sq) of clamp(i + first, 0, sk).
double clamped_sum(double first, double sq, double sk) {
  auto const up_to = [&](double n) {
    double const ramp = std::max(0., std::min(n, sk));
    return ramp * (ramp + 1) / 2 + std::max(0., n - sk) * sk;
  };
  return up_to(first + sq - 1) - up_to(first - 1);
}

flashhopper_status check_packed(Problem const& p, int64_t most) {
  if (p.total_q < 1 || p.total_q > most || p.total_k < 0 || p.total_k > most) {
    return set_error(FLASHHOPPER_INVALID_ARGUMENT, "total_q is ", p.total_q, ", total_k is ", p.total_k,
                     ": they must be between 1, or 0 for total_k, and ", most);
  }
  return FLASHHOPPER_OK;
}

}  // namespace

// Bounds that hide nothing become -1, so that those which remain fit 32 bits with a row added; a right bound of 0 is
// causal attention and stays.
Window Problem::window() const {
  int64_t const rows = is_packed ? total_q : seqlen_q, keys = is_packed ? total_k : seqlen_k;
  bool const has_left = window_left >= 0 && window_left < keys - 1;
  bool const has_right = window_right == 0 || (window_right > 0 && window_right < rows - 1);
  return {has_left ? static_cast<int>(window_left) : -1, has_right ? static_cast<int>(window_right) : -1};
}

Mask Problem::mask() const {
  Window const bounds = window();
  return {static_cast<int>(seqlen_q), static_cast<int>(seqlen_k), bounds.left, bounds.right};
}

// Row i sees the keys from clamp(i + sk - sq - left) to clamp(i + sk - sq + right + 1), both within [0, sk].
double Problem::kept_scores() const {
  double const sq = static_cast<double>(seqlen_q), sk = static_cast<double>(seqlen_k);
  Window const bounds = window();
  double const ends = bounds.right < 0 ? sq * sk : clamped_sum(sk - sq + bounds.right + 1, sq, sk);
  return ends - (bounds.left < 0 ? 0. : clamped_sum(sk - sq - bounds.left, sq, sk));
}

char const* dtype_name(int32_t dtype) { return dtype == FLASHHOPPER_BF16 ? "bf16" : "fp16"; }

flashhopper_status check_problem(Problem const& p, int num_sms) {
  constexpr int64_t kMaxSeqlen = int64_t{1} << 30;  // row + shift stays within 32 bits
  struct Size {
    char const* name;
    int64_t value, least, most;
  };
  int64_t const least = p.is_packed ? 0 : 1;  // a packed batch may hold no sequence, and rows of none
  int64_t const most_batch = p.is_packed ? kMaxSeqlen / 2 : INT32_MAX;  // a list's length doubled stays an int
  Size const sizes[] = {{"batch", p.batch, least, most_batch},   {"heads", p.heads, 1, INT32_MAX},
                        {"kv_heads", p.kv_heads, 1, INT32_MAX},  {"seqlen_q", p.seqlen_q, least, kMaxSeqlen},
                        {"seqlen_k", p.seqlen_k, 0, kMaxSeqlen}, {"head_dim", p.head_dim, 8, 256},
                        {"head_dim_v", p.head_dim_v, 8, 256}};
  for (Size const& size : sizes) {
    if (size.value < size.least || size.value > size.most) {
      return set_error(FLASHHOPPER_INVALID_ARGUMENT, size.name, " is ", size.value, ": it must be between ", size.least,
                       " and ", size.most);
    }
  }
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) {
    return set_error(FLASHHOPPER_INVALID_ARGUMENT, "head_dim is ", p.head_dim, ", head_dim_v is ", p.head_dim_v,
                     ": both must be multiples of 8; pad with zero columns");
  }
  if (p.heads % p.kv_heads != 0) {
    return set_error(FLASHHOPPER_INVALID_ARGUMENT, "heads is ", p.heads, ", kv_heads is ", p.kv_heads,
                     ": heads must be a multiple of kv_heads");
  }
  if (p.dtype != FLASHHOPPER_FP16 && p.dtype != FLASHHOPPER_BF16) {
    return set_error(FLASHHOPPER_INVALID_ARGUMENT, "dtype is ", p.dtype, ": it must be 0 (fp16) or 1 (bf16)");
  }
  constexpr float kLeastScale = 1e-30f, kMostScale = 1e30f;  // its product with log2(e) stays finite and normal
  if (!(p.softmax_scale >= kLeastScale && p.softmax_scale <= kMostScale)) {
    return set_error(FLASHHOPPER_UNSUPPORTED, "softmax_scale is ", p.softmax_scale, ": the Hopper kernels take ",
                     kLeastScale, " to ", kMostScale, "; the tiled engine takes any");
  }
  if (p.is_packed) FLASHHOPPER_RETURN_IF_ERROR(check_packed(p, kMaxSeqlen));
  if (p.sm_margin < 0 || p.sm_margin >= num_sms) {
    return set_error(FLASHHOPPER_INVALID_ARGUMENT, "sm_margin is ", p.sm_margin, ": it must be between 0 and ",
                     num_sms - 1);
  }
  return FLASHHOPPER_OK;
}

flashhopper_status check_softcap(float softcap) {
  constexpr float kLeastCap = 1e-3f, kMostCap = 1e3f;  // core/softmax.hpp's absolute error, times the cap, stays small
  if (softcap == 0.f || (softcap >= kLeastCap && softcap <= kMostCap)) return FLASHHOPPER_OK;
  return set_error(FLASHHOPPER_UNSUPPORTED, "softcap is ", softcap, ": the Hopper kernels take 0 (none) and ",
                   kLeastCap, " to ", kMostCap, "; the tiled engine takes any");
}

flashhopper_status current_device(Device* device) {
  constexpr int kCached = 64;
  static std::atomic<int> known_sms[kCached];  // 0: not asked yet
  if (cudaError_t const error = cudaGetDevice(&device->index); error != cudaSuccess)
    return cuda_error("cudaGetDevice", error);
  bool const cached = device->index < kCached;
  device->num_sms = cached ? known_sms[device->index].load(std::memory_order_relaxed) : 0;
  if (device->num_sms > 0) return FLASHHOPPER_OK;
  int major = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device->index);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&device->num_sms, cudaDevAttrMultiProcessorCount, device->index);
  }
  if (error != cudaSuccess) return cuda_error("cudaDeviceGetAttribute", error);
  if (major != 9) {
    return set_error(FLASHHOPPER_UNSUPPORTED, "device ", device->index, " has compute capability ", major,
                     ".x: these kernels need 9.0 (H100, H200)");
  }
  if (cached) known_sms[device->index].store(device->num_sms, std::memory_order_relaxed);
  return FLASHHOPPER_OK;
}

flashhopper_status no_row(Problem const& problem, char const* direction, char const* dtype, BuiltRow const* rows,
                          int count) {
  std::ostringstream built;
  for (int i = 0; i < count; ++i) built << (i > 0 ? ", " : "") << rows[i].head_dim << "/" << rows[i].head_dim_v;
  return set_error(FLASHHOPPER_UNSUPPORTED, "no ", direction, " kernel was built for ", dtype, " with head_dim ",
                   problem.head_dim, " and head_dim_v ", problem.head_dim_v,
                   " (built, up to: ", count > 0 ? built.str() : "none in this dtype", ")");
}

flashhopper_status launch_error(flashhopper_plan const& plan, cudaError_t error) {
  return set_error(FLASHHOPPER_CUDA_ERROR, "launching ", plan.config, " failed: ", cudaGetErrorName(error), " (",
                   cudaGetErrorString(error), "); grid ", plan.grid, ", ", plan.threads, " threads, ", plan.smem_bytes,
                   " bytes of shared memory");
}

}  // namespace flashhopper
