// Types of one backward kernel, derived from a row of the config table and an element type.
// Before it: core/backward_config.hpp. After it: storage.hpp, producer.hpp, key_consumer.hpp, column_consumer.hpp.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "core/dq_layout.hpp"
#include "core/elements.hpp"
#include "core/layouts.hpp"

namespace flashhopper {

template <int kConfigIndex, class Element_>
struct BackwardTraits {
  using Element = Element_;
  static constexpr BackwardConfig kConfig = kBackwardConfigs[kConfigIndex];
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kQStages = kConfig.q_stages;
  static constexpr int kDoutStages = kConfig.dout_stages;
  static constexpr bool kByKeys = kConfig.share == Share::kKeys;
  static constexpr int kExchangeTiles = exchange_tiles(kConfig);
  static constexpr int kBoxColumns = box_columns(kConfig, kHeadDim);
  static constexpr int kBoxColumnsV = box_columns(kConfig, kHeadDimV);
  // What one consumer warpgroup owns of dK, dV and dQ.
  static constexpr int kOwnColumns = kByKeys ? kHeadDim : kHeadDim / 2;
  static constexpr int kOwnColumnsV = kByKeys ? kHeadDimV : kHeadDimV / 2;
  // Columns of dQ that one product of a warpgroup gives.
  static constexpr int kDqParts = dq_parts(kConfig);
  static constexpr int kDqColumns = dq_columns(kTileM, kHeadDim) / kDqParts;

  template <int kRows, int kColumns, int kSlots, int kBox>
  using Tile = TileLayout<Element, kRows, kColumns, kSlots, kBox>;
  template <int kRows, int kColumns, int kSlots, int kBox>
  using Transposed = TransposedTileLayout<Element, kRows, kColumns, kSlots, kBox>;

  using LayoutQ = Tile<kTileM, kHeadDim, kQStages, kBoxColumns>;               // (tile_m, head_dim, q_stages)
  using LayoutQt = Transposed<kTileM, kHeadDim, kQStages, kBoxColumns>;        // (head_dim, tile_m, q_stages)
  using LayoutDO = Tile<kTileM, kHeadDimV, kDoutStages, kBoxColumnsV>;         // (tile_m, head_dim_v, dout_stages)
  using LayoutDOt = Transposed<kTileM, kHeadDimV, kDoutStages, kBoxColumnsV>;  // (head_dim_v, tile_m, dout_stages)
  using LayoutK = Tile<kTileN, kHeadDim, 1, kBoxColumns>;                      // (tile_n, head_dim, 1), also of dK
  using LayoutKt = Transposed<kTileN, kHeadDim, 1, kBoxColumns>;               // (head_dim, tile_n, 1)
  using LayoutV = Tile<kTileN, kHeadDimV, 1, kBoxColumnsV>;                    // (tile_n, head_dim_v, 1), also of dV
  using LayoutOwnDk = Tile<kWarpgroupRows, kHeadDim, 1, kBoxColumns>;          // by keys: dK of one warpgroup
  using LayoutP = Tile<kTileN, kTileM, kExchangeTiles, 64>;                    // (tile_n, tile_m, tiles): P^T or dS^T
  using LayoutPt = Transposed<kTileN, kTileM, kExchangeTiles, 64>;             // (tile_m, tile_n, tiles)

  template <int kN, int kK, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
  using MmaSS = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kN>, cute::Int<kK>>, kMajorA,
                                 kMajorB>()));
  template <int kN, int kK>
  using MmaRS = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kN>, cute::Int<kK>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

  static constexpr auto K = cute::GMMA::Major::K;
  static constexpr auto MN = cute::GMMA::Major::MN;
  using MmaScores = MmaSS<kTileM, kHeadDim, K, K>;         // S^T = K Q^T, 64 keys
  using MmaDp = MmaSS<kTileM, kHeadDimV, K, K>;            // dP^T = V dO^T
  using MmaDv = MmaRS<kOwnColumnsV, kTileM>;               // dV += P^T dO, P^T in registers
  using MmaDk = MmaRS<kOwnColumns, kTileM>;                // dK += dS^T Q, dS^T in registers
  using MmaDvShared = MmaSS<kOwnColumnsV, kTileM, K, MN>;  // the same, the first operand in shared memory
  using MmaDkShared = MmaSS<kOwnColumns, kTileM, K, MN>;
  using MmaDq = MmaSS<kDqColumns, kTileN, MN, MN>;  // dQ = dS K, 64 queries
};

}  // namespace flashhopper
