// Builds tensor maps through the driver function, which is looked up once so that the library never links libcuda.
#include "tensor_map.hpp"

#include <cudaTypedefs.h>

#include "core/seqlen.hpp"

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
cuuint64_t stride_bytes(int64_t stride, int64_t extent, int64_t contiguous, int element_bytes) {
  return static_cast<cuuint64_t>((extent > 1 ? stride : contiguous) * element_bytes);
}

struct ElementType {
  CUtensorMapDataType type;
  int bytes;
};
ElementType element_type(int32_t dtype) {
  switch (dtype) {
    case FLASHHOPPER_FP16:
      return {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2};
    case FLASHHOPPER_BF16:
      return {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2};
    default:  // e4m3 and int8: moved, never looked into
      return {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};
  }
}

// A box row is one swizzle row.
CUtensorMapSwizzle swizzle(int row_bytes) {
  return row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_32B;
}

constexpr int kRank = 5;

// What a tensor map is made of. The map depends on nothing else, so one made earlier serves again, whatever the memory
// holds by now.
struct Key {
  void* data;
  cuuint64_t extents[kRank];
  cuuint64_t strides[kRank - 1];
  cuuint32_t box[kRank];
  int32_t dtype;

  bool operator==(Key const&) const = default;

  size_t slot(size_t slots) const {
    uint64_t hash = reinterpret_cast<uintptr_t>(data) >> 4;
    for (uint64_t part : {extents[0], extents[1], strides[0], cuuint64_t{box[1]}}) {
      hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
    }
    return (hash >> 40) % slots;
  }
};

// Innermost dimension first. Empty tensors get one row that nobody loads.
Key make_key(TensorMapSpec const& spec, int element_bytes) {
  auto const at_least_one = [](int64_t extent) { return static_cast<cuuint64_t>(extent > 0 ? extent : 1); };
  cuuint64_t const columns = at_least_one(spec.head_dim), rows = at_least_one(spec.seqlen);
  cuuint64_t const heads = at_least_one(spec.heads), batch = at_least_one(spec.batch);
  int64_t const contiguous = (spec.head_dim + 15) / 16 * 16;
  cuuint64_t const row_stride = stride_bytes(spec.tensor.row_stride, spec.seqlen, contiguous, element_bytes);
  cuuint64_t const head_stride = stride_bytes(spec.tensor.head_stride, spec.heads, contiguous, element_bytes);
  cuuint64_t const batch_stride = stride_bytes(spec.tensor.batch_stride, spec.batch, contiguous, element_bytes);
  auto const box_columns = static_cast<cuuint32_t>(spec.box_columns), box_rows = static_cast<cuuint32_t>(spec.box_rows);
  cuuint32_t const pack = static_cast<cuuint32_t>(spec.box_heads);
  switch (spec.addressing) {
    case RowAddressing::kDense:
      return {spec.tensor.data,
              {columns, rows, heads, batch, 1},
              {row_stride, head_stride, batch_stride, batch_stride},
              {box_columns, box_rows, 1, 1, 1},
              spec.dtype};
    case RowAddressing::kDensePacks:
      return {spec.tensor.data,
              {columns, pack, rows, heads / pack, batch},
              {head_stride, row_stride, pack * head_stride, batch_stride},
              {box_columns, pack, box_rows, 1, 1},
              spec.dtype};
    case RowAddressing::kPacked:
      break;
  }
  return {spec.tensor.data,
          {columns, kRaggedRows, heads, kRaggedRows + 1, kRaggedRows + 1},
          {row_stride, head_stride, row_stride, wrap_stride(row_stride)},
          {box_columns, box_rows, 1, 1, 1},
          spec.dtype};
}

// Encoding costs the host more than finding: each thread remembers its last maps.
struct Remembered {
  Key key{};
  CUtensorMap map{};
};
constexpr size_t kRemembered = 256;
thread_local Remembered remembered[kRemembered];

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
  ElementType const element = element_type(spec.dtype);
  Key const key = make_key(spec, element.bytes);
  Remembered& entry = remembered[key.slot(kRemembered)];
  if (entry.key == key) {
    *map = entry.map;
    return FLASHHOPPER_OK;
  }
  cuuint32_t const element_strides[kRank] = {1, 1, 1, 1, 1};
  auto const encode = [&] {
    return encoder().encode(map, element.type, kRank, spec.tensor.data, key.extents, key.strides, key.box,
                            element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle(spec.box_columns * element.bytes),
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has made no runtime call yet, such as one of torch's autograd threads, has no current context.
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error != cudaSuccess) return cuda_error("cudaSetDevice", error);
    result = encode();
  }
  if (result == CUDA_SUCCESS) {
    entry = {key, *map};
    return FLASHHOPPER_OK;
  }
  return set_error(FLASHHOPPER_INVALID_ARGUMENT, spec.name, " cannot be moved by TMA (CUresult ",
                   static_cast<int>(result), "): address ", spec.tensor.data, ", strides in bytes row ",
                   spec.tensor.row_stride * element.bytes, ", head ", spec.tensor.head_stride * element.bytes,
                   ", batch ", spec.tensor.batch_stride * element.bytes,
                   "; the address and each stride must be multiples of 16 bytes, strides under 2^40: pass ", spec.name,
                   ".contiguous()");
}

}  // namespace flashhopper
