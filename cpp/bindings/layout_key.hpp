// Shapes, strides, dtypes and devices of three tensors as one bytes object, which Python uses as a dictionary key.
// Before it: python/flashhopper/ops.py (call_key). After it: nothing.
//
// Asking torch from Python for each of them costs more than the rest of a repeated call. torch gives them to C through
// the exchange table of DLPack 1 (https://dmlc.github.io/dlpack), without a header of torch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

namespace flashhopper {

// The part of DLPack's ABI that is read here; the names are those of its specification.
namespace dlpack {

struct Tensor {  // DLTensor
  void* data;
  struct {
    int32_t device_type, device_id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t const *shape, *strides;
  uint64_t byte_offset;
};

struct ExchangeApi {  // DLPackExchangeAPI
  struct {
    uint32_t major, minor;
  } version;
  void* prev_api;
  void (*managed_tensor_functions[3])();
  int (*dltensor_from_py_object_no_sync)(void* py_object, Tensor* out);  // borrows shape and strides from py_object
  // current_work_stream and what later minor versions append
};

constexpr char kCapsuleName[] = "dlpack_exchange_api";

}  // namespace dlpack

struct Layout {
  int64_t shape[4], strides[4];
  int32_t device_type, device_id;
  uint32_t code, bits, lanes, unused;
};

// (q, k, v), exactly torch.Tensors, to bytes; None for what has another rank or is no strided tensor.
inline PyObject* read_layouts(PyObject* capsule, PyObject* const* tensors, Py_ssize_t count) {
  constexpr int kTensors = 3;
  if (count != kTensors) return PyErr_Format(PyExc_TypeError, "layouts of 3 tensors are read, got %zd", count);
  auto const* api = static_cast<dlpack::ExchangeApi const*>(PyCapsule_GetPointer(capsule, dlpack::kCapsuleName));
  Layout layouts[kTensors]{};
  for (int i = 0; i < kTensors; ++i) {
    dlpack::Tensor tensor{};
    if (api->dltensor_from_py_object_no_sync(tensors[i], &tensor) != 0) {
      PyErr_Clear();
      Py_RETURN_NONE;
    }
    if (tensor.ndim != 4 || tensor.strides == nullptr) Py_RETURN_NONE;
    std::memcpy(layouts[i].shape, tensor.shape, sizeof(Layout::shape));
    std::memcpy(layouts[i].strides, tensor.strides, sizeof(Layout::strides));
    layouts[i].device_type = tensor.device.device_type;
    layouts[i].device_id = tensor.device.device_id;
    layouts[i].code = tensor.dtype.code;
    layouts[i].bits = tensor.dtype.bits;
    layouts[i].lanes = tensor.dtype.lanes;
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<char const*>(layouts), sizeof(layouts));
}

}  // namespace flashhopper
