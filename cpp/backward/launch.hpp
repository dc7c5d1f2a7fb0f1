// Launches one instance of the backward: preprocess, the main kernel, postprocess, on one stream.
// Before it: src/backward_dispatch.cpp, which filled the arguments. After it: rows.hpp, kernel.hpp.
#pragma once

#include "backward/kernel.hpp"
#include "backward/rows.hpp"
#include "core/launch.hpp"

namespace flashhopper {

template <class Traits>
cudaError_t launch_backward(BackwardArgs const& args, int grid, int device, cudaStream_t stream) {
  using Element = typename Traits::Element;
  static_assert(sizeof(BackwardStorage<Traits>) <= smem_bytes(Traits::kConfig), "barriers outgrew kBarrierBytes");
  constexpr int kSmemBytes = static_cast<int>(smem_bytes(Traits::kConfig));
  constexpr int kRowSmemBytes = Traits::kTileM * (Traits::kHeadDim + 8) * int{sizeof(Element)};
  static_assert(kRowSmemBytes <= 48 * 1024, "postprocess would need the opt-in for more shared memory");
  int const chunks = args.query_blocks.per_head * args.heads;
  int tile_m = Traits::kTileM, head_dim = Traits::kHeadDim;
  void* row_parameters[] = {const_cast<BackwardArgs*>(&args), &tile_m, &head_dim};
  void* parameters[] = {const_cast<BackwardArgs*>(&args)};

  cudaError_t error = launch<preprocess_kernel<Element>>(chunks, kRowThreads, row_parameters, 0, device, stream);
  if (error == cudaSuccess && grid > 0) {
    error =
        args.softcap.factor != 0.f
            ? launch<backward_kernel<Traits, true>>(grid, kBackwardThreads, parameters, kSmemBytes, device, stream)
            : launch<backward_kernel<Traits, false>>(grid, kBackwardThreads, parameters, kSmemBytes, device, stream);
  }
  if (error != cudaSuccess) return error;
  return launch<postprocess_kernel<Element>>(chunks, kRowThreads, row_parameters, kRowSmemBytes, device, stream);
}

}  // namespace flashhopper
