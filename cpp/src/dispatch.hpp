// From runtime values to a launch: checks, config row, plan, tensor maps. Used by api.cpp.
#pragma once

#include "core/check.hpp"
#include "core/config.hpp"

namespace flashhopper {

// Fills the plan of a problem whose sizes are valid; FLASHHOPPER_UNSUPPORTED names what no row of the table computes.
flashhopper_status plan_forward(flashhopper_forward_params const& params, int num_sms, flashhopper_forward_plan* plan);

// The row of the config table as a plan without a problem.
void describe_config(ForwardConfig const& config, flashhopper_forward_plan* plan);

flashhopper_status dispatch_forward(flashhopper_forward_params const& params);

}  // namespace flashhopper
