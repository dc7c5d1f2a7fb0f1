// Issues one tile GEMM as a batch of asynchronous wgmma instructions; the caller waits with warpgroup_wait.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "core/platform.hpp"

namespace flashhopper {

enum class Accumulate { kFresh, kAdd };

// Gives the registers of an accumulator new, unknown values without an instruction. What they held is then dead: wgmma
// names its accumulator as an input even where it ignores it, which would keep the old values alive up to there.
template <class Accumulator>
FLASHHOPPER_DEVICE void forget(Accumulator& accumulator) {
  auto registers = cute::recast<uint32_t>(accumulator);
  FLASHHOPPER_UNROLL
  for (int i = 0; i < cute::size(registers); ++i) asm volatile("" : "=r"(registers(i)));
}

// accumulator (+)= a b^T over the K blocks of the fragments. The accumulator and a register operand a must not be
// touched before the wait; the fences keep the compiler from moving their reads and writes into the asynchronous
// window.
template <Accumulate kMode, class TiledMma, class FragmentA, class FragmentB, class Accumulator>
FLASHHOPPER_DEVICE void issue_gemm(TiledMma& mma, FragmentA const& a, FragmentB const& b, Accumulator& accumulator) {
  constexpr bool kRegisterA = !cute::is_base_of_v<cute::GMMA::DescriptorIterator, typename TiledMma::FrgTypeA>;
  if constexpr (kRegisterA) cute::warpgroup_fence_operand(const_cast<FragmentA&>(a));
  if constexpr (kMode == Accumulate::kFresh) {
    forget(accumulator);
  } else {
    cute::warpgroup_fence_operand(accumulator);
  }
  cute::warpgroup_arrive();
  if constexpr (kMode == Accumulate::kFresh) mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
  FLASHHOPPER_UNROLL
  for (int k = 0; k < cute::size<2>(a); ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), accumulator);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_fence_operand(accumulator);
  if constexpr (kRegisterA) cute::warpgroup_fence_operand(const_cast<FragmentA&>(a));
}

}  // namespace flashhopper
