// The Python module _C: plain integers and floats in, the C ABI's structs out. No torch header, no CUDA call.
// Before it: python/flashhopper/engine/hopper.py. After it: cpp/src/api.cpp.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>

#include "flashhopper/flashhopper.h"
#include "layout_key.hpp"

namespace py = pybind11;
using namespace flashhopper;

namespace {

// INVALID_ARGUMENT becomes ValueError, everything else RuntimeError; the message is the library's.
PyObject* exception_type(int status) {
  return status == FLASHHOPPER_INVALID_ARGUMENT ? PyExc_ValueError : PyExc_RuntimeError;
}

void check(int status) {
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

py::dict to_dict(flashhopper_plan const& plan) {
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

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef fastcall(char const* name, FastCall function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

// A builtin function whose first argument is self; it keeps self alive.
py::object bind(PyMethodDef* method, py::object const& self) {
  PyObject* const function = PyCFunction_New(method, self.ptr());
  if (function == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

// The addresses of a call and its stream, in the order of ForwardCall in python/flashhopper/_C.pyi.
enum { kQ, kK, kV, kOut, kLse, kWorkspace, kStream, kCallArguments };
constexpr char kParamsName[] = "flashhopper_forward_params";

// Makes the call that prepare_forward bound to these parameters. Raw CPython: pybind11's dispatch and 26 more numbers
// would cost as much as everything else that the host does between the call from Python and the launch.
PyObject* call_forward(PyObject* prepared, PyObject* const* arguments, Py_ssize_t count) {
  if (count != kCallArguments) {
    return PyErr_Format(PyExc_TypeError, "a forward call takes %d integers, got %zd", int{kCallArguments}, count);
  }
  void* addresses[kCallArguments];
  for (int i = 0; i < kCallArguments; ++i) {
    addresses[i] = PyLong_AsVoidPtr(arguments[i]);
    if (addresses[i] == nullptr && PyErr_Occurred()) return nullptr;
  }
  // A copy: threads may make the same call at once.
  auto params = *static_cast<flashhopper_forward_params const*>(PyCapsule_GetPointer(prepared, kParamsName));
  params.q.data = addresses[kQ];
  params.k.data = addresses[kK];
  params.v.data = addresses[kV];
  params.out.data = addresses[kOut];
  params.lse = static_cast<float*>(addresses[kLse]);
  params.workspace = addresses[kWorkspace];
  params.stream = addresses[kStream];
  int status;
  Py_BEGIN_ALLOW_THREADS;  // a launch can block on a full queue
  status = flashhopper_forward(&params);
  Py_END_ALLOW_THREADS;
  if (status == FLASHHOPPER_OK) Py_RETURN_NONE;
  PyErr_SetString(exception_type(status), flashhopper_last_error());
  return nullptr;
}

// A builtin function that holds everything of a forward call but its addresses and its stream.
py::object prepare_forward(int64_t q_batch_stride, int64_t q_row_stride, int64_t q_head_stride, int64_t k_batch_stride,
                           int64_t k_row_stride, int64_t k_head_stride, int64_t v_batch_stride, int64_t v_row_stride,
                           int64_t v_head_stride, int64_t out_batch_stride, int64_t out_row_stride,
                           int64_t out_head_stride, int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q,
                           int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v, int64_t window_left,
                           int64_t window_right, double softmax_scale, int dtype, int sm_margin, int pack_gqa) {
  auto params = std::make_unique<flashhopper_forward_params>();
  params->q = {nullptr, q_batch_stride, q_row_stride, q_head_stride};
  params->k = {nullptr, k_batch_stride, k_row_stride, k_head_stride};
  params->v = {nullptr, v_batch_stride, v_row_stride, v_head_stride};
  params->out = {nullptr, out_batch_stride, out_row_stride, out_head_stride};
  params->batch = batch;
  params->heads = heads;
  params->kv_heads = kv_heads;
  params->seqlen_q = seqlen_q;
  params->seqlen_k = seqlen_k;
  params->head_dim = head_dim;
  params->head_dim_v = head_dim_v;
  params->window_left = window_left;
  params->window_right = window_right;
  params->softmax_scale = static_cast<float>(softmax_scale);
  params->dtype = dtype;
  params->sm_margin = sm_margin;
  params->pack_gqa = pack_gqa;
  py::capsule prepared(params.get(), kParamsName, [](PyObject* capsule) {
    delete static_cast<flashhopper_forward_params*>(PyCapsule_GetPointer(capsule, kParamsName));
  });
  params.release();
  static PyMethodDef method = fastcall("forward_call", &call_forward);
  return bind(&method, prepared);
}

// read_layouts through torch.Tensor's exchange table; None where this is not a table that it can read.
py::object layout_reader(py::object const& capsule) {
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)) return py::none();
  auto const* api = static_cast<dlpack::ExchangeApi const*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api->version.major != 1) return py::none();
  static PyMethodDef method = fastcall("read_layouts", &read_layouts);
  return bind(&method, capsule);
}

// batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left, window_right
using Sizes = std::array<int64_t, 9>;

template <class Params>
void set_problem(Params& params, Sizes const& sizes, double softmax_scale, int dtype, int sm_margin) {
  params.batch = sizes[0];
  params.heads = sizes[1];
  params.kv_heads = sizes[2];
  params.seqlen_q = sizes[3];
  params.seqlen_k = sizes[4];
  params.head_dim = sizes[5];
  params.head_dim_v = sizes[6];
  params.window_left = sizes[7];
  params.window_right = sizes[8];
  params.softmax_scale = static_cast<float>(softmax_scale);
  params.dtype = dtype;
  params.sm_margin = sm_margin;
}

// Plans do not depend on the scale. totals: rows of q and k of a packed batch, {0, 0} for a dense one.
py::dict forward_plan(Sizes const& sizes, int dtype, int sm_margin, int num_sms, std::array<int64_t, 2> const& totals,
                      int pack_gqa) {
  flashhopper_forward_params params{};
  set_problem(params, sizes, 1.0, dtype, sm_margin);
  params.pack_gqa = pack_gqa;
  params.total_q = totals[0];
  params.total_k = totals[1];
  static int32_t const some_offsets = 0;  // that there are any makes the batch packed; plans do not read them
  if (params.total_q > 0) params.cu_seqlens_q = params.cu_seqlens_k = &some_offsets;
  flashhopper_plan plan;
  check(flashhopper_forward_get_plan(&params, num_sms, &plan));
  return to_dict(plan);
}

// totals: rows of q and k of a packed batch, {0, 0} for a dense one.
py::dict backward_plan(Sizes const& sizes, int dtype, int sm_margin, bool deterministic, int num_sms,
                       std::array<int64_t, 2> const& totals) {
  flashhopper_backward_params params{};
  set_problem(params, sizes, 1.0, dtype, sm_margin);
  params.total_q = totals[0];
  params.total_k = totals[1];
  static int32_t const some_offsets = 0;  // that there are any makes the batch packed; plans do not read them
  if (params.total_q > 0) params.cu_seqlens_q = params.cu_seqlens_k = &some_offsets;
  params.deterministic = deterministic;
  flashhopper_plan plan;
  check(flashhopper_backward_get_plan(&params, num_sms, &plan));
  return to_dict(plan);
}

// Address, batch stride, row stride, head stride.
using Tensor = std::array<int64_t, 4>;

// A forward with all options. addresses, 0 for what the call lacks: lse, workspace, sink, cu_seqlens_q, cu_seqlens_k,
// seqused_q, seqused_k, packed_workspace. totals as in forward_plan.
void forward(std::array<Tensor, 4> const& tensors, std::array<intptr_t, 8> const& addresses, Sizes const& sizes,
             std::array<int64_t, 2> const& totals, double softmax_scale, double softcap, int dtype, int sm_margin,
             int pack_gqa, intptr_t stream) {
  flashhopper_forward_params params{};
  flashhopper_tensor* const targets[] = {&params.q, &params.k, &params.v, &params.out};
  for (size_t i = 0; i < tensors.size(); ++i) {
    *targets[i] = {reinterpret_cast<void*>(tensors[i][0]), tensors[i][1], tensors[i][2], tensors[i][3]};
  }
  auto const integers = [&](size_t i) { return reinterpret_cast<int32_t const*>(addresses[i]); };
  params.lse = reinterpret_cast<float*>(addresses[0]);
  params.workspace = reinterpret_cast<void*>(addresses[1]);
  params.sink = reinterpret_cast<float const*>(addresses[2]);
  params.cu_seqlens_q = integers(3);
  params.cu_seqlens_k = integers(4);
  params.seqused_q = integers(5);
  params.seqused_k = integers(6);
  params.packed_workspace = reinterpret_cast<void*>(addresses[7]);
  set_problem(params, sizes, softmax_scale, dtype, sm_margin);
  params.total_q = totals[0];
  params.total_k = totals[1];
  params.softcap = static_cast<float>(softcap);
  params.pack_gqa = pack_gqa;
  params.stream = reinterpret_cast<void*>(stream);
  run(flashhopper_forward, params);
}

// addresses, 0 for what the call lacks: lse, dlse, sink, dsink, workspace, cu_seqlens_q, cu_seqlens_k, seqused_q,
// seqused_k. totals as in backward_plan.
void backward(std::array<Tensor, 8> const& tensors, std::array<intptr_t, 9> const& addresses, Sizes const& sizes,
              std::array<int64_t, 2> const& totals, double softmax_scale, double softcap, int dtype, int sm_margin,
              bool deterministic, intptr_t stream) {
  flashhopper_backward_params params{};
  flashhopper_tensor* const targets[] = {&params.q,    &params.k,  &params.v,  &params.out,
                                         &params.dout, &params.dq, &params.dk, &params.dv};
  for (size_t i = 0; i < tensors.size(); ++i) {
    *targets[i] = {reinterpret_cast<void*>(tensors[i][0]), tensors[i][1], tensors[i][2], tensors[i][3]};
  }
  auto const integers = [&](size_t i) { return reinterpret_cast<int32_t const*>(addresses[i]); };
  params.lse = reinterpret_cast<float const*>(addresses[0]);
  params.dlse = reinterpret_cast<float const*>(addresses[1]);
  params.sink = reinterpret_cast<float const*>(addresses[2]);
  params.dsink = reinterpret_cast<float*>(addresses[3]);
  params.workspace = reinterpret_cast<void*>(addresses[4]);
  params.cu_seqlens_q = integers(5);
  params.cu_seqlens_k = integers(6);
  params.seqused_q = integers(7);
  params.seqused_k = integers(8);
  params.total_q = totals[0];
  params.total_k = totals[1];
  set_problem(params, sizes, softmax_scale, dtype, sm_margin);
  params.softcap = static_cast<float>(softcap);
  params.deterministic = deterministic;
  params.stream = reinterpret_cast<void*>(stream);
  run(flashhopper_backward, params);
}

// Of a packed batch, all 0 in a dense one: addresses of cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k and, for
// attention, packed_workspace; rows of q and k.
using Offsets = std::array<intptr_t, 5>;
using Totals = std::array<int64_t, 2>;

template <class Params>
void set_packing(Params& params, Offsets const& offsets, Totals const& totals) {
  int32_t const** const targets[] = {&params.cu_seqlens_q, &params.cu_seqlens_k, &params.seqused_q, &params.seqused_k};
  for (size_t i = 0; i < 4; ++i) *targets[i] = reinterpret_cast<int32_t const*>(offsets[i]);
  params.total_q = totals[0];
  params.total_k = totals[1];
}

// Flags of quantize; engine/hopper_quantize.py has them too.
enum { kRotate = 1, kSmoothK = 2, kCenterV = 4 };

// outputs: addresses of q8, k8, v8, q_scale, k_scale, v_scale, lse_shift, k_mean, v_mean.
void quantize(std::array<Tensor, 3> const& tensors, std::array<intptr_t, 9> const& outputs, intptr_t signs,
              Sizes const& sizes, std::array<int64_t, 2> const& columns, int dtype, int format, int flags, int q_block,
              Offsets const& offsets, Totals const& totals, intptr_t stream) {
  flashhopper_quantize_params params{};
  flashhopper_tensor* const targets[] = {&params.q, &params.k, &params.v};
  for (size_t i = 0; i < tensors.size(); ++i) {
    *targets[i] = {reinterpret_cast<void*>(tensors[i][0]), tensors[i][1], tensors[i][2], tensors[i][3]};
  }
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
  params.batch = sizes[0];
  params.heads = sizes[1];
  params.kv_heads = sizes[2];
  params.seqlen_q = sizes[3];
  params.seqlen_k = sizes[4];
  params.head_dim = sizes[5];
  params.head_dim_v = sizes[6];
  params.columns = columns[0];
  params.columns_v = columns[1];
  params.q_block = q_block;
  params.dtype = dtype;
  params.format = format;
  set_packing(params, offsets, totals);
  params.stream = reinterpret_cast<void*>(stream);
  run(flashhopper_quantize, params);
}

void transpose_values(Tensor const& v, intptr_t v8, int64_t batch, int64_t kv_heads, int64_t seqlen_k,
                      int64_t head_dim_v, intptr_t stream) {
  flashhopper_quantize_params params{};
  params.v = {reinterpret_cast<void*>(v[0]), v[1], v[2], v[3]};
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
void forward8(std::array<intptr_t, 8> const& addresses, Tensor const& out, intptr_t lse, intptr_t workspace,
              Sizes const& sizes, std::array<int64_t, 2> const& columns, int64_t keys,
              std::array<int64_t, 3> const& blocks, int format, int dtype, double softmax_scale, int sm_margin,
              Offsets const& offsets, Totals const& totals, intptr_t stream) {
  flashhopper_forward8_params params{};
  set_problem(params, sizes, softmax_scale, dtype, sm_margin);
  params.columns = columns[0];
  params.columns_v = columns[1];
  params.keys = keys;
  set_packing(params, offsets, totals);
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
  params.out = {reinterpret_cast<void*>(out[0]), out[1], out[2], out[3]};
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

py::dict forward8_plan(Sizes const& sizes, int format, int dtype, int sm_margin, int num_sms) {
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

template <class GetConfig>
py::list configs(GetConfig const& get_config) {
  py::list rows;
  flashhopper_plan row;
  for (int i = 0; get_config(i, &row) == FLASHHOPPER_OK; ++i) rows.append(to_dict(row));
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
  module.attr("E4M3") = static_cast<int>(FLASHHOPPER_E4M3);
  module.attr("INT8") = static_cast<int>(FLASHHOPPER_INT8);
  module.def("version", [] { return flashhopper_version(); });
  module.def("environment", &environment);
  module.def("workspace_bytes", &flashhopper_workspace_bytes);
  module.def("forward_configs", [] { return configs(flashhopper_forward_get_config); });
  module.def("backward_configs", [] { return configs(flashhopper_backward_get_config); });
  module.def("packed_workspace_bytes", &flashhopper_packed_workspace_bytes, py::arg("batch"), py::arg("total_q"));
  module.def("forward_plan", &forward_plan, py::arg("sizes"), py::arg("dtype"), py::arg("sm_margin"),
             py::arg("num_sms"), py::arg("totals") = std::array<int64_t, 2>{0, 0}, py::arg("pack_gqa") = -1);
  module.def("forward", &forward);
  module.def("backward_plan", &backward_plan, py::arg("sizes"), py::arg("dtype"), py::arg("sm_margin"),
             py::arg("deterministic"), py::arg("num_sms"), py::arg("totals") = std::array<int64_t, 2>{0, 0});
  module.def("backward", &backward);
  module.def("quantize", &quantize);
  module.def("transpose_values", &transpose_values);
  module.def("forward8_configs", [] { return configs(flashhopper_forward8_get_config); });
  module.def("forward8_plan", &forward8_plan, py::arg("sizes"), py::arg("format"), py::arg("dtype"),
             py::arg("sm_margin"), py::arg("num_sms"));
  module.def("forward8", &forward8);
  module.def("prepare_forward", &prepare_forward);
  module.def("layout_reader", &layout_reader);
}
