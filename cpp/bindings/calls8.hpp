// Quantisation and 8-bit attention, as Python calls them. Before it: python/flashhopper/engine/hopper_fp8.py and
// hopper_quantize.py. After it: cpp/src/api.cpp.
#pragma once

#include "arguments.hpp"

namespace flashhopper {

// Addresses of cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k and, for attention, packed_workspace; all 0 in a dense
// batch.
using Offsets = std::array<intptr_t, 5>;

// Flags of quantize; engine/hopper_quantize.py has them too.
enum { kRotate = 1, kSmoothK = 2, kCenterV = 4, kPowerScales = 8 };

// outputs: addresses of q8, k8, v8, q_scale, k_scale, v_scale, lse_shift, k_mean, v_mean. blocks: rows of one scale of
// q, columns of one Hadamard matrix.
inline void quantize(std::array<Tensor, 3> const& tensors, std::array<intptr_t, 9> const& outputs, intptr_t signs,
                     Sizes const& sizes, std::array<int64_t, 2> const& columns, int dtype, int format, int flags,
                     std::array<int, 2> const& blocks, Offsets const& offsets, Totals const& totals, intptr_t stream) {
  flashhopper_quantize_params params{};
  flashhopper_tensor* const targets[] = {&params.q, &params.k, &params.v};
  for (size_t i = 0; i < tensors.size(); ++i) *targets[i] = to_tensor(tensors[i]);
  auto const floats = [&](size_t i) { return reinterpret_cast<float*>(outputs[i]); };
  params.q8 = reinterpret_cast<void*>(outputs[0]);
  params.k8 = reinterpret_cast<void*>(outputs[1]);
  params.v8 = reinterpret_cast<void*>(outputs[2]);
  params.q_scale = floats(3);
  params.k_scale = floats(4);
  params.v_scale = floats(5);
  params.lse_shift = (flags & kSmoothK) != 0 ? floats(6) : nullptr;
  params.k_mean = (flags & kSmoothK) != 0 ? floats(7) : nullptr;
  params.v_mean = (flags & kCenterV) != 0 ? floats(8) : nullptr;
  params.signs = (flags & kRotate) != 0 ? reinterpret_cast<float const*>(signs) : nullptr;
  set_sizes(params, sizes);
  params.columns = columns[0];
  params.columns_v = columns[1];
  params.q_block = blocks[0];
  params.rotate_block = blocks[1];
  params.power_scales = (flags & kPowerScales) != 0;
  params.dtype = dtype;
  params.format = format;
  set_packing(params, offsets.data(), totals);
  params.stream = reinterpret_cast<void*>(stream);
  run(flashhopper_quantize, params);
}

inline void transpose_values(Tensor const& v, intptr_t v8, int64_t batch, int64_t kv_heads, int64_t seqlen_k,
                             int64_t head_dim_v, intptr_t stream) {
  flashhopper_quantize_params params{};
  params.v = to_tensor(v);
  params.v8 = reinterpret_cast<void*>(v8);
  params.batch = batch;
  params.kv_heads = kv_heads;
  params.seqlen_k = seqlen_k;
  params.head_dim_v = head_dim_v;
  params.stream = reinterpret_cast<void*>(stream);
  run(flashhopper_transpose_values, params);
}

// 8-bit attention of contiguous tensors; addresses, 0 for what the recipe lacks: q, k, v, q_scale, k_scale, v_scale,
// lse_shift, v_mean. columns: of q and k, and of v; keys: of v. blocks: rows of one scale of q, k and v.
inline void forward8(std::array<intptr_t, 8> const& addresses, Tensor const& out, intptr_t lse, intptr_t workspace,
                     Sizes const& sizes, std::array<int64_t, 2> const& columns, int64_t keys,
                     std::array<int64_t, 3> const& blocks, int format, int dtype, double softmax_scale, int sm_margin,
                     Offsets const& offsets, Totals const& totals, intptr_t stream) {
  flashhopper_forward8_params params{};
  set_problem(params, sizes, softmax_scale, dtype, sm_margin);
  params.columns = columns[0];
  params.columns_v = columns[1];
  params.keys = keys;
  set_packing(params, offsets.data(), totals);
  params.packed_workspace = reinterpret_cast<void*>(offsets[4]);
  bool const is_packed = params.cu_seqlens_q != nullptr;
  auto const contiguous = [](intptr_t address, int64_t rows, int64_t row, int64_t heads, bool heads_outside) {
    return flashhopper_tensor{reinterpret_cast<void*>(address), rows * heads * row, heads_outside ? row : heads * row,
                              heads_outside ? rows * row : row};
  };
  int64_t const rows_q = is_packed ? totals[0] : params.seqlen_q, rows_k = is_packed ? totals[1] : params.seqlen_k;
  params.q = contiguous(addresses[0], rows_q, params.columns, params.heads, false);
  params.k = contiguous(addresses[1], rows_k, params.columns, params.kv_heads, false);
  params.v = contiguous(addresses[2], params.columns_v, params.keys, params.kv_heads, true);
  params.out = to_tensor(out);
  float const** const floats[] = {&params.q_scale, &params.k_scale, &params.v_scale, &params.lse_shift, &params.v_mean};
  for (size_t i = 0; i < 5; ++i) *floats[i] = reinterpret_cast<float const*>(addresses[3 + i]);
  params.lse = reinterpret_cast<float*>(lse);
  params.workspace = reinterpret_cast<void*>(workspace);
  params.q_block = blocks[0];
  params.k_block = blocks[1];
  params.v_block = blocks[2];
  params.format = format;
  params.stream = reinterpret_cast<void*>(stream);
  run(flashhopper_forward8, params);
}

inline py::dict forward8_plan(Sizes const& sizes, int format, int dtype, int sm_margin, int num_sms) {
  flashhopper_forward8_params params{};
  set_problem(params, sizes, 1.0, dtype, sm_margin);
  params.columns = (params.head_dim + 15) / 16 * 16;
  params.columns_v = (params.head_dim_v + 15) / 16 * 16;
  params.keys = (params.seqlen_k + 127) / 128 * 128;
  params.format = format;
  flashhopper_plan plan;
  check(flashhopper_forward8_get_plan(&params, num_sms, &plan));
  return to_dict(plan);
}

}  // namespace flashhopper
