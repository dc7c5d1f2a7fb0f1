// Types of one forward kernel, derived from a row of the config table and an element type.
// Before it: core/config.hpp. After it: storage.hpp, producer.hpp, consumer.hpp.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "core/config.hpp"
#include "core/elements.hpp"
#include "core/layouts.hpp"
#include "forward/args.hpp"

namespace flashhopper {

template <int kConfigIndex, class Element_>
struct ForwardTraits {
  using Args = ForwardArgs;
  using Element = Element_;
  using ElementV = Element;
  static constexpr bool kIs8Bit = false;
  static constexpr ForwardConfig kConfig = kForwardConfigs[kConfigIndex];
  static constexpr bool kPingPong = kConfig.ping_pong;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kQStages = kConfig.q_stages;
  static constexpr int kWarpgroups = consumer_warpgroups(kConfig);
  static constexpr int kThreads = threads(kConfig);
  static constexpr int kSumColumns = 0;
  static constexpr int kRowsVt = kHeadDimV;
  static constexpr int kBoxColumns = box_columns(kHeadDim);
  static constexpr int kBoxColumnsV = box_columns(kHeadDimV);

  using LayoutQ = TileLayout<Element, kWarpgroupRows, kHeadDim, kQStages>;     // (64, head_dim, q_stages)
  using LayoutK = TileLayout<Element, kTileN, kHeadDim, kStages>;              // (tile_n, head_dim, stages)
  using LayoutVt = TransposedTileLayout<Element, kTileN, kHeadDimV, kStages>;  // (head_dim_v, tile_n, stages)

  // S = Q K^T with both operands in shared memory, O += P V with P in registers; one consumer warpgroup each.
  using MmaQK = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<kTileN>, cute::Int<kHeadDim>>>()));
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<kHeadDimV>, cute::Int<kTileN>>, cute::GMMA::Major::K,
                                 cute::GMMA::Major::MN>()));
  // Without CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED CuTe would split odd widths into narrow instructions.
  static_assert(cute::size<1>(typename MmaQK::AtomShape_MNK{}) == kTileN, "Q K^T must be one instruction wide");
  static_assert(cute::size<1>(typename MmaPV::AtomShape_MNK{}) == kHeadDimV, "P V must be one instruction wide");
};

}  // namespace flashhopper
