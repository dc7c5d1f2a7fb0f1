// The Python module _C: plain integers and floats in, the C ABI's structs out. No torch header, no CUDA call.
// Before it: python/flashhopper/engine/hopper.py. After it: cpp/src/api.cpp.
#include "arguments.hpp"
#include "calls8.hpp"
#include "prepared_call.hpp"

using namespace flashhopper;

namespace {

// Plans do not depend on the scale.
py::dict forward_plan(Sizes const& sizes, int dtype, int sm_margin, int num_sms, Totals const& totals, int pack_gqa) {
  flashhopper_forward_params params{};
  set_problem(params, sizes, 1.0, dtype, sm_margin);
  params.pack_gqa = pack_gqa;
  set_totals(params, totals);
  flashhopper_plan plan;
  check(flashhopper_forward_get_plan(&params, num_sms, &plan));
  return to_dict(plan);
}

py::dict backward_plan(Sizes const& sizes, int dtype, int sm_margin, bool deterministic, int num_sms,
                       Totals const& totals) {
  flashhopper_backward_params params{};
  set_problem(params, sizes, 1.0, dtype, sm_margin);
  set_totals(params, totals);
  params.deterministic = deterministic;
  flashhopper_plan plan;
  check(flashhopper_backward_get_plan(&params, num_sms, &plan));
  return to_dict(plan);
}

// A forward with all options. addresses, 0 for what the call lacks: lse, workspace, sink, cu_seqlens_q, cu_seqlens_k,
// seqused_q, seqused_k, packed_workspace.
void forward(std::array<Tensor, 4> const& tensors, std::array<intptr_t, 8> const& addresses, Sizes const& sizes,
             Totals const& totals, double softmax_scale, double softcap, int dtype, int sm_margin, int pack_gqa,
             intptr_t stream) {
  flashhopper_forward_params params{};
  flashhopper_tensor* const targets[] = {&params.q, &params.k, &params.v, &params.out};
  for (size_t i = 0; i < tensors.size(); ++i) *targets[i] = to_tensor(tensors[i]);
  params.lse = reinterpret_cast<float*>(addresses[0]);
  params.workspace = reinterpret_cast<void*>(addresses[1]);
  params.sink = reinterpret_cast<float const*>(addresses[2]);
  set_packing(params, &addresses[3], totals);
  params.packed_workspace = reinterpret_cast<void*>(addresses[7]);
  set_problem(params, sizes, softmax_scale, dtype, sm_margin);
  params.softcap = static_cast<float>(softcap);
  params.pack_gqa = pack_gqa;
  params.stream = reinterpret_cast<void*>(stream);
  run(flashhopper_forward, params);
}

// addresses, 0 for what the call lacks: lse, dlse, sink, dsink, workspace, cu_seqlens_q, cu_seqlens_k, seqused_q,
// seqused_k.
void backward(std::array<Tensor, 8> const& tensors, std::array<intptr_t, 9> const& addresses, Sizes const& sizes,
              Totals const& totals, double softmax_scale, double softcap, int dtype, int sm_margin, bool deterministic,
              intptr_t stream) {
  flashhopper_backward_params params{};
  flashhopper_tensor* const targets[] = {&params.q,    &params.k,  &params.v,  &params.out,
                                         &params.dout, &params.dq, &params.dk, &params.dv};
  for (size_t i = 0; i < tensors.size(); ++i) *targets[i] = to_tensor(tensors[i]);
  params.lse = reinterpret_cast<float const*>(addresses[0]);
  params.dlse = reinterpret_cast<float const*>(addresses[1]);
  params.sink = reinterpret_cast<float const*>(addresses[2]);
  params.dsink = reinterpret_cast<float*>(addresses[3]);
  params.workspace = reinterpret_cast<void*>(addresses[4]);
  set_packing(params, &addresses[5], totals);
  set_problem(params, sizes, softmax_scale, dtype, sm_margin);
  params.softcap = static_cast<float>(softcap);
  params.deterministic = deterministic;
  params.stream = reinterpret_cast<void*>(stream);
  run(flashhopper_backward, params);
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
             py::arg("num_sms"), py::arg("totals") = Totals{0, 0}, py::arg("pack_gqa") = -1);
  module.def("forward", &forward);
  module.def("backward_plan", &backward_plan, py::arg("sizes"), py::arg("dtype"), py::arg("sm_margin"),
             py::arg("deterministic"), py::arg("num_sms"), py::arg("totals") = Totals{0, 0});
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
