// Dense forward calls that are made again and again: all but addresses is bound once, and a builtin function makes the
// call. Before it: python/flashhopper/engine/hopper.py, which remembers them by their layouts. After it:
// cpp/src/api.cpp.
#pragma once

#include <memory>

#include "arguments.hpp"
#include "layout_key.hpp"

namespace flashhopper {

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef fastcall(char const* name, FastCall function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

// A builtin function whose first argument is self; it keeps self alive.
inline py::object bind(PyMethodDef* method, py::object const& self) {
  PyObject* const function = PyCFunction_New(method, self.ptr());
  if (function == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

// The addresses of a call and its stream, in the order of ForwardCall in python/flashhopper/_C.pyi.
enum { kQ, kK, kV, kOut, kLse, kWorkspace, kStream, kCallArguments };
inline constexpr char kParamsName[] = "flashhopper_forward_params";

// Makes the call that prepare_forward bound to these parameters. Raw CPython: pybind11's dispatch and 26 more numbers
// would cost as much as everything else that the host does between the call from Python and the launch.
inline PyObject* call_forward(PyObject* prepared, PyObject* const* arguments, Py_ssize_t count) {
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
inline py::object prepare_forward(int64_t q_batch_stride, int64_t q_row_stride, int64_t q_head_stride,
                                  int64_t k_batch_stride, int64_t k_row_stride, int64_t k_head_stride,
                                  int64_t v_batch_stride, int64_t v_row_stride, int64_t v_head_stride,
                                  int64_t out_batch_stride, int64_t out_row_stride, int64_t out_head_stride,
                                  int64_t batch, int64_t heads, int64_t kv_heads, int64_t seqlen_q, int64_t seqlen_k,
                                  int64_t head_dim, int64_t head_dim_v, int64_t window_left, int64_t window_right,
                                  double softmax_scale, int dtype, int sm_margin, int pack_gqa) {
  auto params = std::make_unique<flashhopper_forward_params>();
  params->q = {nullptr, q_batch_stride, q_row_stride, q_head_stride};
  params->k = {nullptr, k_batch_stride, k_row_stride, k_head_stride};
  params->v = {nullptr, v_batch_stride, v_row_stride, v_head_stride};
  params->out = {nullptr, out_batch_stride, out_row_stride, out_head_stride};
  set_problem(*params, {batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left, window_right},
              softmax_scale, dtype, sm_margin);
  params->pack_gqa = pack_gqa;
  py::capsule prepared(params.get(), kParamsName, [](PyObject* capsule) {
    delete static_cast<flashhopper_forward_params*>(PyCapsule_GetPointer(capsule, kParamsName));
  });
  params.release();
  static PyMethodDef method = fastcall("forward_call", &call_forward);
  return bind(&method, prepared);
}

// read_layouts through torch.Tensor's exchange table; None where this is not a table that it can read.
inline py::object layout_reader(py::object const& capsule) {
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsuleName)) return py::none();
  auto const* api = static_cast<dlpack::ExchangeApi const*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api->version.major != 1) return py::none();
  static PyMethodDef method = fastcall("read_layouts", &read_layouts);
  return bind(&method, capsule);
}

}  // namespace flashhopper
