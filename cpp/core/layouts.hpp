// Shared-memory layouts of the tiles. TMA writes a tile as boxes of one swizzle row width each; the same bytes are read
// by wgmma as a K-major operand (Q, K) or, seen transposed, as an MN-major one (V). Host tests prove the bijections.
#pragma once

#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "core/config.hpp"

namespace flashhopper {

template <class Element, int kBoxColumns, int kBytes = kBoxColumns * int{sizeof(Element)}>
using RowMajorAtom = std::conditional_t<
    kBytes == 128, cute::GMMA::Layout_K_SW128_Atom<Element>,
    std::conditional_t<kBytes == 64, cute::GMMA::Layout_K_SW64_Atom<Element>, cute::GMMA::Layout_K_SW32_Atom<Element>>>;
template <class Element, int kBoxColumns>
using TransposedAtom = std::conditional_t<kBoxColumns == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                          cute::GMMA::Layout_MN_SW64_Atom<Element>>;

// (rows, head_dim, stages): box after box, kRows rows of kBoxColumns each.
template <class Element, int kRows, int kHeadDim, int kStages, int kBoxColumns = box_columns(kHeadDim, sizeof(Element))>
using TileLayout = decltype(cute::tile_to_shape(
    RowMajorAtom<Element, kBoxColumns>{}, cute::Shape<cute::Int<kRows>, cute::Int<kHeadDim>, cute::Int<kStages>>{}));

// The same bytes as (head_dim, rows, stages).
template <class Element, int kRows, int kHeadDim, int kStages, int kBoxColumns = box_columns(kHeadDim)>
using TransposedTileLayout = decltype(cute::tile_to_shape(
    TransposedAtom<Element, kBoxColumns>{}, cute::Shape<cute::Int<kHeadDim>, cute::Int<kRows>, cute::Int<kStages>>{},
    cute::Step<cute::_2, cute::_1, cute::_3>{}));

// Registers of probabilities as the A operand of P V: a score accumulator's flat order is already the operand's.
template <int kColumns>
using ProbabilityLayout =
    cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<kColumns / 16>>,
                 cute::Stride<cute::Stride<cute::_1, cute::_2, cute::_4>, cute::_0, cute::_8>>;

// The same in 8 bits, where a thread's operand is four keys in a row and its accumulator two and two: packed in pairs
// of accumulator groups, registers are in the operand's order if each 16 keys of V stand in the order of
// value_position.
template <int kColumns>
using ProbabilityLayout8 =
    cute::Layout<cute::Shape<cute::Shape<cute::_4, cute::_2, cute::_2>, cute::_1, cute::Int<kColumns / 32>>,
                 cute::Stride<cute::Stride<cute::_1, cute::_4, cute::_8>, cute::_0, cute::_16>>;

}  // namespace flashhopper
