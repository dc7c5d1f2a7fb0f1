// The end of a work tile: log-sum-exp to device memory, normalised output to the shared-memory slot that TMA stores
// from. Before it: consumer.hpp. After it: the query-output warps of producer.hpp.
#pragma once

#include <cute/atom/copy_atom.hpp>
#include <cute/tensor.hpp>

#include "core/softmax.hpp"
#include "forward/args.hpp"
#include "forward/traits.hpp"

namespace flashhopper {

// lse: (batch, heads, seqlen_q). One thread of each quad writes its two rows.
FLASHHOPPER_DEVICE void store_lse(ForwardArgs const& args, Tile const& tile, float const (&lse)[kRowsPerThread],
                                  int first_row, int lane) {
  if (lane % 4 != 0) return;
  int64_t const offset = (int64_t{tile.batch} * args.schedule.heads + tile.head) * args.mask.seqlen_q;
  FLASHHOPPER_UNROLL
  for (int r = 0; r < kRowsPerThread; ++r) {
    int const row = first_row + 8 * r;
    if (row < args.mask.seqlen_q) args.lse[offset + row] = lse[r];
  }
}

// Converts the fp32 accumulator and writes it with stmatrix in the layout that the TMA store of `out` expects.
template <class Traits, class Accumulator, class TiledMma>
FLASHHOPPER_DEVICE void stage_output(Accumulator const& tOrO, TiledMma const& mma_pv, typename Traits::Element* smem,
                                     int thread) {
  using namespace cute;
  using Element = typename Traits::Element;
  Tensor sO = make_tensor(make_smem_ptr(smem), typename Traits::LayoutO{})(_, _, _0{});  // (64, head_dim_v)
  Tensor rO = make_tensor<Element>(tOrO.layout());
  FLASHHOPPER_UNROLL
  for (int e = 0; e < size(rO); ++e) rO(e) = static_cast<Element>(tOrO(e));
  auto thread_copy = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma_pv).get_slice(thread);
  copy(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, thread_copy.retile_S(rO), thread_copy.partition_D(sO));
}

}  // namespace flashhopper
