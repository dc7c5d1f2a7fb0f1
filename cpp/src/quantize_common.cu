// The quantiser's kernel that knows no 16-bit element type. Before it: quantize_dispatch.cpp.
#include "core/launch.hpp"
#include "quantize/transpose.hpp"

namespace flashhopper {

cudaError_t launch_transpose_values(ValuesArgs const& args, int columns, int device, cudaStream_t stream) {
  if (args.blocks.tasks == 0) return cudaSuccess;
  void* parameters[] = {const_cast<ValuesArgs*>(&args), &columns};
  return launch<transpose_values_kernel>(args.blocks.tasks, kTransposeThreads, parameters, columns * kScaleBlock,
                                         device, stream);
}

}  // namespace flashhopper
