// How Python's numbers become the C ABI's structs, and its results Python's: what all bound functions share.
// Before it: module.cpp, calls8.hpp and prepared_call.hpp, which bind the functions. After it: cpp/src/api.cpp.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>

#include "flashhopper/flashhopper.h"

namespace flashhopper {

namespace py = pybind11;

// INVALID_ARGUMENT becomes ValueError, everything else RuntimeError; the message is the library's.
inline PyObject* exception_type(int status) {
  return status == FLASHHOPPER_INVALID_ARGUMENT ? PyExc_ValueError : PyExc_RuntimeError;
}

inline void check(int status) {
  if (status == FLASHHOPPER_OK) return;
  PyErr_SetString(exception_type(status), flashhopper_last_error());
  throw py::error_already_set();
}

// Calls the library without the interpreter's lock: a launch can block on a full queue.
template <class Params>
void run(int (*function)(Params const*), Params const& params) {
  int status;
  {
    py::gil_scoped_release release;
    status = function(&params);
  }
  check(status);
}

inline py::dict to_dict(flashhopper_plan const& plan) {
  py::dict result;
  result["config"] = plan.config;
  result["tile_m"] = plan.tile_m;
  result["tile_n"] = plan.tile_n;
  result["head_dim"] = plan.head_dim;
  result["head_dim_v"] = plan.head_dim_v;
  result["stages"] = plan.stages;
  result["q_stages"] = plan.q_stages;
  result["consumer_warpgroups"] = plan.consumer_warpgroups;
  result["threads"] = plan.threads;
  result["producer_registers"] = plan.producer_registers;
  result["consumer_registers"] = plan.consumer_registers;
  result["smem_bytes"] = plan.smem_bytes;
  result["grid"] = plan.grid;
  result["tiles"] = plan.tiles;
  result["workspace_bytes"] = plan.workspace_bytes;
  result["cluster"] = plan.cluster;
  result["flops"] = plan.flops;
  result["bytes"] = plan.bytes;
  result["packed_heads"] = plan.packed_heads;
  return result;
}

// batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left, window_right
using Sizes = std::array<int64_t, 9>;

// All but the window, which quantisation has not.
template <class Params>
void set_sizes(Params& params, Sizes const& sizes) {
  params.batch = sizes[0];
  params.heads = sizes[1];
  params.kv_heads = sizes[2];
  params.seqlen_q = sizes[3];
  params.seqlen_k = sizes[4];
  params.head_dim = sizes[5];
  params.head_dim_v = sizes[6];
}

template <class Params>
void set_problem(Params& params, Sizes const& sizes, double softmax_scale, int dtype, int sm_margin) {
  set_sizes(params, sizes);
  params.window_left = sizes[7];
  params.window_right = sizes[8];
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.dtype = dtype;
  params.sm_margin = sm_margin;
}

// Address, batch stride, row stride, head stride.
using Tensor = std::array<int64_t, 4>;

inline flashhopper_tensor to_tensor(Tensor const& x) { return {reinterpret_cast<void*>(x[0]), x[1], x[2], x[3]}; }

// Rows of q and k of a packed batch, {0, 0} of a dense one.
using Totals = std::array<int64_t, 2>;

// offsets: addresses of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k, all 0 in a dense batch.
template <class Params>
void set_packing(Params& params, intptr_t const* offsets, Totals const& totals) {
  int32_t const** const targets[] = {&params.cu_seqlens_q, &params.cu_seqlens_k, &params.seqused_q, &params.seqused_k};
  for (size_t i = 0; i < 4; ++i) *targets[i] = reinterpret_cast<int32_t const*>(offsets[i]);
  params.total_q = totals[0];
  params.total_k = totals[1];
}

// The same for a plan: that there are any offsets makes the batch packed, and plans do not read them.
template <class Params>
void set_totals(Params& params, Totals const& totals) {
  static int32_t const some_offsets = 0;
  params.total_q = totals[0];
  params.total_k = totals[1];
  if (params.total_q > 0) params.cu_seqlens_q = params.cu_seqlens_k = &some_offsets;
}

}  // namespace flashhopper
