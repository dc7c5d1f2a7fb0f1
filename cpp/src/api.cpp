// The C ABI: thin wrappers that keep exceptions and C++ types inside the library.
// Before it: cpp/bindings/module.cpp. After it: forward_dispatch.cpp, backward_dispatch.cpp,
// quantize_dispatch.cpp.
#include <cuda_runtime.h>

#include <cstdio>
#include <exception>

#include "core/check.hpp"
#include "core/config.hpp"
#include "dispatch.hpp"
#include "packed/args.hpp"
#include "tensor_map.hpp"

namespace flashhopper {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

namespace {

template <class Call>
int guarded(Call&& call) {
  try {
    return call();
  } catch (std::exception const& error) {
    return set_error(FLASHHOPPER_CUDA_ERROR, "host failure: ", error.what());
  }
}

}  // namespace
}  // namespace flashhopper

using namespace flashhopper;

char const* flashhopper_version(void) { return FLASHHOPPER_VERSION; }

char const* flashhopper_last_error(void) { return last_error().c_str(); }

int64_t flashhopper_workspace_bytes(void) { return 2 * sizeof(int); }

int64_t flashhopper_packed_workspace_bytes(int64_t batch, int64_t total_q) {
  return list_bytes(most_packed_blocks(batch, total_q, kWarpgroupRows));  // no config has smaller tiles
}

int flashhopper_get_environment(flashhopper_environment* environment) {
  return guarded([&] {
    *environment = {};
    environment->version = FLASHHOPPER_VERSION;
    environment->cuda_runtime = CUDART_VERSION;
    auto const explain = [&](char const* text) {
      std::snprintf(environment->message, sizeof(environment->message), "%s", text);
    };
    cudaError_t error = cudaDriverGetVersion(&environment->cuda_driver);
    if (error == cudaSuccess && environment->cuda_driver == 0) {
      explain("no NVIDIA driver");
      return FLASHHOPPER_OK;
    }
    if (error == cudaSuccess) error = cudaGetDeviceCount(&environment->device_count);
    if (error != cudaSuccess) {
      environment->device_count = 0;
      explain(cudaGetErrorString(error));
      cudaGetLastError();  // a later launch must not find this error
      return FLASHHOPPER_OK;
    }
    environment->tma_available = require_tma() == FLASHHOPPER_OK;
    if (!environment->tma_available) explain(last_error().c_str());
    return FLASHHOPPER_OK;
  });
}

int flashhopper_forward(flashhopper_forward_params const* params) {
  return guarded([&] { return dispatch_forward(*params); });
}

int flashhopper_forward_get_plan(flashhopper_forward_params const* params, int num_sms, flashhopper_plan* plan) {
  return guarded([&] { return plan_forward(*params, num_sms, plan); });
}

int flashhopper_forward_get_config(int index, flashhopper_plan* row) {
  return guarded([&] { return describe_forward_config(index, row); });
}

int flashhopper_forward8(flashhopper_forward8_params const* params) {
  return guarded([&] { return dispatch_forward8(*params); });
}

int flashhopper_forward8_get_plan(flashhopper_forward8_params const* params, int num_sms, flashhopper_plan* plan) {
  return guarded([&] { return plan_forward8(*params, num_sms, plan); });
}

int flashhopper_forward8_get_config(int index, flashhopper_plan* row) {
  return guarded([&] { return describe_forward8_config(index, row); });
}

int flashhopper_backward(flashhopper_backward_params const* params) {
  return guarded([&] { return dispatch_backward(*params); });
}

int flashhopper_backward_get_plan(flashhopper_backward_params const* params, int num_sms, flashhopper_plan* plan) {
  return guarded([&] { return plan_backward(*params, num_sms, plan); });
}

int flashhopper_backward_get_config(int index, flashhopper_plan* row) {
  return guarded([&] { return describe_backward_config(index, row); });
}

int flashhopper_quantize(flashhopper_quantize_params const* params) {
  return guarded([&] { return dispatch_quantize(*params); });
}

int flashhopper_transpose_values(flashhopper_quantize_params const* params) {
  return guarded([&] { return dispatch_transpose_values(*params); });
}
