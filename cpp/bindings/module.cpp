// The Python module _C: plain integers and floats in, the C ABI's structs out. No torch header, no CUDA call.
// Before it: python/flashhopper/engine/hopper.py. After it: cpp/src/api.cpp.
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "flashhopper/flashhopper.h"

namespace py = pybind11;

namespace {

// INVALID_ARGUMENT becomes ValueError, everything else RuntimeError; the message is the library's.
void check(int status) {
  if (status == FLASHHOPPER_OK) return;
  if (status == FLASHHOPPER_INVALID_ARGUMENT) throw py::value_error(flashhopper_last_error());
  throw std::runtime_error(flashhopper_last_error());
}

flashhopper_tensor tensor(intptr_t data, int64_t batch_stride, int64_t row_stride, int64_t head_stride) {
  return {reinterpret_cast<void*>(data), batch_stride, row_stride, head_stride};
}

py::dict to_dict(flashhopper_forward_plan const& plan) {
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
  result["flops"] = plan.flops;
  result["bytes"] = plan.bytes;
  return result;
}

// The signature is python/flashhopper/_C.pyi; 31 positional numbers cost about a microsecond.
void forward(intptr_t q, intptr_t k, intptr_t v, intptr_t out, intptr_t lse, intptr_t workspace, int64_t q_batch_stride,
             int64_t q_row_stride, int64_t q_head_stride, int64_t k_batch_stride, int64_t k_row_stride,
             int64_t k_head_stride, int64_t v_batch_stride, int64_t v_row_stride, int64_t v_head_stride,
             int64_t out_batch_stride, int64_t out_row_stride, int64_t out_head_stride, int64_t batch, int64_t heads,
             int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v,
             int64_t window_left, int64_t window_right, double softmax_scale, int dtype, int sm_margin,
             intptr_t stream) {
  flashhopper_forward_params params{};
  params.q = tensor(q, q_batch_stride, q_row_stride, q_head_stride);
  params.k = tensor(k, k_batch_stride, k_row_stride, k_head_stride);
  params.v = tensor(v, v_batch_stride, v_row_stride, v_head_stride);
  params.out = tensor(out, out_batch_stride, out_row_stride, out_head_stride);
  params.lse = reinterpret_cast<float*>(lse);
  params.workspace = reinterpret_cast<void*>(workspace);
  params.batch = batch;
  params.heads = heads;
  params.kv_heads = kv_heads;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.head_dim = head_dim;
  params.head_dim_v = head_dim_v;
  params.window_left = window_left;
  params.window_right = window_right;
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.dtype = dtype;
  params.sm_margin = sm_margin;
  params.stream = reinterpret_cast<void*>(stream);
  int status;
  {
    py::gil_scoped_release release;  // a launch can block on a full queue
    status = flashhopper_forward(&params);
  }
  check(status);
}

py::dict forward_plan(int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k,
                      int64_t head_dim, int64_t head_dim_v, int64_t window_left, int64_t window_right, int dtype,
                      int sm_margin, int num_sms) {
  flashhopper_forward_params params{};
  params.batch = batch;
  params.heads = heads;
  params.kv_heads = kv_heads;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.head_dim = head_dim;
  params.head_dim_v = head_dim_v;
  params.window_left = window_left;
  params.window_right = window_right;
  params.softmax_scale = 1.f;  // plans do not depend on it
  params.dtype = dtype;
  params.sm_margin = sm_margin;
  flashhopper_forward_plan plan;
  check(flashhopper_forward_get_plan(&params, num_sms, &plan));
  return to_dict(plan);
}

py::list forward_configs() {
  py::list rows;
  flashhopper_forward_plan row;
  for (int i = 0; flashhopper_forward_get_config(i, &row) == FLASHHOPPER_OK; ++i) rows.append(to_dict(row));
  return rows;
}

py::dict environment() {
  flashhopper_environment found;
  check(flashhopper_get_environment(&found));
  py::dict result;
  result["version"] = found.version;
  result["cuda_runtime"] = found.cuda_runtime;
  result["cuda_driver"] = found.cuda_driver;
  result["device_count"] = found.device_count;
  result["tma_available"] = found.tma_available != 0;
  result["message"] = found.message;
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.attr("FP16") = static_cast<int>(FLASHHOPPER_FP16);
  module.attr("BF16") = static_cast<int>(FLASHHOPPER_BF16);
  module.def("version", [] { return flashhopper_version(); });
  module.def("environment", &environment);
  module.def("workspace_bytes", &flashhopper_workspace_bytes);
  module.def("forward_configs", &forward_configs);
  module.def("forward_plan", &forward_plan, py::arg("batch"), py::arg("heads"), py::arg("kv_heads"),
             py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("head_dim"), py::arg("head_dim_v"),
             py::arg("window_left"), py::arg("window_right"), py::arg("dtype"), py::arg("sm_margin"),
             py::arg("num_sms"));
  module.def("forward", &forward);  // positional: names would add to the cost of every call
}
