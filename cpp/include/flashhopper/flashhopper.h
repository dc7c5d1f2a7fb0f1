// The C ABI of libflashhopper.so: plain structs, status codes, no torch and no C++ types.
// Before it: cpp/bindings/module.cpp (Python). After it: cpp/src/api.cpp.
#pragma once

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define FLASHHOPPER_VERSION "0.1.0"

#if defined(_WIN32)
#define FLASHHOPPER_API
#else
#define FLASHHOPPER_API __attribute__((visibility("default")))
#endif

typedef enum {
  FLASHHOPPER_OK = 0,
  FLASHHOPPER_INVALID_ARGUMENT = 1,  // the caller's arguments are wrong; the message names the one
  FLASHHOPPER_UNSUPPORTED = 2,       // valid attention that these kernels do not compute
  FLASHHOPPER_CUDA_ERROR = 3,        // a CUDA call failed; the message holds the call and its error
} flashhopper_status;

typedef enum {
  FLASHHOPPER_FP16 = 0,
  FLASHHOPPER_BF16 = 1,
  FLASHHOPPER_E4M3 = 2,  // OCP 8-bit float, 4 exponent and 3 mantissa bits, up to 448
  FLASHHOPPER_INT8 = 3,
} flashhopper_dtype;

// One tensor of shape (batch, seqlen, heads, head_dim), last dimension contiguous. Strides count elements.
typedef struct {
  void* data;
  int64_t batch_stride;
  int64_t row_stride;  // between consecutive positions of one sequence
  int64_t head_stride;
} flashhopper_tensor;

// out = softmax(softmax_scale * q k^T + mask) v, lse = log of the softmax denominator.
// The mask lets query i see keys j with  i + Sk - Sq - window_left <= j <= i + Sk - Sq + window_right; -1 is unbounded,
// causal attention is window_right = 0.
//
// Packed sequences, where cu_seqlens_q and cu_seqlens_k are given: sequence b is rows [cu_seqlens[b], cu_seqlens[b +
// 1]) of tensors (total, heads, head_dim), whose batch_stride is not read; lse is (heads, total_q); Sq and Sk are each
// sequence's own; seqlen_q and seqlen_k are at least the longest. Rows that seqused or cu_seqlens leave out are never
// read into a result; of out they get 0, of lse -inf. Lengths are read on the device when the call runs.
typedef struct {
  flashhopper_tensor q;    // (batch, seqlen_q, heads,    head_dim)
  flashhopper_tensor k;    // (batch, seqlen_k, kv_heads, head_dim)
  flashhopper_tensor v;    // (batch, seqlen_k, kv_heads, head_dim_v)
  flashhopper_tensor out;  // (batch, seqlen_q, heads,    head_dim_v)
  float* lse;              // (batch, heads, seqlen_q) contiguous, natural log; rows that see no key: sink or -inf
  void* workspace;         // flashhopper_workspace_bytes() of device memory, zero before the first use and left zero by
                           // every call; calls that may overlap in time (other streams) need one each
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int64_t window_left, window_right;
  float softmax_scale;
  int32_t dtype;      // flashhopper_dtype of q, k, v and out
  int32_t sm_margin;  // multiprocessors left free for other kernels
  void* stream;       // cudaStream_t
  float softcap;      // scores become softcap * tanh(score / softcap) before the mask; 0: as they are
  const float* sink;  // (heads): logits that join each row's denominator and have no value; null: none
  // Packed sequences; null and 0 in a dense batch.
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1), offsets that start at 0
  const int32_t *seqused_q, *seqused_k;        // (batch), how many leading rows of a sequence exist; null: all
  int64_t total_q, total_k;
  void* packed_workspace;  // flashhopper_packed_workspace_bytes() of device memory, 16-byte aligned, contents undefined
  // Whether query heads of a kv head share a tile, whose keys are then read once for them: -1 where it saves key
  // blocks, as plan.packed_heads tells; 0 never; 1 always, which packed sequences do not have and which needs heads /
  // kv_heads to be 1 or to have a divisor from 2 to 64. No bit of the result depends on it.
  int32_t pack_gqa;
} flashhopper_forward_params;

// Attention of 8-bit tensors: an element is data * scale. q and k are e4m3 or int8, v is e4m3, out fp16 or bf16; the
// product with v is summed in two levels. The mask is flashhopper_forward's.
//
// Packed sequences as in flashhopper_forward_params. A sequence's scales and keys of v begin at a chunk of 128 rows of
// their own, number cu_seqlens[b] / 128 + b of chunks = total / 128 + batch + 1: q_scale is (heads, total_q), or
// (heads, chunks of q) with q_block 128; k_scale and v_scale are (kv_heads, chunks of k); v is (columns_v, kv_heads,
// keys) with keys = 128 * chunks of k, its batch_stride not read; lse_shift is (heads, total_q). q_block is 1 or 128,
// k_block and v_block 128.
typedef struct {
  flashhopper_tensor q;    // (batch, seqlen_q, heads,    columns)
  flashhopper_tensor k;    // (batch, seqlen_k, kv_heads, columns)
  flashhopper_tensor v;    // (batch, columns_v, kv_heads, keys): transposed, row_stride between columns of v; each 16
                           // keys in the order 4c + e <- 2c + e % 2 + 8 * (e / 2), zeros from seqlen_k on
  flashhopper_tensor out;  // (batch, seqlen_q, heads,    head_dim_v)
  const float* q_scale;    // (batch, heads,    ceil(seqlen_q / q_block)), contiguous as the following
  const float* k_scale;    // (batch, kv_heads, ceil(seqlen_k / k_block))
  const float* v_scale;    // (batch, kv_heads, ceil(seqlen_k / v_block))
  const float* lse_shift;  // (batch, heads, seqlen_q): softmax_scale times it is added to lse; may be null
  const float* v_mean;     // (batch, kv_heads, columns_v): added to each row of out that sees a key; may be null
  float* lse;              // as in flashhopper_forward_params
  void* workspace;         // likewise
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int64_t columns, columns_v;  // of q and k, and of v, as stored: head_dim and head_dim_v or more, the rest zeros
  int64_t keys;                // of v as stored: seqlen_k or more, a multiple of 16
  int64_t q_block, k_block, v_block;  // rows of one scale; 0: one scale for the whole head, else k's and v's are 128
  int64_t window_left, window_right;
  float softmax_scale;
  int32_t format;     // flashhopper_dtype of q and k: e4m3 or int8
  int32_t dtype;      // of out: fp16 or bf16
  int32_t sm_margin;  // multiprocessors left free for other kernels
  void* stream;       // cudaStream_t
  // Packed sequences as in flashhopper_forward_params; null and 0 in a dense batch.
  const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
  int64_t total_q, total_k;
  void* packed_workspace;
} flashhopper_forward8_params;

// Gradients of flashhopper_forward by recomputation from (q, k, v, out, lse). dk and dv are summed over the query heads
// of a group. dlse is the gradient of lse, or null for zero. Scores are softcap * tanh(softmax_scale * q k^T / softcap)
// where softcap is not 0; a sink is one more logit in each row's denominator, which lse then holds too.
typedef struct {
  flashhopper_tensor q;           // (batch, seqlen_q, heads,    head_dim)
  flashhopper_tensor k;           // (batch, seqlen_k, kv_heads, head_dim)
  flashhopper_tensor v;           // (batch, seqlen_k, kv_heads, head_dim_v)
  flashhopper_tensor out, dout;   // (batch, seqlen_q, heads,    head_dim_v)
  flashhopper_tensor dq, dk, dv;  // of the shapes of q, k, v; every element is written
  const float *lse, *dlse;        // (batch, heads, seqlen_q) contiguous, natural log; dlse may be null
  const float* sink;              // (heads), natural log, or null
  float* dsink;                   // (heads), written where sink is not null
  void* workspace;  // plan.workspace_bytes of device memory, 256-byte aligned, contents undefined before and after
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int64_t window_left, window_right;
  float softmax_scale;
  float softcap;          // 0: none
  int32_t dtype;          // flashhopper_dtype of q, k, v, out and their gradients
  int32_t sm_margin;      // multiprocessors left free for other kernels
  int32_t deterministic;  // 1: bit-equal gradients in every run; dq's sums then wait for one another
  void* stream;           // cudaStream_t
  // Packed sequences as in flashhopper_forward_params; null and 0 in a dense batch. Gradients of rows that seqused or
  // cu_seqlens leave out are 0.
  const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
  int64_t total_q, total_k;
} flashhopper_backward_params;

// 16-bit q, k, v to 8 bits for flashhopper_forward8: value = data * scale, a scale for each block of 128 rows (Q: or
// for each row). D and Dv are the computed head dimensions, the next of 64, 96, 128, 192, 256; columns that head_dim
// lacks are zeros. Before they are scaled, keys lose their mean (k_mean not null), values theirs (v_mean), of a
// sequence longer than 2048 that of as many rows spread over it; then queries and keys are multiplied by the signs and
// by a Hadamard matrix over the root of its size (signs not null), on aligned blocks of rotate_block columns: 4, or 0
// for D (32 where D is 96, 64 where it is 192). scale = max(amax, 1e-12) / 448 for e4m3, / 127 for int8; of keys, where
// power_scales is 1, the next power of two, unless amax is above 1.75 times that of any 16 rows of the block, counted
// from its first. Every bit of the result is the same in every run.
//
// Packed sequences as in flashhopper_forward_params: blocks are counted from each sequence's first row, means are of
// the rows that exist, and everything of a sequence is what a dense batch of it alone would give, bit for bit. What the
// results hold where is said at flashhopper_forward8_params; q8 is (total_q, heads, D), k8 (total_k, kv_heads, D), v8
// (kv_heads, Dv, keys), the means keep their batch dimension. What no existing row stands for is not written.
//
// Rotated rows are sums by the tensor cores, of up to 32 elements, and of those in float.
typedef struct {
  flashhopper_tensor q;  // (batch, seqlen_q, heads,    head_dim)
  flashhopper_tensor k;  // (batch, seqlen_k, kv_heads, head_dim)
  flashhopper_tensor v;  // (batch, seqlen_k, kv_heads, head_dim_v)
  const float* signs;    // (D), +1 or -1; null: no rotation
  // All below contiguous and 16-byte aligned; every element is written.
  void* q8;        // (batch, seqlen_q, heads, D)
  void* k8;        // (batch, seqlen_k, kv_heads, D)
  void* v8;        // (batch, kv_heads, Dv, keys) e4m3, keys = seqlen_k rounded up to 128; position 4c + e of an
                   // aligned group of 16 holds key 2c + e (e < 2) or 6 + 2c + e of it; zeros past the end
  float* q_scale;  // (batch, heads, ceil(seqlen_q / q_block))
  float *k_scale, *v_scale;  // (batch, kv_heads, ceil(seqlen_k / 128))
  float* lse_shift;          // (batch, heads, seqlen_q): q . k_mean, neither rotated; null exactly where k_mean is
  float* k_mean;             // (2, batch, kv_heads, D), the second half for the quantiser's own use, or null
  float* v_mean;             // (batch, kv_heads, Dv), or null
  int64_t batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int64_t columns, columns_v;  // D and Dv, as the caller allocated them; others than the computed ones are refused
  int32_t q_block;             // rows of Q that share a scale: 1 or 128
  int32_t rotate_block;        // columns that are rotated together: 4, or 0: as many as there are
  int32_t power_scales;        // 1: scales of keys are powers of two in blocks without outliers
  int32_t dtype;               // flashhopper_dtype of q, k and v
  int32_t format;              // FLASHHOPPER_E4M3 or FLASHHOPPER_INT8: of q8 and k8
  void* stream;                // cudaStream_t
  // Packed sequences; null and 0 in a dense batch.
  const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_q, *seqused_k;
  int64_t total_q, total_k;
} flashhopper_quantize_params;

// What a call will do; filled without touching a device.
typedef struct {
  char config[64];                               // the row of the config table, e.g. "fwd_hd128_m128_n160"
  int32_t tile_m, tile_n, head_dim, head_dim_v;  // head dims as computed (padded)
  int32_t stages, q_stages, consumer_warpgroups, threads, producer_registers, consumer_registers;
  int64_t smem_bytes, grid;
  int64_t tiles;  // of work, the empty ones that fill up clusters included; packed sequences: at most
  int64_t workspace_bytes;
  double flops, bytes;   // of the kept scores' GEMMs (2 forward, 5 backward), and of all inputs and outputs
  int32_t cluster;       // thread blocks that load keys and values for one another; of a row alone: at most
  int32_t packed_heads;  // query heads that share a forward tile
} flashhopper_plan;

typedef struct {
  const char* version;
  int32_t cuda_runtime;   // e.g. 13000, the toolkit this library was built with
  int32_t cuda_driver;    // e.g. 13000, 0 without a driver
  int32_t device_count;   // 0 without a driver or GPU
  int32_t tma_available;  // 1 when the driver offers cuTensorMapEncodeTiled
  char message[256];      // why something above is missing, else empty
} flashhopper_environment;

FLASHHOPPER_API const char* flashhopper_version(void);
FLASHHOPPER_API const char* flashhopper_last_error(void);   // of this thread's last failed call
FLASHHOPPER_API int64_t flashhopper_workspace_bytes(void);  // of a forward call
FLASHHOPPER_API int64_t flashhopper_packed_workspace_bytes(int64_t batch, int64_t total_q);
FLASHHOPPER_API int flashhopper_get_environment(flashhopper_environment* environment);
FLASHHOPPER_API int flashhopper_forward(const flashhopper_forward_params* params);
// num_sms: multiprocessors of the device (132 on H100 and H200). Pointers and strides of params are not read.
FLASHHOPPER_API int flashhopper_forward_get_plan(const flashhopper_forward_params* params, int num_sms,
                                                 flashhopper_plan* plan);
FLASHHOPPER_API int flashhopper_forward8(const flashhopper_forward8_params* params);
FLASHHOPPER_API int flashhopper_forward8_get_plan(const flashhopper_forward8_params* params, int num_sms,
                                                  flashhopper_plan* plan);
FLASHHOPPER_API int flashhopper_backward(const flashhopper_backward_params* params);
FLASHHOPPER_API int flashhopper_backward_get_plan(const flashhopper_backward_params* params, int num_sms,
                                                  flashhopper_plan* plan);
FLASHHOPPER_API int flashhopper_quantize(const flashhopper_quantize_params* params);
// Values that are e4m3 already into the layout of flashhopper_quantize's v8: of params it reads v (strides in bytes),
// v8, batch, kv_heads, seqlen_k, head_dim_v (any up to 256) and stream.
FLASHHOPPER_API int flashhopper_transpose_values(const flashhopper_quantize_params* params);
// The config rows that this build has a kernel for, in one dtype at least; FLASHHOPPER_INVALID_ARGUMENT past the end.
FLASHHOPPER_API int flashhopper_forward_get_config(int index, flashhopper_plan* row);
FLASHHOPPER_API int flashhopper_forward8_get_config(int index, flashhopper_plan* row);
FLASHHOPPER_API int flashhopper_backward_get_config(int index, flashhopper_plan* row);

#if defined(__cplusplus)
}
#endif
