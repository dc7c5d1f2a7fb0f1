// The quantiser's kernels that know no 16-bit element type. Before it: quantize_dispatch.cpp.
#include "core/launch.hpp"
#include "quantize/column_means.hpp"
#include "quantize/transpose.hpp"

namespace flashhopper {

cudaError_t launch_column_means(MeansArgs const& args, int device, cudaStream_t stream, Start start) {
  int const grid = args.operands[0].batch_heads + args.operands[1].batch_heads;
  if (grid == 0) return cudaSuccess;
  void* parameters[] = {const_cast<MeansArgs*>(&args)};
  return launch<column_means_kernel>(grid, kMeanThreads, parameters, 0, device, stream, start);
}

cudaError_t launch_transpose_values(ValuesArgs const& args, int columns, int device, cudaStream_t stream) {
  if (args.blocks.tasks == 0) return cudaSuccess;
  void* parameters[] = {const_cast<ValuesArgs*>(&args), &columns};
  return launch<transpose_values_kernel>(args.blocks.tasks, kTransposeThreads, parameters, columns * kScaleBlock,
                                         device, stream);
}

}  // namespace flashhopper
