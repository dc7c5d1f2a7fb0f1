// Builds tensor maps through the driver function, which is looked up once so that the library never links libcuda.
#include "tensor_map.hpp"

#include <cudaTypedefs.h>

namespace flashhopper {
namespace {

struct Encoder {
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  cudaError_t error = cudaSuccess;
};

Encoder find_encoder() {
  Encoder found;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  found.error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  if (found.error == cudaSuccess && result == cudaDriverEntryPointSuccess) {
    found.encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }
  return found;
}

Encoder const& encoder() {
  static Encoder const found = find_encoder();
  return found;
}

// TMA wants every stride to be a positive multiple of 16 bytes; a dimension of extent 1 is never stepped along, so any
// legal stride will do for it.
cuuint64_t stride_bytes(int64_t stride, int64_t extent, int64_t contiguous) {
  return static_cast<cuuint64_t>((extent > 1 ? stride : contiguous) * 2);
}

}  // namespace

flashhopper_status require_tma() {
  if (encoder().encode != nullptr) return FLASHHOPPER_OK;
  if (encoder().error != cudaSuccess) return cuda_error("looking up cuTensorMapEncodeTiled", encoder().error);
  return set_error(
      FLASHHOPPER_CUDA_ERROR,
      "the NVIDIA driver does not offer cuTensorMapEncodeTiled: a driver for CUDA 12.0 or newer is needed");
}

flashhopper_status encode_tensor_map(TensorMapSpec const& spec, CUtensorMap* map) {
  FLASHHOPPER_RETURN_IF_ERROR(require_tma());
  // Innermost first: head_dim, seqlen, heads, batch. Empty tensors get one row that nobody loads.
  auto const at_least_one = [](int64_t extent) { return static_cast<cuuint64_t>(extent > 0 ? extent : 1); };
  int64_t const row = (spec.head_dim + 7) / 8 * 8;
  cuuint64_t const extents[4] = {at_least_one(spec.head_dim), at_least_one(spec.seqlen), at_least_one(spec.heads),
                                 at_least_one(spec.batch)};
  cuuint64_t const strides[3] = {stride_bytes(spec.tensor.row_stride, spec.seqlen, row),
                                 stride_bytes(spec.tensor.head_stride, spec.heads, row),
                                 stride_bytes(spec.tensor.batch_stride, spec.batch, row)};
  cuuint32_t const box[4] = {static_cast<cuuint32_t>(spec.box_columns), static_cast<cuuint32_t>(spec.box_rows), 1, 1};
  cuuint32_t const element_strides[4] = {1, 1, 1, 1};
  CUtensorMapDataType const type =
      spec.dtype == FLASHHOPPER_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  CUtensorMapSwizzle const swizzle = spec.box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUresult const result = encoder().encode(map, type, 4, spec.tensor.data, extents, strides, box, element_strides,
                                           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return FLASHHOPPER_OK;
  return set_error(FLASHHOPPER_INVALID_ARGUMENT, spec.name, " cannot be moved by TMA (CUresult ",
                   static_cast<int>(result), "): address ", spec.tensor.data, ", strides in bytes row ", strides[0],
                   ", head ", strides[1], ", batch ", strides[2],
                   "; the address and each stride must be multiples of 16 bytes, strides under 2^40: pass ", spec.name,
                   ".contiguous()");
}

}  // namespace flashhopper
