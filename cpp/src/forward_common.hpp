// What the 16-bit and the 8-bit forward dispatch share. Used by forward_dispatch.cpp and forward8_dispatch.cpp.
#pragma once

#include "core/config.hpp"
#include "forward/args.hpp"
#include "instances.hpp"
#include "packed/args.hpp"
#include "problem.hpp"

namespace flashhopper {

// A forward call but for what takes q, k, v and out: their tensor maps and addresses.
template <class Args>
struct Launch {
  int config_index;
  int grid;
  Args args;
  ListArgs list;  // of a packed batch
};

// The arguments that depend on neither addresses nor the element type; and the grid.
flashhopper_status set_problem(Problem const& p, ForwardConfig const& config, RowMap const& row_map, int num_sms,
                               ForwardArgs* args, int* grid);

// The list of a packed batch's query blocks, in packed_workspace.
template <class Params>
ListArgs make_list(Params const& p, int tile) {
  auto const rows = [](int32_t const* cu_seqlens, int32_t const* seqused, int64_t total) {
    return PackedRows{cu_seqlens, seqused, static_cast<int>(total)};
  };
  char* const memory = static_cast<char*>(p.packed_workspace);
  return {rows(p.cu_seqlens_q, p.seqused_q, p.total_q),
          rows(p.cu_seqlens_k, p.seqused_k, p.total_k),
          static_cast<int>(p.batch),
          tile,
          false,
          static_cast<int>(most_packed_blocks(p.batch, p.total_q, tile)),
          reinterpret_cast<int*>(memory),
          reinterpret_cast<PackedBlock*>(memory + kListHeaderBytes)};
}

// What 16 and 8 bits take alike.
template <class Params, class Args>
flashhopper_status set_arguments(Params const& params, ForwardConfig const& config, RowMap const& row_map, int num_sms,
                                 Launch<Args>* launch) {
  Problem const p(params);
  ForwardArgs& args = launch->args;
  FLASHHOPPER_RETURN_IF_ERROR(set_problem(p, config, row_map, num_sms, &args, &launch->grid));
  args.lse.data = params.lse;
  args.workspace = static_cast<int*>(params.workspace);
  if (!p.is_packed) return FLASHHOPPER_OK;
  launch->list = make_list(params, args.schedule.tile);
  args.schedule.list = launch->list.blocks;
  args.schedule.list_size = launch->list.size;
  return FLASHHOPPER_OK;
}

// Where consumers write, which they do 16 bytes at a time.
flashhopper_status set_output(flashhopper_tensor const& out, Problem const& p, OutputTensor* output);

// Plans of a row alone and of a problem.
void describe(ForwardConfig const& config, flashhopper_plan* plan);
void describe_problem(Problem const& p, ForwardConfig const& config, ForwardArgs const& args, int grid,
                      flashhopper_plan* plan);

// The launch itself, of a packed batch behind that of its list.
template <class Params, class Args>
flashhopper_status start_forward(Params const& p, ForwardConfig const& config, Launch<Args> const& launch,
                                 LaunchFunction<Args> run, int device) {
  auto const stream = static_cast<cudaStream_t>(p.stream);
  if (p.cu_seqlens_q != nullptr) {
    cudaError_t const error = launch_list_blocks(launch.list, device, stream);
    if (error != cudaSuccess) return cuda_error("launching list_blocks_kernel", error);
  }
  cudaError_t const error = run(launch.args, launch.grid, device, stream);
  if (error == cudaSuccess) return FLASHHOPPER_OK;
  flashhopper_plan plan;
  describe(config, &plan);
  plan.grid = launch.grid;
  return launch_error(plan, error);
}

}  // namespace flashhopper
