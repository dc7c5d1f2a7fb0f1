// What the 16-bit and the 8-bit forward dispatch share. Used by forward_dispatch.cpp and forward8_dispatch.cpp.
#pragma once

#include "core/config.hpp"
#include "forward/args.hpp"
#include "packed/args.hpp"
#include "problem.hpp"

namespace flashhopper {

// The arguments that depend on neither addresses nor the element type; and the grid.
flashhopper_status set_arguments(Problem const& p, ForwardConfig const& config, RowMap const& row_map, int num_sms,
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

// Where consumers write, which they do 16 bytes at a time.
flashhopper_status set_output(flashhopper_tensor const& out, Problem const& p, OutputTensor* output);

// Plans of a row alone and of a problem. kv_bytes, q_bytes: of one element of K and V, and of Q.
void describe(ForwardConfig const& config, flashhopper_plan* plan);
void describe_problem(Problem const& p, ForwardConfig const& config, ForwardArgs const& args, int grid,
                      flashhopper_plan* plan);

}  // namespace flashhopper
