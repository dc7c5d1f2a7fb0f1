// From runtime values to a launch: checks, config row, plan, tensor maps. Used by api.cpp.
#pragma once

#include "core/check.hpp"

namespace flashhopper {

// Fills the plan of a problem; FLASHHOPPER_UNSUPPORTED names what no row of the table computes.
flashhopper_status plan_forward(flashhopper_forward_params const& params, int num_sms, flashhopper_plan* plan);
flashhopper_status plan_forward8(flashhopper_forward8_params const& params, int num_sms, flashhopper_plan* plan);
flashhopper_status plan_backward(flashhopper_backward_params const& params, int num_sms, flashhopper_plan* plan);

// The index-th row of a config table that this build has a kernel for, as a plan without a problem.
flashhopper_status describe_forward_config(int index, flashhopper_plan* plan);
flashhopper_status describe_forward8_config(int index, flashhopper_plan* plan);
flashhopper_status describe_backward_config(int index, flashhopper_plan* plan);

flashhopper_status dispatch_forward(flashhopper_forward_params const& params);
flashhopper_status dispatch_forward8(flashhopper_forward8_params const& params);
flashhopper_status dispatch_backward(flashhopper_backward_params const& params);
flashhopper_status dispatch_quantize(flashhopper_quantize_params const& params);
flashhopper_status dispatch_transpose_values(flashhopper_quantize_params const& params);

}  // namespace flashhopper
