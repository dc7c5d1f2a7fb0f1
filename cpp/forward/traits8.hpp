// Types of one 8-bit forward kernel: what differs from traits.hpp. Q and K are e4m3 or int8, P and V e4m3.
// Before it: core/config8.hpp. After it: storage.hpp, producer.hpp, consumer8.hpp.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "core/config8.hpp"
#include "core/elements.hpp"
#include "core/layouts.hpp"
#include "forward/args.hpp"

namespace flashhopper {

template <int kConfigIndex, class Element_>
struct Forward8Traits {
  using Args = Forward8Args;
  using Element = Element_;  // of Q and K
  using ElementV = element::e4m3;
  static constexpr bool kIs8Bit = true;
  // The sums of int8 products are exact integers. They start from the bits of 1.5 * 2^23, so that, below 2^22, they are
  // the bits of the float 1.5 * 2^23 + sum: no conversion is needed.
  static constexpr bool kIntegerScores = std::is_same_v<Element, element::int8>;
  using Score = std::conditional_t<kIntegerScores, int32_t, float>;

  static constexpr ForwardConfig kConfig = kForward8Configs[kConfigIndex];
  static constexpr bool kPingPong = kIntegerScores ? kConfig.ping_pong_int8 : kConfig.ping_pong;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kQStages = kConfig.q_stages;
  static constexpr int kWarpgroups = consumer_warpgroups(kConfig);
  static constexpr int kThreads = threads(kConfig);
  static constexpr int kBoxColumns = box_columns(kHeadDim, 1);
  static constexpr int kPartColumns = kConfig.partial_columns;
  static constexpr int kParts = kHeadDimV / kPartColumns;
  static constexpr int kSumColumns = sum_columns(kConfig);
  static constexpr int kRowsVt = kHeadDimV + kSumColumns;
  static_assert(127 * 127 * kHeadDim < (1 << 22), "an integer score would leave the float's mantissa");

  using LayoutQ = TileLayout<Element, kWarpgroupRows, kHeadDim, kQStages>;  // (64, head_dim, q_stages)
  using LayoutK = TileLayout<Element, kTileN, kHeadDim, kStages>;           // (tile_n, head_dim, stages)
  using LayoutVt = TileLayout<ElementV, kRowsVt, kTileN, kStages>;          // (head_dim_v + sum, tile_n, stages)
  // Of some rows of a stage: they follow one another because a row is no longer than a swizzle.
  template <int kRows>
  using LayoutVtPart = TileLayout<ElementV, kRows, kTileN, 1>;
  static_assert(kTileN <= 128);

  using MmaQK = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, Score,
                                 cute::Shape<cute::_64, cute::Int<kTileN>, cute::Int<kHeadDim>>>()));
  // The product of a part of V's columns; sums join the last.
  static constexpr int columns_of_part(int p) { return kPartColumns + (p + 1 == kParts ? kSumColumns : 0); }
  template <int kColumns>
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<ElementV, ElementV, float,
                                 cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kTileN>>>()));
  static_assert(cute::size<1>(typename MmaQK::AtomShape_MNK{}) == kTileN, "Q K^T must be one instruction wide");
  static_assert(cute::size<1>(typename MmaPV<kPartColumns>::AtomShape_MNK{}) == kPartColumns &&
                    cute::size<1>(typename MmaPV<kPartColumns + kSumColumns>::AtomShape_MNK{}) ==
                        kPartColumns + kSumColumns,
                "P V must be one instruction wide");
};

}  // namespace flashhopper
