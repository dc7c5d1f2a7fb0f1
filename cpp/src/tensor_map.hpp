// Tensor maps: how TMA sees a (batch, seqlen, heads, head_dim) tensor. Used by dispatch.cpp.
#pragma once

#include <cuda.h>

#include "core/check.hpp"

namespace flashhopper {

// How rows of a sequence are found (core/seqlen.hpp). kDensePacks: rows of box_heads heads come in one box, and the
// dimensions are head_dim, head of a pack, row, pack, batch (core/row_map.hpp).
enum class RowAddressing { kDense, kDensePacks, kPacked };

struct TensorMapSpec {
  char const* name;  // for messages
  flashhopper_tensor tensor;
  int64_t batch, seqlen, heads, head_dim;  // packed: batch is not read, seqlen is the tensor's rows
  int32_t dtype;                           // flashhopper_dtype
  int box_rows, box_columns;               // what one TMA instruction moves; box_columns fills one swizzle row
  RowAddressing addressing;
  int box_heads = 1;
};

// FLASHHOPPER_OK when the driver offers cuTensorMapEncodeTiled.
flashhopper_status require_tma();

flashhopper_status encode_tensor_map(TensorMapSpec const& spec, CUtensorMap* map);

}  // namespace flashhopper
