// The one kernel that packed batches need besides attention itself. Before it: forward_dispatch.cpp.
#include "core/launch.hpp"
#include "packed/list.hpp"

namespace flashhopper {

cudaError_t launch_list_blocks(ListArgs const& args, int device, cudaStream_t stream) {
  void* parameters[] = {const_cast<ListArgs*>(&args)};
  return launch<list_blocks_kernel>(1, kListThreads, parameters, 0, device, stream, Start::kWithPrevious);
}

}  // namespace flashhopper
