// The checks and lookups that every launch starts with. Before it: the dispatch files.
#include "problem.hpp"

#include <atomic>
#include <cstdio>

namespace flashhopper {
namespace {

constexpr float kLeastScale = 1e-30f, kMostScale = 1e30f;  // products with log2(e) stay finite and normal

// Windows that reach past the sequences are unbounded; what remains fits 32 bits.
int window_to_int(int64_t window, int64_t bound) {
  return window < 0 || window >= bound ? -1 : static_cast<int>(window);
}

// Sum over i in [0, count) of start + i clipped to [0, limit].
double clipped_sum(double start, double count, double limit) {
  auto const ramp = [](double n) { return n > 0 ? n * (n + 1) / 2 : 0.0; };  // sum of the positive numbers up to n
  double const last = start + count - 1;
  return ramp(last) - ramp(start - 1) - (ramp(last - limit) - ramp(start - 1 - limit));
}

}  // namespace

Mask Problem::mask() const {
  int64_t const bound = seqlen_q + seqlen_k;
  return {static_cast<int>(seqlen_q), static_cast<int>(seqlen_k), window_to_int(window_left, bound),
          window_to_int(window_right, bound)};
}

double Problem::kept_scores() const {
  double const sq = static_cast<double>(seqlen_q), sk = static_cast<double>(seqlen_k);
  Mask const bounds = mask();
  // Row i sees the keys from key_begin to key_end, which both are i plus a number, clipped.
  double const ends = bounds.window_right < 0 ? sq * sk : clipped_sum(sk - sq + 1 + bounds.window_right, sq, sk);
  return ends - (bounds.window_left < 0 ? 0.0 : clipped_sum(sk - sq - bounds.window_left, sq, sk));
}

char const* dtype_name(int32_t dtype) { return dtype == FLASHHOPPER_BF16 ? "bf16" : "fp16"; }

flashhopper_status check_problem(Problem const& p, int num_sms) {
  constexpr int64_t kMaxSeqlen = int64_t{1} << 30;  // row + shift stays within 32 bits
  struct Size {
    char const* name;
    int64_t value, least, most;
  };
  Size const sizes[] = {{"batch", p.batch, 1, INT32_MAX},        {"heads", p.heads, 1, INT32_MAX},
                        {"kv_heads", p.kv_heads, 1, INT32_MAX},  {"seqlen_q", p.seqlen_q, 1, kMaxSeqlen},
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
  if (!(p.softmax_scale >= kLeastScale && p.softmax_scale <= kMostScale)) {
    return set_error(FLASHHOPPER_UNSUPPORTED, "softmax_scale is ", p.softmax_scale, ": the Hopper kernels take ",
                     kLeastScale, " to ", kMostScale, "; the tiled engine takes any");
  }
  if (p.sm_margin < 0 || p.sm_margin >= num_sms) {
    return set_error(FLASHHOPPER_INVALID_ARGUMENT, "sm_margin is ", p.sm_margin, ": it must be between 0 and ",
                     num_sms - 1);
  }
  return FLASHHOPPER_OK;
}

flashhopper_status check_full_or_causal(Problem const& p) {
  if (p.window_left < 0 && p.window_right <= 0) return FLASHHOPPER_OK;
  return set_error(
      FLASHHOPPER_UNSUPPORTED, "window (", p.window_left, ", ", p.window_right,
      "): this Hopper kernel computes full (-1, -1) and causal (-1, 0) attention; the tiled engine has windows");
}

flashhopper_status check_softcap(float softcap, float softmax_scale) {
  if (softcap == 0.f) return FLASHHOPPER_OK;
  float const ratio = softmax_scale / softcap;
  if (softcap >= kLeastScale && softcap <= kMostScale && ratio >= kLeastScale && ratio <= kMostScale) {
    return FLASHHOPPER_OK;
  }
  return set_error(FLASHHOPPER_UNSUPPORTED, "softcap is ", softcap, " with softmax_scale ", softmax_scale,
                   ": the Hopper kernels take 0 (none), or a softcap and a ratio of the two of ", kLeastScale, " to ",
                   kMostScale, "; the tiled engine takes any");
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
